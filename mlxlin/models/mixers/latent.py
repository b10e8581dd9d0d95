"""Multi-head latent attention: keys and values of all heads are projections of one small vector per token.

Only that vector and one shared rotary key are remembered (DeepSeek-V2, arXiv:2405.04434). A few tokens attend in the
latent space, with the projections moved to the query and the output; many tokens expand keys and values first.
"""

from __future__ import annotations

from mlxlin.backend import mx
from mlxlin.models.activations import sigmoid
from mlxlin.models.blocks import Linear, Matrix, Projections
from mlxlin.models.mixers.attention import attend
from mlxlin.models.mixers.step import Step, keys_values
from mlxlin.models.norms import Norm
from mlxlin.models.params import Parameter, Params, Table, under
from mlxlin.models.spec import LatentSpec, NormSpec
from mlxlin.state import KeysValues, LayerState

_EXPAND_FROM = 128  # tokens from which on expanding costs less than attending in the wider latent space


def _inputs(spec: LatentSpec) -> list[str]:
    names = ["q_in" if spec.q_rank else "q", "kv"]
    return [*names, "gate"] if spec.gate else names


def latent_parameters(spec: LatentSpec, width: int) -> Table:
    """Expected parameters of one latent attention layer in a model of this width."""
    queries = spec.heads * (spec.plain_dim + spec.rotary_dim)
    table = {"q.weight": Parameter((queries, spec.q_rank or width), "matrix")}
    if spec.q_rank:
        table["q_in.weight"] = Parameter((spec.q_rank, width), "matrix")
        table.update(under("q_norm", Norm.parameters(NormSpec(spec.eps), spec.q_rank)))
    table["kv.weight"] = Parameter((spec.kv_rank + spec.rotary_dim, width), "matrix")
    table.update(under("kv_norm", Norm.parameters(NormSpec(spec.eps), spec.kv_rank)))
    table["keys.weight"] = Parameter((spec.heads * spec.plain_dim, spec.kv_rank), "gate")
    table["values.weight"] = Parameter((spec.heads * spec.value_dim, spec.kv_rank), "gate")
    table["out.weight"] = Parameter((width, spec.heads * spec.value_dim), "matrix")
    if spec.gate:
        table["gate.weight"] = Parameter((spec.heads, width), "gate")
    return table


class LatentAttention:
    """Attention over remembered latents, [B, 1, S, kv_rank + rotary_dim]."""

    def __init__(self, spec: LatentSpec, params: Params, width: int, dtype: mx.Dtype) -> None:
        self._spec = spec
        self._dtype = dtype
        self._project = Projections(params, _inputs(spec))
        self._q_norm = Norm(NormSpec(spec.eps), params.at("q_norm")) if spec.q_rank else None
        self._q_out = Linear(Matrix.take(params, "q")) if spec.q_rank else None
        self._kv_norm = Norm(NormSpec(spec.eps), params.at("kv_norm"))
        # One matrix per head: [H, plain_dim, kv_rank] and [H, value_dim, kv_rank].
        self._keys = params.made(Matrix.take(params, "keys").dense(dtype).reshape(spec.heads, -1, spec.kv_rank))
        self._values = params.made(Matrix.take(params, "values").dense(dtype).reshape(spec.heads, -1, spec.kv_rank))
        self._out = Linear(Matrix.take(params, "out"))

    def fresh(self, batch: int) -> KeysValues:
        """The state before the first token."""
        return KeysValues.empty({"latents": (1, self._spec.kv_rank + self._spec.rotary_dim)}, batch, self._dtype)

    def __call__(self, x: mx.array, state: LayerState, step: Step) -> tuple[mx.array, LayerState]:
        """x [B, T, D] -> y [B, T, D] and the latents with T more rows."""
        spec, (batch, length, _) = self._spec, x.shape
        projected = self._project(x)
        q = projected[0] if self._q_out is None or self._q_norm is None else self._q_out(self._q_norm(projected[0]))
        q = q.reshape(batch, length, spec.heads, -1).swapaxes(1, 2)
        plain, turning = mx.split(q, [spec.plain_dim], axis=-1)
        latent, key = mx.split(projected[1][:, None], [spec.kv_rank], axis=-1)
        if spec.rope is not None:
            turning, key = step.rotate(turning, spec.rope), step.rotate(key, spec.rope)
        new = mx.concatenate([self._kv_norm(latent), key], axis=-1)
        remembered = keys_values(state).append(new)
        (latents,) = remembered.view()
        attention = self._expanded if length >= _EXPAND_FROM else self._in_latent_space
        y = attention(plain, turning, latents, step).swapaxes(1, 2)
        if spec.gate:
            y = y * sigmoid(projected[2])[..., None]
        return self._out(y.reshape(batch, length, -1)), remembered

    def _in_latent_space(self, plain: mx.array, turning: mx.array, latents: mx.array, step: Step) -> mx.array:
        """[B, H, T, value_dim]; scores and sums over the latents themselves."""
        q = mx.concatenate([plain @ self._keys, turning], axis=-1)
        values = latents[..., : self._spec.kv_rank]
        y = attend(q, latents, values, scale=self._spec.scale, window=None, step=step)
        return y @ self._values.swapaxes(-1, -2)

    def _expanded(self, plain: mx.array, turning: mx.array, latents: mx.array, step: Step) -> mx.array:
        """[B, H, T, value_dim]; keys and values of every head computed first."""
        latent, key = mx.split(latents, [self._spec.kv_rank], axis=-1)
        keys = latent @ self._keys.swapaxes(-1, -2)
        shared = mx.broadcast_to(key, (*keys.shape[:3], key.shape[-1]))
        values = latent @ self._values.swapaxes(-1, -2)
        q = mx.concatenate([plain, turning], axis=-1)
        keys = mx.concatenate([keys, shared], axis=-1)
        return attend(q, keys, values, scale=self._spec.scale, window=None, step=step)
