"""flash-linear-attention on a CPU without Triton: its models, with every kernel replaced by plain torch.

`install()` must run before anything imports `fla`. A stand-in `triton` package lets fla's modules be imported; then the
kernels that a forward pass would launch are replaced, in every module that imported them by name, by their definition:
one recurrence in float64, and torch's own norms, convolutions and activations. A kernel that was overlooked raises.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from typing import Any

import torch
import torch.nn.functional as F


class _Anything:
    """Answers to any attribute, call or subscript, so that decorated kernel definitions can be executed."""

    def __init__(self, name: str = "triton") -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _jit if name == "jit" else _Anything(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain_decorator = len(args) == 1 and callable(args[0]) and not kwargs
        return args[0] if plain_decorator else _Anything(self.__name__)

    def __getitem__(self, key: Any) -> Any:
        return self

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __or__

    def __iter__(self) -> Any:
        return iter(())

    def __mro_entries__(self, bases: Any) -> tuple[Any, ...]:
        return ()


class _Kernel:
    """What `triton.jit` makes of a function: it can be defined, decorated and looked up, not launched."""

    def __init__(self, function: Any) -> None:
        self.fn, self.__name__, self.arg_names = function, function.__name__, []

    def __getitem__(self, grid: Any) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"the oracle does not replace the kernel {self.__name__}")


def _jit(function: Any = None, **options: Any) -> Any:
    return _Kernel(function) if function is not None else _Kernel


def _decorator(*args: Any, **kwargs: Any) -> Any:
    return lambda function: function


class _NoDriver:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no driver")


class _Autotuner:
    user_defined_pre_hook = user_defined_post_hook = True

    def __init__(self, fn: Any = None, *args: Any, **kwargs: Any) -> None:
        self.fn, self.configs, self.cache, self.keys = fn, [], {}, []


class _Config:
    def __init__(self, kwargs: Any = None, **options: Any) -> None:
        self.kwargs = kwargs or {}


class _Constexpr:
    def __init__(self, value: Any = None) -> None:
        self.value = value


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _jit if name == "jit" else _Anything(name)


class _FakeTriton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `triton` and every module below it."""

    contents: dict[str, dict[str, Any]] = {
        "triton": {
            "__version__": "3.9.0",
            "jit": _jit,
            "autotune": _decorator,
            "heuristics": _decorator,
            "Config": _Config,
            "cdiv": lambda a, b: -(-a // b),
            "next_power_of_2": lambda n: 1 << max(n - 1, 0).bit_length(),
        },
        "triton.language": {
            "constexpr": _Constexpr,
            "dtype": type("dtype", (), {}),
            "tensor": type("tensor", (), {}),
        },
        "triton.runtime": {"driver": _NoDriver()},
        "triton.runtime.autotuner": {"Autotuner": _Autotuner},
    }

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "triton" or name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        for name, value in self.contents.get(module.__name__, {}).items():
            setattr(module, name, value)


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


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _grouped(x: torch.Tensor, heads: int) -> torch.Tensor:
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
    q, k = _grouped(q.double(), heads), _grouped(k.double(), heads)
    if use_qk_l2norm_in_kernel:
        q, k = _unit(q), _unit(k)
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
    q, k, p = (_grouped(x.double(), v.shape[2]) for x in (q, k, p))
    if use_qk_l2norm_in_kernel:
        q, k, p = _unit(q), _unit(k), _unit(p)
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


def _rms(x: torch.Tensor, weight: Any, bias: Any, eps: float) -> torch.Tensor:
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.float()
    return y if bias is None else y + bias.float()


def _with_residual(function: Any) -> Any:
    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):  # type: ignore[no-untyped-def]
        x = x if residual is None else x + residual
        y = function(self, x).to(x.dtype)
        return (y, x) if prenorm else y

    return forward


