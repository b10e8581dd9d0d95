"""Models: a declaration (`spec`), its parameters (`weights`), and the decoder built from both.

`find` picks the family module for a checkpoint's config; everything else follows from what that module declares:

    family = find(config)
    plan = translate(family, family.spec(config), tensors)
    model = Model(plan.spec, {target.name: target.read() for target in plan.targets})
"""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import cast

from mlxlin.errors import CheckpointError, UnsupportedError
from mlxlin.models.config import Config, given
from mlxlin.models.decoder import Model, parameters
from mlxlin.models.params import Parameter, QuantSpec, Role
from mlxlin.models.spec import ModelSpec
from mlxlin.models.weights import Family, Plan, Target, Tensor, translate

# A family is a file of this folder that says what it serves; adding one changes no other file.
FAMILIES = tuple(
    sorted(path.stem for path in Path(__file__).parent.glob("*.py") if "\nSERVES" in path.read_text(encoding="utf-8"))
)


def family(name: str) -> Family:
    """The family module called `name`, as stored in `ModelSpec.family`.

    Raises:
        UnsupportedError: there is none.
    """
    if name not in FAMILIES:
        raise UnsupportedError(f"There is no model family '{name}'.", hint="Use a newer mlxlin.")
    return cast(Family, importlib.import_module(f"mlxlin.models.{name}"))


def find(config: Config) -> Family:
    """The family module that reads checkpoints with this config.json.

    Raises:
        CheckpointError: the config names no model type.
        UnsupportedError: nobody reads this model type; names the nearest one that is read.
    """
    model_type = config.get("model_type", _unnamed(config))
    if not isinstance(model_type, str):
        raise CheckpointError("config.json has no 'model_type'.", hint="Is this the folder of a language model?")
    architectures = given(config, "architectures", [], list)
    served: dict[str, list[str | None]] = {}
    for module in map(family, FAMILIES):
        for kind, architecture in module.SERVES:
            if kind == model_type and (architecture is None or architecture in architectures):
                return module
            served.setdefault(kind, []).append(architecture)
    if model_type in served:
        readable = ", ".join(str(a) for a in served[model_type])
        raise UnsupportedError(
            f"model_type '{model_type}' with architecture {architectures} is not supported.",
            hint=f"Read is {readable}.",
        )
    nearest = difflib.get_close_matches(model_type, served, n=1, cutoff=0.0)
    raise UnsupportedError(
        f"model_type '{model_type}' is not supported.",
        hint=f"The nearest one is '{nearest[0]}'. Supported: {', '.join(sorted(served))}.",
    )


def _unnamed(config: Config) -> str | None:
    """The model type of a config that names none: those of the first Mamba releases name the kind of their layers."""
    ssm = config.get("ssm_cfg")
    return str(ssm.get("layer", "Mamba1")).lower() if isinstance(ssm, dict) else None


__all__ = [
    "FAMILIES",
    "Family",
    "Model",
    "ModelSpec",
    "Parameter",
    "Plan",
    "QuantSpec",
    "Role",
    "Target",
    "Tensor",
    "family",
    "find",
    "parameters",
    "translate",
]
