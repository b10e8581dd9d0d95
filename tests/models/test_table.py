"""docs/families.md lists every family and every variant that is tested."""

from __future__ import annotations

from mlxlin.models import FAMILIES
from tests.models.table import PAGE, variants


def test_every_family_and_variant_is_in_the_table() -> None:
    lines = {line.split("`")[1]: line for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    found = variants()
    assert set(FAMILIES) == set(found) == set(lines)
    for family, names in found.items():
        for name in names:
            assert (name.removeprefix(family).lstrip("-") or "default") in lines[family]