def _group_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    parts = x.float().unflatten(-1, (self.num_groups, -1))
    rms = getattr(self, "is_rms_norm", False)
    y = _rms(parts, None, None, self.eps) if rms else F.layer_norm(parts, parts.shape[-1:], None, None, self.eps)
    y = y.flatten(-2)
    y = y if self.weight is None else y * self.weight.float()
    return y if self.bias is None else y + self.bias.float()


def _gated_norm(self, x, g, residual=None, prenorm=False, residual_in_fp32=False):  # type: ignore[no-untyped-def]
    gate = F.silu(g.float()) if self.activation in ("swish", "silu") else g.float().sigmoid()
    return (_rms(x, self.weight, self.bias, self.eps) * gate).to(x.dtype)


def _convolution(self, x, residual=None, mask=None, cache=None, output_final_state=False, **_):  # type: ignore[no-untyped-def]
    size = self.kernel_size[0]
    new = x.transpose(1, 2)
    old = new.new_zeros(x.shape[0], self.hidden_size, size) if cache is None else cache
    window = torch.cat([old, new], -1)  # the source keeps `size` columns, one more than the convolution reads
    y = F.conv1d(window[..., 1:], self.weight, self.bias, groups=self.hidden_size)
    y = (F.silu(y) if self.activation is not None else y).transpose(1, 2)
    return y if residual is None else y + residual, window[..., -size:].clone() if output_final_state else None


def _causal_convolution(x, weight, bias=None, activation=None, **_):  # type: ignore[no-untyped-def]
    y = F.conv1d(F.pad(x.transpose(1, 2), (weight.shape[-1] - 1, 0)), weight[:, None], bias, groups=weight.shape[0])
    return (F.silu(y) if activation else y).transpose(1, 2), None


