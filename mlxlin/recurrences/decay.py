"""Decay inside a chunk: every factor a chunk-parallel form needs, from sums over exactly the tokens it covers.

A factor exp(g_{j+1} + ... + g_t) taken as a difference of cumulative sums loses all digits behind a strong gate and is
NaN behind g = -inf. Here each exponent is a direct sum over its own segment, or a product of two such factors that
meet at a block border; every exponent is <= 0, so nothing overflows, and g = -inf gives an exact 0.

Arrays are laid out [N, B, H, R, C, *]: chunks, batch, key heads, value heads per key head, tokens of a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple, Protocol

import numpy as np

from mlxlin.backend import mx

BLOCK = 16  # tokens whose factors are exponentials of their own segment sums (one decay per head)
TILE = 8  # tokens whose factors are products of single decays (one per channel, where exponentials cost most)
LOWEST = -128.0  # exp(-128) is 0 in float32, so this floor changes no value; it keeps out -inf * 0


def exp(x: mx.array) -> mx.array:
    """e^x. MLX's CPU exponential is scalar code; its power is 2.5 times as fast and as exact."""
    return mx.power(math.e, x) if mx.default_device() == mx.Device(mx.cpu) else mx.exp(x)


class Reads(Enum):
    """What a row of a token sees of the state: how much of its own token's step has happened."""

    AFTER = "decay and write of its own token"
    DECAYED = "decay of its own token, not its write"
    BEFORE = "neither"


class Row(NamedTuple):
    """Rows x [N, B, H, R, C, K] float32 of products with columns, what they see, and the dtype of the products."""

    x: mx.array
    reads: Reads
    dtype: mx.Dtype = mx.float32

    def times(self, x: mx.array, c: mx.array) -> mx.array:
        """x c^T for x and c made of these rows and of columns."""
        return x.astype(self.dtype) @ c.astype(self.dtype).swapaxes(-1, -2)


class Decay(Protocol):
    """The decay of a batch of chunks."""

    def pairs(self, rows: Sequence[Row], columns: Sequence[mx.array]) -> list[list[mx.array]]:
        """For each row kind x and column kind c the products x_t . c_j, decayed from j to t, 0 where t sees no j."""

    def read(self, x: mx.array, reads: Reads) -> mx.array:
        """x_t decayed from the start of the chunk: what it reads of the state carried in."""

    def write(self, x: mx.array) -> mx.array:
        """x_j decayed to the end of the chunk: what is left of its write in the state carried out."""

    def carries(self, N: int) -> Iterable[Callable[[mx.array], mx.array]]:
        """For each of the N chunks, the map from a state [.., V, K] carried in to what is left of it at the end."""


def triangle(C: int, reads: Reads) -> mx.array:
    """[C, C] ones where token t sees the write of token j."""
    return mx.tri(C, k=0 if reads is Reads.AFTER else -1)


class NoDecay:
    """Writes stay as they are."""

    def pairs(self, rows: Sequence[Row], columns: Sequence[mx.array]) -> list[list[mx.array]]:
        return [[row.times(row.x, c) * triangle(c.shape[-2], row.reads) for c in columns] for row in rows]

    def read(self, x: mx.array, reads: Reads) -> mx.array:
        return x

    def write(self, x: mx.array) -> mx.array:
        return x

    def carries(self, N: int) -> Iterable[Callable[[mx.array], mx.array]]:
        return repeat(lambda S: S, N)


class HeadDecay:
    """One decay per value head and token."""

    def __init__(self, g: mx.array) -> None:
        """g: [N, B, H, R, C], natural log; pairs decay in its dtype."""
        self._mask, *factors = segments(g)
        self._start, self._end, self._whole = (x.astype(mx.float32) for x in factors)

    def pairs(self, rows: Sequence[Row], columns: Sequence[mx.array]) -> list[list[mx.array]]:
        masks = [self._seen(row.reads).astype(row.dtype) for row in rows]
        return [[row.times(row.x, c) * mask for c in columns] for row, mask in zip(rows, masks, strict=True)]

    def read(self, x: mx.array, reads: Reads) -> mx.array:
        start = delayed(self._start, -1) if reads is Reads.BEFORE else self._start
        return x * start[..., None]

    def write(self, x: mx.array) -> mx.array:
        return x * self._end[..., None]

    def carries(self, N: int) -> Iterable[Callable[[mx.array], mx.array]]:
        return (w.__mul__ for w in mx.split(self._whole[..., None, None], N))

    def _seen(self, reads: Reads) -> mx.array:
        """The mask [.., C, C] for a kind of row."""
        C = self._mask.shape[-1]
        if reads is Reads.AFTER:
            return self._mask
        if reads is Reads.DECAYED:
            return self._mask * triangle(C, reads)
        return mx.concatenate([mx.zeros_like(self._mask[..., :1, :]), self._mask[..., :-1, :]], axis=-2)


