"""Launchers of the small kernels between a model's matrix products."""

from __future__ import annotations

from functools import cache

from mlxlin.backend import mx

from .decode import ACTIVATION
from .kernels import launch, literal, view
from .mixer import Activation

MOST_EXPERTS = 512
_NORM_FILES = ("mixer", "norm")
_ROW = "threadgroup_position_in_grid.x, thread_position_in_threadgroup.x"
_GROUP = "simdgroup_index_in_threadgroup, thread_index_in_simdgroup"


def add_norm(
    x: mx.array,
    residual: mx.array,
    weight: mx.array,
    eps: float,
    *,
    centered: bool = False,
    bias: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """x + residual [B, T, D], and its RMS norm, or where `centered` its layer norm, times `weight` [D] plus `bias`."""
    B, T, D = x.shape
    threads = _threads(D)
    arrays = {
        "x": x[:, :, None],
        "residual": residual[:, :, None],
        "weight": weight[None, None, None],
        "bias": None if bias is None else bias[None, None, None],
    }
    body = _add_norm(D, eps, centered, bias is not None)
    outputs = {name: ((B, T, D), x.dtype) for name in ("total", "normed")}
    grid = (threads * B * T, 1, 1)
    total, normed = launch("add_norm", _NORM_FILES, body, {**arrays, "T": T}, outputs, grid, (threads, 1, 1))
    return total, normed


@cache
def _add_norm(D: int, eps: float, centered: bool, biased: bool) -> str:
    views = ", ".join(view(name, name != "bias" or biased) for name in ("x", "residual", "weight", "bias"))
    return (
        "threadgroup float scratch[32]; "
        f"add_norm<{str(centered).lower()}>({views}, T, {D}, {literal(eps)}, total, normed, scratch, {_ROW}, "
        f"{_threads(D)}, {_GROUP});"
    )


def gated_norm(
    y: mx.array,
    gate: mx.array | None,
    weight: mx.array | None,
    eps: float | None,
    *,
    bias: mx.array | None = None,
    centered: bool = False,
    activation: Activation = "none",
    groups: int = 1,
    gate_first: bool = False,
    skip: mx.array | None = None,
    v: mx.array | None = None,
    lengths: mx.array | None = None,
) -> mx.array:
    """Norm of each of `groups` equal parts of y [B, T, C], gated by activation(gate) [B, T, C].

    Args:
        weight, bias: [C], or [C / groups], the same for each part; None for one and zero.
        eps: of the norm; None for the gate alone.
        centered: a layer norm, else an RMS norm, which has no bias.
        gate_first: gate before the norm (Mamba-2) instead of after it.
        skip, v: before all that skip v is added to y, v [B, T, H, V] with C = H V; skip [H, V] or [B, T, H, V], or
            with a last axis of one.
        lengths: real tokens of each row [B]; the others come out as zero.
    """
    B, T, C = y.shape
    threads, V = _threads(C // groups), C if v is None else v.shape[3]
    arrays = {
        "x": y[:, :, None],
        "skip": None if skip is None else mx.broadcast_to(skip, (B, T, C // V, V)),
        "v": None if v is None else v.reshape(B, T, 1, C),
        "gate": None if gate is None else gate[:, :, None],
    }
    arrays |= {name: _of_parts(z, groups, C // groups) for name, z in (("weight", weight), ("bias", bias))}
    arrays["lengths"] = lengths
    given = tuple(name for name, array in arrays.items() if array is not None)
    body = _gated_norm(C // groups, groups, V, eps, activation, gate_first, centered, given)
    grid = (threads * B * T * groups, 1, 1)
    outputs = {"y": ((B, T, C), y.dtype)}
    return launch("gated_norm", _NORM_FILES, body, {**arrays, "T": T}, outputs, grid, (threads, 1, 1))[0]


def _of_parts(z: mx.array | None, groups: int, width: int) -> mx.array | None:
    """z [groups width] or [width] by part; a view: the kernel follows its strides."""
    return None if z is None else mx.broadcast_to(z.reshape(1, 1, -1, width), (1, 1, groups, width))


@cache
def _gated_norm(
    width: int,
    groups: int,
    V: int,
    eps: float | None,
    activation: Activation,
    gate_first: bool,
    centered: bool,
    given: tuple[str, ...],
) -> str:
    names = ("x", "skip", "v", "gate", "weight", "bias", "lengths")
    views = ", ".join(view(name, name in given) for name in names)
    flags = f"{str(eps is not None).lower()}, {str(centered).lower()}"
    kind = f"{flags}, {ACTIVATION[activation]}, {str(gate_first).lower()}, {V}"
    return (
        f"threadgroup float scratch[32]; gated_norm<{kind}>({views}, T, {groups}, {width}, {literal(eps or 0.0)}, y, "
        f"scratch, {_ROW}, {_threads(width)}, {_GROUP});"
    )


def router_topk(
    logits: mx.array,
    top: int,
    *,
    score: str = "softmax",
    correction: mx.array | None = None,
    groups: int = 1,
    groups_kept: int = 1,
    normalized: bool = True,
    sum_eps: float = 1e-20,
    factor: float = 1.0,
    dtype: mx.Dtype = mx.float32,
) -> tuple[mx.array, mx.array]:
    """The experts of each token, best first: indices uint32 [B, T, top] and weights in `dtype`.

    Args:
        logits: [B, T, E], E at most `MOST_EXPERTS`.
        score: "softmax" or "sigmoid".
        correction: [E], added to the scores for the choice alone.
        groups, groups_kept: only experts of the best groups (by the sum of their two best scores) are chosen from.
        normalized: weights are divided by their sum + `sum_eps`.
        factor: on the weights.
    """
    B, T, E = logits.shape
    arrays = {"logits": logits[:, :, None], "correction": None if correction is None else correction[None, None, None]}
    views = f"{view('logits')}, {view('correction', correction is not None)}"
    flags = f"{str(score == 'softmax').lower()}, {str(normalized).lower()}"
    body = (
        f"router_topk<{E}, {top}, {groups}, {groups_kept}, {flags}>({views}, T, {literal(sum_eps)}, "
        f"{literal(factor)}, indices, weights, thread_position_in_grid.y, thread_index_in_simdgroup);"
    )
    outputs = {"indices": ((B, T, top), mx.uint32), "weights": ((B, T, top), dtype)}
    grid, threadgroup = (32, B * T, 1), (32, 8, 1)
    indices, weights = launch("router_topk", ["mixer", "router"], body, {**arrays, "T": T}, outputs, grid, threadgroup)
    return indices, weights


def _threads(width: int) -> int:
    """Threads for a row: up to eight elements each, whole SIMD-groups, at most 1024 together."""
    return max(32, min(1024, (width // 8 + 31) // 32 * 32))
