"""Mixture of experts: a router picks a few feed-forward parts for each token, beside one that all tokens share."""

from __future__ import annotations

import math
from functools import lru_cache

from mlxlin.backend import mx, on_metal
from mlxlin.metal.layers import MOST_EXPERTS, router_topk
from mlxlin.models.activations import relu2, sigmoid, sigmoid_gated, swiglu
from mlxlin.models.blocks import Linear, Matrix, Mlp, Projections, joinable, joined, mlp_inputs
from mlxlin.models.params import Parameter, Params, Table, under
from mlxlin.models.spec import MoeSpec
from mlxlin.recurrences.probe import trusted_by_key

_SORTED_FROM = 64  # token-expert pairs from which on it pays to bring the tokens of an expert together


def moe_parameters(spec: MoeSpec, width: int) -> Table:
    """Expected parameters of one mixture in a model of this width."""
    inner = spec.latent or width
    table = {"router.weight": Parameter((spec.experts, width), "gate")}
    for name in mlp_inputs(spec.form):
        table[f"experts.{name}.weight"] = Parameter((spec.experts, spec.hidden, inner), "matrix")
    table["experts.down.weight"] = Parameter((spec.experts, inner, spec.hidden), "matrix")
    if spec.latent:
        for name, shape in (("latent_in", (spec.latent, width)), ("latent_out", (width, spec.latent))):
            table[f"{name}.weight"] = Parameter(shape, "matrix")
            if spec.bias:
                table[f"{name}.bias"] = Parameter(shape[:1], "keep")
    if spec.correction:
        table["correction"] = Parameter((spec.experts,), "keep")
    if spec.shared_part is not None:
        table.update(under("shared", Mlp.parameters(spec.shared_part, width)))
    if spec.shared_gate:
        table["shared_gate.weight"] = Parameter((1, width), "gate")
    return table


class Experts:
    """Projections of which each row takes the one of its expert."""

    def __init__(self, matrix: Matrix, params: Params) -> None:
        self._matrix = matrix
        self._transposed = None
        if matrix.quant is None:
            # MLX gathers products on the CPU in float32 only.
            weight = matrix.weight if on_metal() else params.made(matrix.weight.astype(mx.float32))
            self._transposed = weight.swapaxes(-1, -2)

    def __call__(self, x: mx.array, indices: mx.array, in_order: bool) -> mx.array:
        """x [..., 1, in] and indices [...] (broadcast against each other) -> [..., 1, out]."""
        matrix, rows = self._matrix, _counted(x.shape[:-2])
        if self._transposed is not None:
            wide = x.astype(self._transposed.dtype)
            y = mx.gather_mm(wide, self._transposed, rows, indices, sorted_indices=in_order)
            return y.astype(x.dtype)
        assert matrix.quant is not None and matrix.scales is not None
        return mx.gather_qmm(
            x,
            matrix.weight,
            matrix.scales,
            matrix.biases,
            rows,
            indices,
            transpose=True,
            group_size=matrix.quant.group_size,
            bits=matrix.quant.bits,
            mode=matrix.quant.mode,
            sorted_indices=in_order,
        )


