"""Inverses of unit lower-triangular matrices, in float32 and without a Neumann series.

Correlated keys make the powers of A huge while the inverse stays near 1, so a series or doubling over a whole chunk
loses every digit. Substitution keeps 3e-6 (relative RMS) at any correlation of keys and beta up to 2. Merging tiles
costs about half a digit per doubling where beta is near 2, for the condition number of (I + A) then grows with its
size: LAPACK gets whole chunks, and devices without it shorter ones.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxlin.backend import mx

TILE = 16
LAPACK_TILE = 64


def unit_lower_inverse(A: mx.array) -> mx.array:
    """(I + A)^-1 for strictly lower-triangular A [.., C, C] float32, C a power of two; 0 on and above the diagonal."""
    if mx.default_device() == mx.Device(mx.cpu):
        return merged(A, LAPACK_TILE, lapack)
    return merged(A, TILE, substituted)


def merged(A: mx.array, tile: int, invert: Callable[[mx.array], mx.array]) -> mx.array:
    """(I + A)^-1 from the inverses of diagonal tiles: [[a, 0], [c, b]]^-1 = [[a^-1, 0], [-b^-1 c a^-1, b^-1]]."""
    half = A.shape[-1] // 2
    if A.shape[-1] <= tile:
        return invert(A)
    top, bottom = (merged(d, tile, invert) for d in (A[..., :half, :half], A[..., half:, half:]))
    corner = -(bottom @ (A[..., half:, :half] @ top))
    upper = mx.concatenate([top, mx.zeros_like(corner)], axis=-1)
    return mx.concatenate([upper, mx.concatenate([corner, bottom], axis=-1)], axis=-2)


def substituted(A: mx.array) -> mx.array:
    """(I + A)^-1 by forward substitution with elementwise operations, on any device: all matrices column by column."""
    X = mx.broadcast_to(mx.eye(A.shape[-1]), A.shape)
    for j in range(A.shape[-1] - 1):
        X = X - A[..., :, j : j + 1] * X[..., j : j + 1, :]
    return X


def lapack(A: mx.array) -> mx.array:
    """(I + A)^-1 by LAPACK, which MLX has on the CPU only."""
    return mx.linalg.tri_inv(A + mx.eye(A.shape[-1]), stream=mx.cpu)
