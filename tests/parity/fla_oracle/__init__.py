"""flash-linear-attention on a CPU without Triton: its models, with every kernel replaced by plain torch.

`install()` must run before anything imports `fla`. A stand-in `triton` package lets fla's modules be imported; then the
kernels that a forward pass would launch are replaced, in every module that imported them by name, by their definition:
one recurrence in float64, and torch's own norms, convolutions and activations. A kernel that was overlooked raises.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import types
import warnings

import torch

from tests.parity.fla_oracle import modules, recurrences
from tests.parity.fla_oracle.fake_triton import FakeTriton


def install() -> types.ModuleType:
    """Make fla importable and plain; returns the `fla` package."""
    # torch asks once whether there is a triton, and must hear no.
    for name in ("torch._dynamo", "torch._inductor.utils", "torch._inductor.runtime.hints", "transformers"):
        importlib.import_module(name)
    triton_check = importlib.import_module("torch.utils._triton")
    triton_check.has_triton_package()
    triton_check.has_triton()
    torch.compile = lambda f=None, *args, **options: f if f is not None else (lambda g: g)  # type: ignore[assignment]
    sys.meta_path.insert(0, FakeTriton())
    for name in FakeTriton.contents:
        importlib.import_module(name)
    flash = types.ModuleType("flash_attn")
    flash.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    flash.flash_attn_func = flash.flash_attn_varlen_func = modules.attention  # type: ignore[attr-defined]
    sys.modules["flash_attn"] = flash
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fla = importlib.import_module("fla")
        for name in ("fla.layers", "fla.models"):
            importlib.import_module(name)
    modules.replace()
    for name, module in list(sys.modules.items()):
        if module is not None and name.startswith(("fla.layers", "fla.models", "fla.modules")):
            for attribute, function in {**modules.FUNCTIONS, **recurrences.KERNELS}.items():
                if attribute in vars(module):
                    setattr(module, attribute, function)
    return fla