class ChannelDecay:
    """One decay per value head, token and key channel.

    Pairs are found by halving: tokens of the right half read those of the left half across the border between them,
    then each half is halved again. Row and column factors both count from the border, so both exponents are <= 0.

    Exponentials dominate here, so they are few: one per token, of which factors inside 8 tokens are products, and one
    per 8 tokens and level, of sums over whole blocks.
    """

    def __init__(self, g: mx.array) -> None:
        """g: [N, B, H, R, C, K], natural log; C a power of two >= 16."""
        g = mx.maximum(g, LOWEST)
        self._shape = g.shape[:-1]
        self._w = exp(g)
        blocks = self._w.reshape(*g.shape[:-2], -1, TILE, g.shape[-1])
        self._since = mx.cumprod(blocks, axis=-2)  # over the tokens of the block up to t
        self._until = mx.cumprod(blocks, axis=-2, reverse=True, inclusive=False)  # over those after j
        self._sums = g.reshape(blocks.shape).sum(axis=-2)
        self._start = _spread(self._since, exp(mx.cumsum(self._sums, axis=-2, inclusive=False)))
        self._end = _spread(self._until, exp(mx.cumsum(self._sums, axis=-2, reverse=True, inclusive=False)))
        self._whole = exp(self._sums.sum(axis=-2, keepdims=True))

    def pairs(self, rows: Sequence[Row], columns: Sequence[mx.array]) -> list[list[mx.array]]:
        tiles = [[self._own(row, c) for c in columns] for row in rows]
        half = 1
        while half < self._shape[-1]:
            across = self._across(half, rows, columns)
            tiles = [[_merge(t, u) for t, u in zip(ts, us, strict=True)] for ts, us in zip(tiles, across, strict=True)]
            half *= 2
        return [[tile[..., 0, :, :] for tile in row] for row in tiles]

    def read(self, x: mx.array, reads: Reads) -> mx.array:
        return x * (delayed(self._start, -2) if reads is Reads.BEFORE else self._start)

    def write(self, x: mx.array) -> mx.array:
        return x * self._end

    def carries(self, N: int) -> Iterable[Callable[[mx.array], mx.array]]:
        return (w.__mul__ for w in mx.split(self._whole, N))

    def _own(self, row: Row, c: mx.array) -> mx.array:
        """The diagonal as tiles [.., C, 1, 1]: only AFTER sees its own token's write."""
        if row.reads is Reads.AFTER:
            return mx.broadcast_to((row.x * c).sum(axis=-1), self._shape)[..., None, None]
        return mx.zeros((*self._shape, 1, 1))

    def _across(self, half: int, rows: Sequence[Row], columns: Sequence[mx.array]) -> list[list[mx.array]]:
        """Products of right-half rows with left-half columns, [.., C / (2 half), half, half]."""
        since, until = self._border(half)
        delayed_since = delayed(since, -2) if any(row.reads is Reads.BEFORE for row in rows) else since
        reading = [halves(x, half)[1] * (delayed_since if reads is Reads.BEFORE else since) for x, reads, _ in rows]
        written = [halves(c, half)[0] * until for c in columns]
        return [[row.times(x, c) for c in written] for row, x in zip(rows, reading, strict=True)]

    def _border(self, half: int) -> tuple[mx.array, mx.array]:
        """Factors [.., C / (2 half), half, K]: from the border to each right token, from each left token to it."""
        if half < TILE:
            # over all tokens rather than the half that is used: contiguous, so it is the cheaper of the two
            runs = self._w.reshape(*self._w.shape[:-2], -1, 2, half, self._w.shape[-1])
            since, until = mx.cumprod(runs, axis=-2), mx.cumprod(runs, axis=-2, reverse=True, inclusive=False)
            return since[..., 1, :, :], until[..., 0, :, :]
        left, right = halves(self._sums, half // TILE)
        shape = (*left.shape[:-2], half // TILE, TILE, left.shape[-1])
        until = self._until.reshape(*shape[:-4], -1, 2, *shape[-3:])[..., 0, :, :, :]
        since = self._since.reshape(*shape[:-4], -1, 2, *shape[-3:])[..., 1, :, :, :]
        if half == TILE:
            return since[..., 0, :, :], until[..., 0, :, :]
        return (
            _spread(since, exp(mx.cumsum(right, axis=-2, inclusive=False))),
            _spread(until, exp(mx.cumsum(left, axis=-2, reverse=True, inclusive=False))),
        )


def _spread(factors: mx.array, blocks: mx.array) -> mx.array:
    """Factors [.., M, 8, K] inside blocks times those of their blocks [.., M, K], as [.., 8 M, K]."""
    spread = factors * blocks[..., None, :]
    return spread.reshape(*spread.shape[:-3], -1, spread.shape[-1])


def halves(x: mx.array, half: int) -> tuple[mx.array, mx.array]:
    """Left and right halves [.., C / (2 half), half, D] of each run of 2 half tokens."""
    x = x.reshape(*x.shape[:-2], -1, 2, half, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def _merge(tiles: mx.array, across: mx.array) -> mx.array:
    """Neighbouring diagonal tiles [.., M, h, h] and the products across them to tiles [.., M / 2, 2 h, 2 h]."""
    upper, lower = tiles[..., 0::2, :, :], tiles[..., 1::2, :, :]
    top = mx.concatenate([upper, mx.zeros_like(upper)], axis=-1)
    return mx.concatenate([top, mx.concatenate([across, lower], axis=-1)], axis=-2)


def delayed(factor: mx.array, axis: int) -> mx.array:
    """The factors one token later, starting from 1: as seen before a token's own decay."""
    earlier, last = mx.split(factor, [factor.shape[axis] - 1], axis=axis)
    return mx.concatenate([mx.ones_like(last), earlier], axis=axis)


def segments(g: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Decay factors of chunks g [.., C] (C a multiple of 16), all from direct segment sums.

    Returns:
        mask [.., C, C]: over (j, t] for j <= t, else 0.
        start [.., C]: over the tokens up to t.
        end [.., C]: over the tokens after j.
        whole [..]: over the chunk.
    """
    C = g.shape[-1]
    blocks = mx.maximum(g, LOWEST).reshape(*g.shape[:-1], C // BLOCK, BLOCK)
    within = exp(_segment_sums(blocks))
    mask, since = within[..., 1:], within[..., 0]
    until = mask[..., -1, :]
    if C == BLOCK:
        start, end = since[..., 0, :], until[..., 0, :]
        return mask[..., 0, :, :], start, end, start[..., -1]
    count = C // BLOCK
    between = exp(_segment_sums(blocks.sum(axis=-1)))  # over blocks (j, i], first column over [0, i]
    before = delayed(between[..., 0], -1)
    after = between[..., -1, 1:]
    # blocks strictly between j and i: those after j up to i - 1
    skipped = mx.concatenate([mx.zeros_like(between[..., :1, 1:]), between[..., :-1, 1:]], axis=-2)
    rows = since[..., None] * skipped[..., None, :]
    across = rows[..., None] * until[..., None, None, :, :]
    diagonal = mask[..., None, :] * mx.eye(count)[:, None, :, None]
    full = (across + diagonal).reshape(*g.shape, C)
    start = (since * before[..., None]).reshape(g.shape)
    end = (until * after[..., None]).reshape(g.shape)
    return full, start, end, between[..., -1, 0]


def _segment_sums(g: mx.array) -> mx.array:
    """Sums of g [.., n] over (j, t] for j = -1 .. n - 1, as [.., n, n + 1]; -inf for j > t.

    Plain additions: as a product with a 0/1 matrix a GPU might compute them in reduced precision.
    """
    later, seen = _segment_masks(g.shape[-1])
    return mx.cumsum(g[..., None] * later, axis=-2) + seen


@lru_cache(maxsize=8)
def _segment_masks(n: int) -> tuple[mx.array, mx.array]:
    """[n, n + 1] 1 where t > j, else 0; and 0 where t >= j, else -inf: masked before the exponential."""
    t, j = np.arange(n)[:, None], np.arange(-1, n)[None, :]
    later, seen = (t > j).astype(np.float32), np.where(t >= j, 0, -np.inf).astype(np.float32)
    return mx.array(later), mx.array(seen)
