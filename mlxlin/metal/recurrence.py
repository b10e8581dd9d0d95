"""Launchers of the recurrence kernels: `scan`, token by token, and `chunk`, sixteen tokens at a time.

Arguments as in `mlxlin.recurrences.run`, already checked: q, k, a, b [B, T, H, K]; v [B, T, HV, V]; beta [B, T, HV];
g float32 [B, T, HV], [B, T, HV, K] or, for `scan`, [B, T, HV, V]; S float32 [B, HV, V, K]; Z float32 [B, HV, K];
lengths [B]. T is at least 1. With n sub-tokens per token k, v and beta hold T n of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mlxlin.backend import mx

from .kernels import Outputs, lanes_per_row, launch, view

SIZES = (32, 64, 96, 128, 192, 256)
VALUE_SIZES = (*SIZES, 80, 512)  # 80: Nemotron Nano


@dataclass(frozen=True)
class Arguments:
    """The inputs of one recurrence, every present array four-dimensional, and what follows from their shapes."""

    q: mx.array
    k: mx.array
    v: mx.array
    g: mx.array | None = None
    beta: mx.array | None = None
    a: mx.array | None = None
    b: mx.array | None = None
    S: mx.array | None = None
    Z: mx.array | None = None
    lengths: mx.array | None = None
    dtype: mx.Dtype | None = None  # of y; v's if None
    decays_values: bool = False  # whether g has value channels, not key channels

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """B, T, H, K, HV, V."""
        B, T, H, K = self.q.shape
        HV, V = self.v.shape[2:]
        return B, T, H, K, HV, V

    @property
    def substeps(self) -> int:
        return self.k.shape[1] // self.q.shape[1]

    @property
    def decay(self) -> str:
        if self.g is None:
            return "NO_DECAY"
        if self.g.ndim == 3:
            return "HEAD_DECAY"
        return "VALUE_DECAY" if self.decays_values else "CHANNEL_DECAY"

    @property
    def write(self) -> str:
        if self.a is not None:
            return "LOW_RANK"
        return "ADD" if self.beta is None else "DELTA"

    def arrays(self) -> dict[str, mx.array | None]:
        """Every input by name; those with one number per head get a last axis of one."""
        g, beta, Z = self.g, self.beta, self.Z
        return {
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "g": g[..., None] if g is not None and g.ndim == 3 else g,
            "beta": None if beta is None else beta[..., None],
            "a": self.a,
            "b": self.b,
            "S": self.S,
            "Z": None if Z is None else Z[None],
            "lengths": self.lengths,
        }


def supports(K: int, V: int) -> bool:
    """Whether the kernels take these head sizes."""
    return K in SIZES and V in VALUE_SIZES


def rows_for(K: int, V: int, heads: int) -> int:
    """Rows of the state that a lane of `scan` holds channels of: two where enough SIMD-groups remain to fill a GPU."""
    return 2 if heads * V >= 16384 and lanes_per_row(K) == 4 else 1


def columns_for(K: int, V: int, heads: int) -> int:
    """Matrices of 8 values per SIMD-group of `chunk`: as many as registers allow while enough groups remain."""
    return next(n for n in (4, 2, 1) if n == 1 or (K * n <= 256 and V % (8 * n) == 0 and heads * V >= 512 * 8 * n))


def scan(
    x: Arguments, *, normalize: bool = False, eps: float = 0.0, rows: int | None = None
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Every rule, token by token: y [B, T, HV, V], S float32 and, with `normalize`, Z float32.

    `rows` is 1 or 2, `rows_for` all heads of the batch if None.
    """
    B, T, H, K, HV, V = x.sizes
    lanes, rows = lanes_per_row(K), rows or rows_for(K, V, B * HV)
    per_group = 32 // lanes * rows
    arrays = x.arrays()
    views = ", ".join(view(name, array is not None) for name, array in arrays.items())
    parameters = f"{K}, {lanes}, {rows}, {x.decay}, {x.write}, {x.substeps}, {str(normalize).lower()}"
    call = (
        f"scan<{parameters}>({views}, T, H, HV, V, eps, y, S_out, {'Z_out' if normalize else 'Absent()'}, "
        "thread_position_in_grid, thread_index_in_simdgroup);"
    )
    outputs: Outputs = {"y": ((B, T, HV, V), x.dtype or x.v.dtype), "S_out": ((B, HV, V, K), mx.float32)}
    if normalize:
        outputs["Z_out"] = ((B, HV, K), mx.float32)
    groups = V // per_group
    y, S, *Z = launch(
        "scan",
        ["scan"],
        call,
        {**arrays, "T": T, "H": H, "HV": HV, "V": V, "eps": eps},
        outputs,
        (32, groups, B * HV),
        (32, min(4, groups), 1),
    )
    return y, S, Z[0] if Z else None


