"""What checkpoints with Mamba-2 mixers have in common (Dao & Gu 2024, arXiv:2405.21060).

Mamba-2 is linear attention with one decay per head: C are the queries, B the keys, each shared by a group of heads, and
x times a time step the values. One matrix projects all of it, rows [z | x | B | C | dt]; one convolution runs over
[x | B | C].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlxlin.backend import mx
from mlxlin.errors import CheckpointError
from mlxlin.models.common_layout import MIXER
from mlxlin.models.config import Config, given, need, short
from mlxlin.models.rules import Weight
from mlxlin.models.spec import DecaySpec, LinearSpec, NormSpec, OutputSpec
from mlxlin.models.values import CONV, Operation, Place


def parts(array: mx.array, place: Place) -> dict[str, mx.array]:
    """Rows of a projection [z | x | B | C | dt], or of what belongs to the convolution, [x | B | C], by name.

    Raises:
        CheckpointError: it has another number of rows.
    """
    spec = place.mixer(LinearSpec)
    values, keys = spec.value_heads * spec.value_dim, spec.heads * spec.key_dim
    sizes = {"x": values, "B": keys, "C": keys}
    whole = {"z": values, **sizes, "dt": spec.value_heads}
    sizes = next((s for s in (sizes, whole) if sum(s.values()) == array.shape[0]), {})
    if not sizes:
        raise CheckpointError(f"A projection of Mamba-2 has {array.shape[0]} rows, expected {sum(whole.values())}.")
    found, start = {}, 0
    for name, size in sizes.items():
        found[name] = array[start : start + size]
        start += size
    return found


def _rows(*names: str) -> Operation:
    def apply(arrays: list[mx.array], place: Place) -> mx.array:
        (array,) = arrays
        found = parts(array, place)
        return mx.concatenate([found[name] for name in names], axis=0)

    return Operation(apply, rowwise=True)


GATE, QKV, STEP = _rows("z"), _rows("C", "B", "x"), _rows("dt")
_PROJECTED = {"qkv": QKV, "gate": GATE, "decay": STEP}
QKV_CONV = Operation(lambda arrays, place: CONV.apply([QKV.apply(arrays, place)], place))


def mixer_weights(source: str) -> tuple[Weight, ...]:
    """The tensors of a mixer stored under `source`."""
    changed = {
        **{f"{t}.{kind}": (f"in_proj.{kind}", o) for t, o in _PROJECTED.items() for kind in ("weight", "bias")},
        "conv.weight": ("conv1d.weight", QKV_CONV),
        "conv.bias": ("conv1d.bias", QKV),
    }
    same = {"skip": "D", "out.weight": "out_proj.weight", "out.bias": "out_proj.bias"}
    same |= {name: name for name in ("A_log", "dt_bias", "norm.weight")}
    return (
        *(Weight(MIXER + t, source + name, operation, kind="linear") for t, (name, operation) in changed.items()),
        *(Weight(MIXER + t, source + name, kind="linear") for t, name in same.items()),
    )


def mixer(
    *,
    heads: int,
    head_dim: int,
    groups: int,
    state_dim: int,
    eps: float,
    taps: int,
    conv_bias: bool,
    bias: bool,
    limits: Sequence[Any] | None,
) -> LinearSpec:
    """The usual mixer: a gate before a norm over each group of heads.

    Args:
        heads, head_dim: of x.
        groups: heads of B and C, each of `state_dim`.
        bias: of both projections.
        limits: shortest and longest time step as a config gives them, numbers or {"__float__": "Infinity"}.

    Raises:
        CheckpointError: the heads do not divide into the groups.
    """
    if heads % groups:
        raise CheckpointError(f"config.json: {heads} Mamba-2 heads do not divide into {groups} groups.")
    shortest, longest = _numbers(limits or (0.0, "inf"))
    return LinearSpec(
        rule="decay",
        heads=groups,
        value_heads=heads,
        key_dim=state_dim,
        value_dim=head_dim,
        scale=1.0,
        output=OutputSpec(NormSpec(eps), gate="silu", bias=bias, joint=True, groups=groups, gate_first=True),
        conv=taps,
        conv_bias=conv_bias,
        qk_activation="silu",
        v_activation="silu",
        decay=DecaySpec(
            "softplus",
            scales_values=True,
            shortest=shortest,
            longest=None if longest == float("inf") else longest,
        ),
        skip="head",
        in_bias=bias,
        out_bias=bias,
    )


def expanded(config: Config, eps: float, width: int | None = None) -> LinearSpec:
    """The mixer of configs whose keys begin with mamba_: Bamba, Falcon-H1, Granite 4; `width` of x where it is given.

    Raises:
        CheckpointError: sizes that do not fit each other.
    """
    heads = need(config, "mamba_n_heads")
    whole = need(config, "hidden_size") * given(config, "mamba_expand", 2) if width is None else width
    automatic = config.get("mamba_d_head") in (None, "auto")
    head_dim = whole // heads if automatic else need(config, "mamba_d_head")
    if heads * head_dim != whole:
        known = "hidden_size x mamba_expand" if width is None else "mamba_d_ssm"
        raise CheckpointError(f"config.json: mamba_n_heads x mamba_d_head is not {known}, {whole}.")
    return mixer(
        heads=heads,
        head_dim=head_dim,
        groups=given(config, "mamba_n_groups", 1),
        state_dim=given(config, "mamba_d_state", 256),
        eps=eps,
        taps=given(config, "mamba_d_conv", 4),
        conv_bias=given(config, "mamba_conv_bias", True),
        bias=given(config, "mamba_proj_bias", False),
        limits=config.get("time_step_limit"),
    )


def _numbers(limits: Any) -> tuple[float, float]:
    try:
        shortest, longest = (float(limit["__float__"] if isinstance(limit, dict) else limit) for limit in limits)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise CheckpointError(
            f"config.json has {short(limits)} as time_step_limit or dt_limit, where two numbers belong."
        ) from error
    return shortest, longest
