"""The recurrence family as a table, and the arguments each rule takes.

Every rule updates a matrix-valued state S [V, K] per value head and reads it after the update:

    S_t = S_{t-1} (diag(exp(g_t)) + a_t b_t^T) + u_t k_t^T        y_t = S_t q_t

A rule is a choice of decay (none, one per head, one per key channel, or one per value channel, which then scales the
rows of S instead) and of write:

    add        u = v
    delta      the answer of the decayed state S' to k is corrected towards v: S = S' + beta (v - S' k) k^T;
               with a reader, that of the state before the decay to a key a of its own: S = S' + beta (v - S a) k^T
    low_rank   the caller's own a and b; a reads the state before the decay
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Literal

from mlxlin.backend import mx
from mlxlin.errors import InputError

DecayKind = Literal["none", "head", "channel", "value"]
WriteKind = Literal["add", "delta", "low_rank"]


@dataclass(frozen=True)
class Rule:
    """One member of the family.

    Attributes:
        name: the name `run` knows it by.
        decays: the decay kinds it accepts.
        write: how a token enters the state.
        substeps: whether k, v and beta may carry several sub-tokens per token.
        normalizable: whether `normalize=True` is defined for it.
        reader: whether a delta write corrects what the state before the decay answers to a key `a` of its own.
        source: where it comes from and who uses it.
    """

    name: str
    decays: tuple[DecayKind, ...]
    write: WriteKind
    source: str
    substeps: bool = False
    normalizable: bool = False
    reader: bool = False


_TABLE = (
    Rule("linear", ("none",), "add", "Linear attention, arXiv:2006.16236", normalizable=True),
    Rule("decay", ("head",), "add", "RetNet arXiv:2307.08621, Lightning arXiv:2401.04658, Mamba-2 arXiv:2405.21060"),
    Rule("gated", ("channel",), "add", "GLA arXiv:2312.06635, HGRN2 arXiv:2404.07904"),
    Rule("gated_values", ("value",), "add", "Gated slot attention, arXiv:2409.07146"),
    Rule("delta", ("none",), "delta", "DeltaNet, arXiv:2406.06484"),
    Rule("gated_delta", ("head",), "delta", "Gated DeltaNet, arXiv:2412.06464: Qwen3-Next, Qwen3.5, OLMo-Hybrid"),
    Rule("comba", ("head",), "delta", "Comba, arXiv:2506.02475", reader=True),
    Rule("kda", ("channel",), "delta", "Kimi Delta Attention, arXiv:2510.26692"),
    Rule("delta_product", ("none", "head"), "delta", "DeltaProduct, arXiv:2502.10297", substeps=True),
    Rule("dplr", ("head", "channel"), "low_rank", "RWKV-7, arXiv:2503.14456"),
)
RULES: Mapping[str, Rule] = MappingProxyType({rule.name: rule for rule in _TABLE})

FLOATS = (mx.float32, mx.float16, mx.bfloat16)


@dataclass(frozen=True)
class Inputs:
    """The checked arguments of one call, with their sizes.

    Attributes:
        q: [B, T, H, K].
        k: [B, T n, H, K], n sub-tokens per token (1 but for `delta_product`).
        v: [B, T n, HV, V].
        g: natural log of the decay, float32 [B, T, HV], [B, T, HV, K] or [B, T, HV, V]; None without decay.
        beta: [B, T n, HV] for the delta writes.
        a, b: [B, T, H, K] for the low-rank write; a alone where the rule has a reader.
        S: float32 [B, HV, V, K].
        Z: float32 [B, HV, K] where the output is normalised, else None.
        lengths: int32 [B], how many tokens of each row are real; None where all are.
    """

    rule: Rule
    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array | None
    beta: mx.array | None
    a: mx.array | None
    b: mx.array | None
    S: mx.array
    Z: mx.array | None
    lengths: mx.array | None

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def tokens(self) -> int:
        return self.q.shape[1]

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    @property
    def value_heads(self) -> int:
        return self.v.shape[2]

    @property
    def substeps(self) -> int:
        return self.k.shape[1] // self.tokens if self.tokens else 1

    @property
    def decay(self) -> DecayKind:
        if self.g is None:
            return "none"
        if self.g.ndim == 3:
            return "head"
        return "value" if "value" in self.rule.decays else "channel"


def find(name: str) -> Rule:
    """The rule of that name.

    Raises:
        InputError: there is none; the nearest names are suggested.
    """
    if name in RULES:
        return RULES[name]
    near = get_close_matches(str(name), RULES, n=1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of: {', '.join(RULES)}."
    raise InputError(f"There is no recurrence rule {name!r}", hint)


def check(
    name: str,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    g: mx.array | None = None,
    beta: mx.array | None = None,
    a: mx.array | None = None,
    b: mx.array | None = None,
    state: mx.array | tuple[mx.array, mx.array] | None = None,
    lengths: mx.array | None = None,
    normalize: bool = False,
) -> Inputs:
    """Check shapes and dtypes (never values, which would end laziness) and fill in a zero state.

    Raises:
        InputError: an argument is missing, superfluous, or of the wrong shape or dtype.
    """
    rule = find(name)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "a": a, "b": b, "lengths": lengths}
    for what, array in given.items():
        if not isinstance(array, mx.array) and not (array is None and what not in "qkv"):
            raise InputError(f"{rule.name}: {what} is {type(array).__name__}", "Give an mx.array.")
    _check_sizes(rule, q, k, v)
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    n = k.shape[1]
    _check_presence(rule, g, beta, a, b, normalize)
    expected = {"beta": (beta, (B, n, HV)), "a": (a, (B, T, H, K)), "b": (b, (B, T, H, K)), "lengths": (lengths, (B,))}
    for what, (array, shape) in expected.items():
        if array is not None:
            _check_shape(rule, what, array, shape)
    if g is not None:
        _check_decay(rule, g, (B, T, HV), K, V)
    for what, array in {"q": q, "k": k, "v": v, "beta": beta, "a": a, "b": b}.items():
        if array is not None and array.dtype not in FLOATS:
            raise InputError(f"{rule.name}: {what} is {array.dtype}", "Use float32, float16 or bfloat16.")
    if lengths is not None and not mx.issubdtype(lengths.dtype, mx.integer):
        raise InputError(f"{rule.name}: lengths is {lengths.dtype}", "Use int32.")
    S, Z = _check_state(rule, state, (B, HV, V, K), normalize)
    return Inputs(rule, q, k, v, g, beta, a, b, S, Z, lengths)


def _check_sizes(rule: Rule, q: mx.array, k: mx.array, v: mx.array) -> None:
    """q, k and v are four-dimensional and agree with each other."""
    layouts = {"q": (q, "[B, T, H, K]"), "k": (k, "[B, T, H, K]"), "v": (v, "[B, T, HV, V]")}
    for what, (array, layout) in layouts.items():
        if array.ndim != 4:
            raise InputError(f"{rule.name}: {what} has shape {array.shape}", f"It must be {layout}.")
    B, T, H, K = q.shape
    n = k.shape[1] // T if rule.substeps and T else 1
    _check_shape(rule, "k", k, (B, T * n, H, K))
    if v.shape[:2] != k.shape[:2]:
        raise InputError(f"{rule.name}: v {v.shape} and k {k.shape} differ in batch or tokens")
    if rule.substeps and T and n < 1:
        raise InputError(f"{rule.name}: k has {k.shape[1]} sub-tokens for {T} tokens", "Give n sub-tokens per token.")
    if H == 0 or v.shape[2] % H or v.shape[2] == 0:
        raise InputError(
            f"{rule.name}: {v.shape[2]} value heads do not divide over {H} key heads",
            "Value head h reads key head h // (HV / H), so HV must be a multiple of H.",
        )


def _check_presence(
    rule: Rule, g: mx.array | None, beta: mx.array | None, a: mx.array | None, b: mx.array | None, normalize: bool
) -> None:
    """Every argument the rule needs is there, and none that it would ignore."""
    takes_g = rule.decays != ("none",)
    wanted = {
        "g": (g, takes_g, takes_g and "none" not in rule.decays),
        "beta": (beta, rule.write == "delta", rule.write == "delta"),
        "a": (a, rule.write == "low_rank" or rule.reader, rule.write == "low_rank" or rule.reader),
        "b": (b, rule.write == "low_rank", rule.write == "low_rank"),
    }
    for what, (array, taken, needed) in wanted.items():
        if array is None and needed:
            raise InputError(f"{rule.name} needs {what}")
        if array is not None and not taken:
            raise InputError(f"{rule.name} takes no {what}", "Choose the rule that does, or leave it out.")
    if normalize and not rule.normalizable:
        raise InputError(f"{rule.name} has no normaliser", "normalize=True is defined for 'linear'.")


def _check_shape(rule: Rule, what: str, array: mx.array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise InputError(f"{rule.name}: {what} has shape {array.shape}, expected {shape}")


def _check_decay(rule: Rule, g: mx.array, head: tuple[int, int, int], K: int, V: int) -> None:
    """g is float32 and of a shape the rule accepts."""
    shapes = {"head": head, "channel": (*head, K), "value": (*head, V)}
    allowed = [shapes[kind] for kind in rule.decays if kind in shapes]
    if g.shape not in allowed:
        raise InputError(f"{rule.name}: g has shape {g.shape}, expected {' or '.join(map(str, allowed))}")
    if g.dtype != mx.float32:
        raise InputError(
            f"{rule.name}: g is {g.dtype}; in half precision exp(-0.001) rounds to 1",
            "Compute the log decay in float32.",
        )


def _check_state(
    rule: Rule, state: mx.array | tuple[mx.array, mx.array] | None, shape: tuple[int, int, int, int], normalize: bool
) -> tuple[mx.array, mx.array | None]:
    """The state as (S, Z), zeros where none was given."""
    B, HV, _, K = shape
    if state is None:
        return mx.zeros(shape), mx.zeros((B, HV, K)) if normalize else None
    if normalize != isinstance(state, tuple):
        raise InputError(
            f"{rule.name}: state is {'a tuple' if isinstance(state, tuple) else 'one array'}",
            "With normalize=True the state is (S, Z), otherwise S alone.",
        )
    S, Z = state if isinstance(state, tuple) else (state, None)
    _check_shape(rule, "state", S, shape)
    if Z is not None:
        _check_shape(rule, "normaliser state", Z, (B, HV, K))
    for array in (S,) if Z is None else (S, Z):
        if array.dtype != mx.float32:
            raise InputError(f"{rule.name}: the state is {array.dtype}", "A recurrent state is float32, always.")
    return S, Z