class Moe:
    """Routed experts and a shared one."""

    def __init__(self, spec: MoeSpec, params: Params) -> None:
        self._spec = spec
        routing = ["router", "shared_gate"] if spec.shared_gate else ["router"]
        self._router = Projections(params, routing, mx.float32 if spec.exact_router else None)
        self._correction = params.take("correction").astype(mx.float32) if spec.correction else None
        *inputs, down = (Matrix.take(params.at("experts"), name) for name in (*mlp_inputs(spec.form), "down"))
        if len(inputs) == 2 and joinable(*inputs):
            inputs = [joined(inputs, params)]
        self._inputs, self._down = [Experts(matrix, params) for matrix in inputs], Experts(down, params)
        self._shared = Mlp(spec.shared_part, params.at("shared")) if spec.shared_part is not None else None
        self._latent: tuple[Linear, Linear] | None = None
        if spec.latent:
            self._latent = Linear(Matrix.take(params, "latent_in")), Linear(Matrix.take(params, "latent_out"))

    def __call__(self, x: mx.array) -> mx.array:
        """[B, T, D] -> [B, T, D]."""
        flat = x.reshape(-1, x.shape[-1])
        logits, *gate = self._router(flat)
        shared = None if self._shared is None else self._shared(flat)
        if shared is not None and gate:
            shared = sigmoid_gated(gate[0], shared)
        if self._latent is None:
            return self._routed(flat, *self.route(logits), shared).reshape(x.shape)
        inward, outward = self._latent
        y = outward(self._routed(inward(flat), *self.route(logits), None))
        return (y if shared is None else y + shared).reshape(x.shape)

    def route(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """logits [N, E] -> the experts of each token [N, active] and their weights, in the dtype of the logits."""
        spec = self._spec
        if on_metal() and logits.shape[1] <= MOST_EXPERTS and trusted_by_key(f"router-{spec}", self._complaint):
            return self._chosen_by_kernel(logits)
        indices, weights = self._chosen(logits)
        return indices, weights.astype(logits.dtype)

    def _chosen_by_kernel(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        """The same as `_chosen`, best experts first, in one dispatch."""
        spec = self._spec
        indices, weights = router_topk(
            logits[None],
            spec.active,
            score=spec.score,
            correction=self._correction,
            groups=spec.groups,
            groups_kept=spec.groups_kept,
            normalized=spec.normalized,
            sum_eps=spec.sum_eps,
            factor=spec.factor,
            dtype=logits.dtype,
        )
        return indices.squeeze(0), weights.squeeze(0)

    def _complaint(self) -> str:
        """What is wrong with the kernel's choice for some random tokens; empty where nothing is."""
        logits = mx.random.normal((5, self._spec.experts), key=mx.random.key(0))
        found = self._chosen_by_kernel(logits)
        by_kernel, exact = (self._dense(logits, *chosen) for chosen in (found, self._chosen(logits)))
        return "" if mx.allclose(by_kernel, exact, 1e-5, 1e-7) else "other experts or weights were chosen"

    @staticmethod
    def _dense(logits: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """The weight of every expert, whatever the order they were chosen in."""
        return mx.put_along_axis(mx.zeros(logits.shape), indices, weights, axis=1)

    def _chosen(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        spec, logits = self._spec, logits.astype(mx.float32)
        scores = sigmoid(logits) if spec.score == "sigmoid" else mx.softmax(logits, axis=-1)
        wanted = scores if self._correction is None else scores + self._correction
        if spec.groups > 1:
            wanted = _only_best_groups(wanted, spec.groups, spec.groups_kept)
        indices = mx.argpartition(-wanted, spec.active - 1, axis=-1)[:, : spec.active]
        weights = mx.take_along_axis(scores, indices, axis=-1)
        if spec.normalized:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + spec.sum_eps)
        return indices, weights * spec.factor

    def _routed(self, x: mx.array, indices: mx.array, weights: mx.array, shared: mx.array | None) -> mx.array:
        """Weighted sum of the chosen experts, and what all tokens share, [N, D]."""
        tokens, active = indices.shape
        if indices.size < _SORTED_FROM:
            y = self._expert(x[:, None, None, :], indices, False)
        else:
            pairs = indices.flatten()
            order = mx.argsort(pairs)
            y = self._expert(x[order // active][:, None, :], pairs[order], True)
            y = y[mx.argsort(order)]
        y, rows = y.reshape(tokens, active, -1), weights.astype(x.dtype)[:, None]
        return (rows @ y if shared is None else mx.addmm(shared[:, None], rows, y)).squeeze(1)

    def _expert(self, x: mx.array, indices: mx.array, in_order: bool) -> mx.array:
        projected = [inputs(x, indices, in_order) for inputs in self._inputs]
        if self._spec.form == "relu2":
            return self._down(relu2(projected[0]), indices, in_order)
        gate, up = projected if len(projected) == 2 else mx.split(projected[0], 2, axis=-1)
        return self._down(swiglu(gate, up), indices, in_order)


@lru_cache(maxsize=16)
def _counted(shape: tuple[int, ...]) -> mx.array:
    """0, 1, 2, .. in this shape: every row of a product for itself. MLX would count anew for each."""
    rows = mx.arange(math.prod(shape), dtype=mx.uint32).reshape(shape)
    mx.eval(rows)
    return rows


def _only_best_groups(scores: mx.array, groups: int, kept: int) -> mx.array:
    """Scores [N, E], -inf outside the `kept` groups whose two best scores have the largest sums."""
    tokens, experts = scores.shape
    grouped = scores.reshape(tokens, groups, experts // groups)
    strength = mx.topk(grouped, 2, axis=-1).sum(axis=-1)
    worst = mx.argpartition(strength, groups - kept - 1, axis=-1)[:, : groups - kept] if kept < groups else None
    if worst is None:
        return scores
    masked = mx.put_along_axis(grouped, worst[..., None], mx.array(-mx.inf), axis=1)
    return masked.reshape(tokens, experts)
