"""The tiny models that the source implementations make: of each family one, and one for each of its variants.

`CASES` names them as their fixtures: a family, then its variant behind a hyphen. They are data and import no source.
"""

from __future__ import annotations

from tests.parity.cases import convolution, delta, fla, latent, lightning, mamba
from tests.parity.cases.case import Case, Sizes

CASES: dict[str, Case] = {
    **delta.CASES,
    **latent.CASES,
    **lightning.CASES,
    **mamba.CASES,
    **convolution.CASES,
    **fla.CASES,
}
__all__ = ["CASES", "Case", "Sizes"]
