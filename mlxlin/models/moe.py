"""Mixture of experts: a router picks a few feed-forward parts for each token, beside one that all tokens share."""

from __future__ import annotations

from mlxlin.backend import mx, on_metal
from mlxlin.metal.layers import MOST_EXPERTS, router_topk
from mlxlin.models.activations import sigmoid, silu
from mlxlin.models.blocks import Linear, Matrix, Mlp
from mlxlin.models.params import Parameter, Params, Table, under
from mlxlin.models.spec import MlpSpec, MoeSpec
from mlxlin.recurrences.probe import trusted_by_key

_SORTED_FROM = 64  # token-expert pairs from which on it pays to bring the tokens of an expert together


def moe_parameters(spec: MoeSpec, width: int) -> Table:
    """Expected parameters of one mixture in a model of this width."""
    wide, narrow = (spec.experts, spec.hidden, width), (spec.experts, width, spec.hidden)
    table = {
        "router.weight": Parameter((spec.experts, width), "gate"),
        "experts.gate.weight": Parameter(wide, "matrix"),
        "experts.up.weight": Parameter(wide, "matrix"),
        "experts.down.weight": Parameter(narrow, "matrix"),
    }
    if spec.correction:
        table["correction"] = Parameter((spec.experts,), "keep")
    if spec.shared:
        table.update(under("shared", Mlp.parameters(MlpSpec(spec.shared), width)))
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
            on_cpu = mx.default_device() == mx.Device(mx.cpu)
            weight = params.made(matrix.weight.astype(mx.float32)) if on_cpu else matrix.weight
            self._transposed = weight.swapaxes(-1, -2)

    def __call__(self, x: mx.array, indices: mx.array, in_order: bool) -> mx.array:
        """x [..., 1, in] and indices [...] (broadcast against each other) -> [..., 1, out]."""
        matrix = self._matrix
        if self._transposed is not None:
            wide = x.astype(self._transposed.dtype)
            y = mx.gather_mm(wide, self._transposed, rhs_indices=indices, sorted_indices=in_order)
            return y.astype(x.dtype)
        assert matrix.quant is not None and matrix.scales is not None
        return mx.gather_qmm(
            x,
            matrix.weight,
            matrix.scales,
            matrix.biases,
            rhs_indices=indices,
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
        self._router = Linear(Matrix.take(params, "router"))
        self._correction = params.take("correction").astype(mx.float32) if spec.correction else None
        self._gate, self._up, self._down = (
            Experts(Matrix.take(params.at("experts"), name), params) for name in ("gate", "up", "down")
        )
        self._shared = Mlp(MlpSpec(spec.shared), params.at("shared")) if spec.shared else None
        self._shared_gate = Linear(Matrix.take(params, "shared_gate")) if spec.shared_gate else None

    def __call__(self, x: mx.array) -> mx.array:
        """[B, T, D] -> [B, T, D]."""
        flat = x.reshape(-1, x.shape[-1])
        indices, weights = self.route(flat)
        y = self._routed(flat, indices, weights.astype(x.dtype)).reshape(x.shape)
        if self._shared is None:
            return y
        shared = self._shared(x)
        return y + (shared if self._shared_gate is None else shared * sigmoid(self._shared_gate(x)))

    def route(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """x [N, D] -> the experts of each token [N, active] and their float32 weights."""
        spec, logits = self._spec, self._router(x)
        if on_metal() and logits.shape[1] <= MOST_EXPERTS and trusted_by_key(f"router-{spec}", self._complaint):
            return self._chosen_by_kernel(logits)
        return self._chosen(logits)

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
        )
        return indices[0], weights[0]

    def _complaint(self) -> str:
        """What is wrong with the kernel's choice for some random tokens; empty where nothing is."""
        logits = mx.random.normal((5, self._router.matrix.rows), key=mx.random.key(0))
        try:
            found = self._chosen_by_kernel(logits)
            mx.eval(found)
        except Exception as error:  # whatever the compiler raises
            return f"{type(error).__name__}: {error}".splitlines()[0]
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

    def _routed(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """Weighted sum of the chosen experts, [N, D]."""
        tokens, active = indices.shape
        if indices.size < _SORTED_FROM:
            y = self._expert(x[:, None, None, :], indices, False)
        else:
            pairs = indices.flatten()
            order = mx.argsort(pairs)
            y = self._expert(x[order // active][:, None, :], pairs[order], True)
            y = y[mx.argsort(order)]
        return (y.reshape(tokens, active, -1) * weights[..., None]).sum(axis=1)

    def _expert(self, x: mx.array, indices: mx.array, in_order: bool) -> mx.array:
        hidden = silu(self._gate(x, indices, in_order)) * self._up(x, indices, in_order)
        return self._down(hidden, indices, in_order)


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