def chunk(x: Arguments, *, columns: int | None = None) -> tuple[mx.array, mx.array]:
    """Sixteen tokens at a time, in two dispatches: what does not need the state for all chunks at once, then the state.

    A SIMD-group owns 8 `columns` values: 1, 2 or 4, `columns_for` all heads of the batch if None.
    Returns y [B, T, HV, V] and S float32.
    """
    B, T, H, K, HV, V = x.sizes
    if x.write == "LOW_RANK" and x.g is not None and x.g.ndim == 3:  # Comba; the broadcast copies nothing
        x = replace(x, g=mx.broadcast_to(x.g[..., None], (B, T, HV, K)))
    arrays = {name: array for name, array in x.arrays().items() if name != "Z"}
    prepared = _prep_channel(x) if x.decay == "CHANNEL_DECAY" else _prep_head(x)
    columns = columns or columns_for(K, V, B * HV)
    groups = V // (8 * columns)
    per_threadgroup = max(n for n in (1, 2, 3, 4) if groups % n == 0)
    if x.decay == "CHANNEL_DECAY":
        staged = ""
        tiles = f"channel_tiles<{K}>({_or_absent(prepared, 'Xd')}, Qd, Kd, {_or_absent(prepared, 'Bd')}, G)"
        read: dict[str, mx.array | None] = {}
    else:
        staged = f"threadgroup float keys[{16 * (K + 4)}]; "
        views = f"{view('q')}, {view('k')}"
        place = f"simdgroup_index_in_threadgroup, {per_threadgroup}, thread_index_in_simdgroup"
        tiles = f"head_tiles<{K}, {x.substeps}>({views}, G, keys, {place})"
        read = {"q": x.q, "k": x.k}
    read |= {name: arrays[name] for name in ("v", "S", "lengths")}
    views = ", ".join(view(name, arrays[name] is not None) for name in ("v", "S", "lengths"))
    call = (
        f"{staged}chunk<{K}, {columns}, {x.write}, {x.substeps}>({tiles}, {views}, {_or_absent(prepared, 'X')}, "
        f"{_or_absent(prepared, 'Ak')}, P, {_or_absent(prepared, 'Pb')}, T, H, HV, V, y, S_out, "
        "thread_position_in_grid, thread_index_in_simdgroup);"
    )
    y, S = launch(
        "chunk",
        ["matrix", "tiles", "chunk"],
        call,
        {**read, **prepared, "T": T, "H": H, "HV": HV, "V": V},
        {"y": ((B, T, HV, V), x.dtype or x.v.dtype), "S_out": ((B, HV, V, K), mx.float32)},
        (32, groups, B * HV),
        (32, per_threadgroup, 1),
    )
    return y, S


def _or_absent(prepared: dict[str, mx.array], name: str) -> str:
    return name if name in prepared else "Absent()"


def _prep_head(x: Arguments) -> dict[str, mx.array]:
    B, T, H, K, HV, _ = x.sizes
    chunks = -(-T * x.substeps // 16)
    names = ("q", "k", "g", "beta", "lengths")
    arrays = x.arrays()
    outputs = {"P": ((B, HV, chunks, 3, 8, 8), mx.float32), "G": ((B, HV, chunks, 33), mx.float32)}
    if x.write == "DELTA":
        outputs["X"] = outputs["P"]
    staged = 2 * 16 * 36
    views = ", ".join(view(name, arrays[name] is not None) for name in names)
    call = (
        f"threadgroup float scratch[4 * {staged}]; prep_head<{K}, {HV // H}, {x.write}, {x.substeps}>("
        f"{views}, T, H, {'X' if x.write == 'DELTA' else 'Absent()'}, "
        f"P, G, scratch + {staged} * simdgroup_index_in_threadgroup, thread_position_in_grid, "
        "thread_index_in_simdgroup);"
    )
    results = launch(
        "prep_head",
        ["matrix", "prep"],
        call,
        {**{name: arrays[name] for name in names}, "T": T, "H": H},
        outputs,
        (32, chunks, B * H),
        (32, 4, 1),
    )
    return dict(zip(outputs, results, strict=True))


def _prep_channel(x: Arguments) -> dict[str, mx.array]:
    B, T, H, K, HV, _ = x.sizes
    chunks = -(-T // 16)
    names = ("q", "k", "g", "beta", "a", "b", "lengths")
    arrays = x.arrays()
    tiles, triangles = (B, HV, chunks, K // 8, 2, 8, 8), (B, HV, chunks, 3, 8, 8)
    shapes = {"Qd": tiles, "Kd": tiles, "P": triangles, "G": (B, HV, chunks, K)}
    if x.write != "ADD":
        shapes |= {"Xd": tiles, "X": triangles}
    if x.write == "LOW_RANK":
        shapes |= {"Bd": tiles, "Ak": triangles, "Pb": triangles}
    order = ("Xd", "Qd", "Kd", "Bd", "X", "Ak", "P", "Pb")
    results = ", ".join(name if name in shapes else "Absent()" for name in order)
    staged = 2 * 16 * 36
    views = ", ".join(view(name, arrays[name] is not None) for name in names)
    call = (
        f"threadgroup float scratch[2 * {staged}]; prep_channel<{K}, {x.write}>("
        f"{views}, T, H, HV, {results}, G, "
        f"scratch + {staged} * simdgroup_index_in_threadgroup, thread_position_in_grid, thread_index_in_simdgroup);"
    )
    outputs = launch(
        "prep_channel",
        ["matrix", "prep", "prep_channel"],
        call,
        {**{name: arrays[name] for name in names}, "T": T, "H": H, "HV": HV},
        {name: (shape, mx.float32) for name, shape in shapes.items()},
        (32, chunks, B * HV),
        (32, 2, 1),
    )
    return dict(zip(shapes, outputs, strict=True))