def _rotary(self, q, k, seqlen_offset=0, **_):  # type: ignore[no-untyped-def]
    frequencies = 1.0 / (self.base ** (torch.arange(0, self.dim, 2).double() / self.dim))
    angles = (torch.arange(q.shape[1]).double() + seqlen_offset)[:, None] * frequencies
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]

    def turn(x: torch.Tensor) -> torch.Tensor:
        one, two = x[..., : self.dim // 2].double(), x[..., self.dim // 2 : self.dim].double()
        return torch.cat([one * cos - two * sin, two * cos + one * sin, x[..., self.dim :].double()], -1).to(x.dtype)

    return turn(q), turn(k)


def _token_shift(x, cu_seqlens=None, cache=None, output_cache=False, **_):  # type: ignore[no-untyped-def]
    before = torch.zeros_like(x[:, :1]) if cache is None else cache[:, None].to(x)
    shifted = torch.cat([before, x[:, :-1]], 1) - x
    return (shifted, x[:, -1]) if output_cache else shifted


def _attention(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), **_):  # type: ignore[no-untyped-def]
    """flash_attn_func: q [B, T, H, D], k and v [B, S, HK, D]; the last query aligned with the last key."""
    heads, (length, total) = q.shape[2], (q.shape[1], k.shape[1])
    k, v = _grouped(k, heads), _grouped(v, heads)
    scores = torch.einsum("bthd,bshd->bhts", q.double(), k.double()) * (softmax_scale or q.shape[-1] ** -0.5)
    query, key = torch.arange(length)[:, None] + total - length, torch.arange(total)[None]
    seen = (key <= query) if causal else torch.ones(length, total, dtype=torch.bool)
    if window_size[0] >= 0:
        seen = seen & (key >= query - window_size[0])
    return torch.einsum("bhts,bshd->bthd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v.double()).to(q.dtype)


def _replacements() -> dict[str, Any]:
    named: dict[str, Any] = {
        "elu_p1": lambda x: F.elu(x) + 1,
        "swish": F.silu,
        "sigmoid": torch.sigmoid,
        "sqrelu": lambda x: F.relu(x).square(),
        "l2_norm": _unit,
        "l2norm": _unit,
        "swiglu": lambda x, y: F.silu(x) * y,
        "swiglu_linear": lambda x, y, weight, bias: F.linear(F.silu(x) * y, weight, bias),
        "token_shift": _token_shift,
        "causal_conv1d": _causal_convolution,
        "rms_norm_linear": lambda x, w, b, lw, lb, residual=None, eps=1e-5, **_: F.linear(_rms(x, w, b, eps), lw, lb),
        "fused_addcmul_rwkv7": lambda x, d, *mixes: tuple(x + d * mix for mix in mixes),
        "fused_k_rwkv7": lambda k, a, k_a, *_: k + k * (a - 1) * k_a,
        "gate_output_correction": lambda o, r, k, r_k, v, g: (
            (o + ((r * k * r_k).sum(-1, keepdim=True) * v).reshape(o.shape)) * g
        ),
        "chunk_gated_delta_product": delta_product,
        "chunk_rwkv7": rwkv7,
        "fused_mul_recurrent_rwkv7": rwkv7_step,
        "flash_attn_func": _attention,
    }
    for rule, function in {
        "gla": gla,
        "linear_attn": linear,
        "retention": retention,
        "delta_rule": delta,
        "gated_delta_rule": gated_delta,
        "kda": kimi_delta,
        "gsa": slots,
        "comba": comba,
        "rwkv6": rwkv6,
    }.items():
        named.update({f"{kind}_{rule}": function for kind in ("chunk", "fused_recurrent", "fused_chunk")})
    return named


def install() -> types.ModuleType:
    """Make fla importable and plain; returns the `fla` package."""
    # torch asks once whether there is a triton, and must hear no.
    for name in ("torch._dynamo", "torch._inductor.utils", "torch._inductor.runtime.hints", "transformers"):
        importlib.import_module(name)
    triton_check = importlib.import_module("torch.utils._triton")
    triton_check.has_triton_package()
    triton_check.has_triton()
    torch.compile = lambda f=None, *args, **options: f if f is not None else (lambda g: g)  # type: ignore[assignment]
    sys.meta_path.insert(0, _FakeTriton())
    for name in _FakeTriton.contents:
        importlib.import_module(name)
    flash = types.ModuleType("flash_attn")
    flash.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    flash.flash_attn_func = flash.flash_attn_varlen_func = _attention  # type: ignore[attr-defined]
    sys.modules["flash_attn"] = flash
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fla = importlib.import_module("fla")
        for name in ("fla.layers", "fla.models"):
            importlib.import_module(name)
    _replace_modules()
    for name, module in list(sys.modules.items()):
        if module is not None and name.startswith(("fla.layers", "fla.models", "fla.modules")):
            for attribute, function in _replacements().items():
                if attribute in vars(module):
                    setattr(module, attribute, function)
    return fla


def _replace_modules() -> None:
    norm = importlib.import_module("fla.modules.norm.layernorm")
    norm.RMSNorm.forward = _with_residual(lambda self, x: _rms(x, self.weight, self.bias, self.eps))
    norm.LayerNorm.forward = _with_residual(
        lambda self, x: F.layer_norm(x.float(), x.shape[-1:], self.weight, self.bias, self.eps)
    )
    norm.GroupNorm.forward = _with_residual(_group_norm)
    importlib.import_module("fla.modules.norm.fused_norm_gate").FusedRMSNormGated.forward = _gated_norm
    gated = importlib.import_module("fla.modules.norm.layernorm_gated")
    gated.rmsnorm_fn = gated.rms_norm_ref
    importlib.import_module("fla.modules.causal_conv1d.ops").ShortConvolution.forward = _convolution
    importlib.import_module("fla.modules.rotary.ops").RotaryEmbedding.forward = _rotary
    activations = importlib.import_module("fla.modules.activations.ops").ACT2FN
    plain = {
        "swish": F.silu,
        "silu": F.silu,
        "sigmoid": torch.sigmoid,
        "relu": F.relu,
        "sqrelu": lambda x: F.relu(x) ** 2,
    }
    activations.update({name: plain[name] for name in activations if name in plain})
