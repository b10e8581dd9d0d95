"""The recurrences of fla's kernels by their definition: token by token, in float64, under the kernels' signatures."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """S <- diag(e^g) S + b (a^T S) + k v^T, o = S^T (scale q), float64; S [B, H, K, V]; a reads S before its decay."""
    (batch, length, heads, dim), width = q.shape, v.shape[-1]
    factor = dim**-0.5 if scale is None else scale
    q, k, v = q.double() * factor, k.double(), v.double()
    S = torch.zeros(batch, heads, dim, width, dtype=torch.float64) if state is None else state.double()
    out = torch.zeros(batch, length, heads, width, dtype=torch.float64)
    for t in range(length):
        read = None if a is None else torch.einsum("bhk,bhkv->bhv", a[:, t].double(), S)
        if g is not None:
            S = S * g[:, t].double().exp()[..., None]
        if read is not None:
            S = S + torch.einsum("bhk,bhv->bhkv", b[:, t].double(), read)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        out[:, t] = torch.einsum("bhk,bhkv->bhv", q[:, t], S)
    return out, S


def _run(q: Any, k: Any, v: Any, keep: bool, v_first: bool = False, state: Any = None, **rule: Any) -> tuple[Any, Any]:
    if state is not None and v_first:
        state = state.transpose(-1, -2)
    out, S = scan(q, k, v, state=state, **rule)
    S = S.transpose(-1, -2).contiguous() if v_first else S
    return out.to(v.dtype), S.float() if keep else None


def unit(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def grouped(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.repeat_interleave(heads // x.shape[2], 2)


def gla(q, k, v, g=None, gk=None, scale=None, initial_state=None, output_final_state=False, state_v_first=False, **_):  # type: ignore[no-untyped-def]
    decay = gk if gk is not None else g
    return _run(q, k, v, output_final_state, state_v_first, initial_state, g=decay, scale=scale)


def linear(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=False, **_):  # type: ignore[no-untyped-def]
    sums = None
    if isinstance(initial_state, (tuple, list)):
        initial_state, sums = initial_state
    o, S = _run(q, k, v, True, False, initial_state, scale=scale)
    if normalize:
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        z = k.double().cumsum(1) + (0 if sums is None else sums.double())
        o = (o.double() / ((q.double() * factor * z).sum(-1, keepdim=True) + 1e-10)).to(v.dtype)
        S = (S, z[:, -1:].float())
    return o, S if output_final_state else None


def retention(q, k, v, scale=None, initial_state=None, output_final_state=False, state_v_first=False, **_):  # type: ignore[no-untyped-def]
    decay = (1 - torch.exp2(-5.0 - torch.arange(q.shape[2]).double())).log()
    g = decay[None, None, :, None].expand(*q.shape[:3], 1)
    return _run(q, k, v, output_final_state, state_v_first, initial_state, g=g, scale=scale)


def delta(  # type: ignore[no-untyped-def]
    q, k, v, beta, g=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, state_v_first=False, **_
):  # fmt: skip
    """Every delta rule: none, one decay per head [B, T, H] or one per key channel [B, T, H, K]."""
    heads = v.shape[2]
    q, k = grouped(q.double(), heads), grouped(k.double(), heads)
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    factor = beta.double()[..., None]
    decay = None if g is None else (g if g.ndim == 4 else g[..., None])
    reads = k if decay is None else decay.double().exp() * k
    writes = {"a": reads, "b": -factor * k}
    o, S = _run(
        q, k, factor * v.double(), output_final_state, state_v_first, initial_state, g=decay, scale=scale, **writes
    )
    return o.to(v.dtype), S


def _beta(beta: torch.Tensor, sigmoid: bool, negative: bool) -> torch.Tensor:
    return beta.double().sigmoid() * (2.0 if negative else 1.0) if sigmoid else beta.double()


def gated_delta(  # type: ignore[no-untyped-def]
    q, k, v, g=None, beta=None, use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, **options,
):  # fmt: skip
    if use_gate_in_kernel:
        g = -A_log.double().exp() * F.softplus(g.double() + dt_bias.double())
    return delta(q, k, v, _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval), g, **options)


def kimi_delta(  # type: ignore[no-untyped-def]
    q, k, v, g, beta, A_log=None, dt_bias=None, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False,
    allow_neg_eigval=False, lower_bound=None, **options,
):  # fmt: skip
    if use_gate_in_kernel:
        rate = A_log.double().exp()[:, None]
        g = g.double() + dt_bias.double().view(v.shape[2], -1)
        g = -rate * F.softplus(g) if lower_bound is None else lower_bound * torch.sigmoid(rate * g)
    return delta(q, k, v, _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval), g, **options)


def slots(q, k, v, s, g=None, scale=None, initial_state=None, output_final_state=False, **_):  # type: ignore[no-untyped-def]
    """Two recurrences over slots and a softmax between; states [B, H, K, M] and [B, H, M, V]."""
    (batch, length, heads, dim), count, width = q.shape, s.shape[-1], v.shape[-1]
    factor = dim**-0.5 if scale is None else scale
    q, k, v, s, decay = q.double() * factor, k.double(), v.double(), s.double(), g.double().exp()
    if initial_state is None:
        keys = torch.zeros(batch, heads, dim, count, dtype=torch.float64)
        values = torch.zeros(batch, heads, count, width, dtype=torch.float64)
    else:
        keys, values = (state.double() for state in initial_state)
    out = torch.zeros(batch, length, heads, width, dtype=torch.float64)
    for t in range(length):
        keys = keys * decay[:, t, :, None, :] + k[:, t, :, :, None] * s[:, t, :, None, :]
        values = values * decay[:, t, :, :, None] + s[:, t, :, :, None] * v[:, t, :, None, :]
        weights = torch.einsum("bhk,bhkm->bhm", q[:, t], keys).softmax(-1)
        out[:, t] = torch.einsum("bhm,bhmv->bhv", weights, values)
    return out.float(), (keys.float(), values.float()) if output_final_state else None


def comba(  # type: ignore[no-untyped-def]
    q, k, v, p, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **_
):  # fmt: skip
    """A delta rule whose state is read by p before it decays, as in the kernels (`naive_recurrent_comba` differs)."""
    q, k, p = (grouped(x.double(), v.shape[2]) for x in (q, k, p))
    if use_qk_l2norm_in_kernel:
        q, k, p = unit(q), unit(k), unit(p)
    factor = beta.double()[..., None]
    o, S = _run(
        q,
        k,
        factor * v.double(),
        output_final_state,
        False,
        initial_state,
        g=g[..., None],
        scale=scale,
        a=p,
        b=-factor * k,
    )
    return o.to(v.dtype), S


def delta_product(q, k, v, g, beta, num_householder=1, **options):  # type: ignore[no-untyped-def]
    """n delta steps a token: the decay before the first, the query behind the last."""
    n = num_householder
    steps = q.new_zeros(*q.shape[:2], n, *q.shape[2:])
    steps[:, :, -1] = q
    decay = torch.zeros(*q.shape[:2], n, v.shape[2], dtype=torch.float64)
    if g is not None:
        decay[:, :, 0] = g
    o, S = delta(steps.flatten(1, 2), k, v, beta, decay.flatten(1, 2), **options)
    return o.unflatten(1, (-1, n))[:, :, -1].to(v.dtype), S


def rwkv6(r, k, v, w, u, scale=1.0, initial_state=None, output_final_state=False, **_):  # type: ignore[no-untyped-def]
    """Read before it is written: what the own token adds comes through the bonus u."""
    r, k, v, w = r.double() * scale, k.double(), v.double(), w.double().exp()
    S = r.new_zeros(*r.shape[:1], *r.shape[2:], v.shape[-1]) if initial_state is None else initial_state.double()
    out = torch.zeros_like(v)
    for t in range(r.shape[1]):
        own = k[:, t, ..., None] * v[:, t, :, None]
        out[:, t] = torch.einsum("bhk,bhkv->bhv", r[:, t], S + u.double()[..., None] * own)
        S = S * w[:, t, ..., None] + own
    return out.float(), S.float() if output_final_state else None


def rwkv7(r, w, k, v, a, b, scale=1.0, initial_state=None, output_final_state=False, **_):  # type: ignore[no-untyped-def]
    return _run(r, k, v, output_final_state, False, initial_state, g=w, a=a, b=b, scale=scale)


def rwkv7_step(r, w, k, v, kk, a, **options):  # type: ignore[no-untyped-def]
    return rwkv7(r, w, k, v, -kk, kk * a, **options)


_RULES = {
    "gla": gla,
    "linear_attn": linear,
    "retention": retention,
    "delta_rule": delta,
    "gated_delta_rule": gated_delta,
    "kda": kimi_delta,
    "gsa": slots,
    "comba": comba,
    "rwkv6": rwkv6,
}
# Names that fla's modules import -> what stands in for them.
KERNELS: dict[str, Any] = {
    **{f"{way}_{rule}": f for rule, f in _RULES.items() for way in ("chunk", "fused_recurrent", "fused_chunk")},
    "chunk_gated_delta_product": delta_product,
    "chunk_rwkv7": rwkv7,
    "fused_mul_recurrent_rwkv7": rwkv7_step,
}
