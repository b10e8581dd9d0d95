"""Chunk-parallel form of every rule: a few large batched products per chunk, no loop over tokens.

Inside a chunk of C tokens, with decays folded into the products (`Decay`), rows [C, *] and S [V, K]:

    add       y = Q' S^T + P V                                          S <- S w + V^T K''
    delta     U = T (V - K' S^T),  y = Q' S^T + P U                     S <- S w + U^T K''     T = (I + beta A)^-1 beta
    low rank  U = T (A' S^T + A_k V),  y = Q' S^T + P_b U + P_k V       S <- S w + U^T B'' + V^T K''

(' decayed from the chunk's start, '' to its end.) All that does not involve S is computed for up to 16 chunks at once,
so memory stays flat in T and the graph has O(T / C) nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlxlin.backend import mx

from .decay import ChannelDecay, Decay, HeadDecay, NoDecay, Reads
from .inverse import unit_lower_inverse
from .reference import NORMALIZER_EPS
from .rules import Inputs

SUPERBLOCK = 16
SMALLEST = 16
LAZY_PIECES = 2  # longer calls are evaluated as they go, or their graph would hold every intermediate


@dataclass(frozen=True)
class Chunks:
    """Some tokens of a call, cut into chunks: [N, B, H, R, C, *] float32, R = 1 where heads are shared."""

    q: mx.array
    k: mx.array
    v: mx.array
    decay: Decay
    beta: mx.array | None  # [N, B, H, R, C, 1]
    a: mx.array | None
    b: mx.array | None


def run(x: Inputs, chunk: int) -> tuple[mx.array, mx.array, mx.array | None]:
    """The recurrence over all tokens of x (one sub-step per token) by chunks of at most `chunk` tokens."""
    B, HV, V, K = x.S.shape
    S = x.S.reshape(B, x.heads, HV // x.heads, V, K)
    Z = x.Z
    if Z is not None:
        Z = Z.reshape(B, x.heads, HV // x.heads, 1, K)
    outputs = []
    pieces = list(cut(x.tokens, chunk))
    for start, stop, C in pieces:
        part = slice_chunks(x, start, stop, C)
        y, S, Z = WRITES[x.rule.write](part, S, Z)
        y = y.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, HV, V)
        outputs.append(y[:, : stop - start].astype(x.v.dtype))
        if len(pieces) > LAZY_PIECES:
            mx.eval(outputs[-1], S, Z)
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    return y, S.reshape(x.S.shape), None if Z is None else Z.reshape(B, HV, K)


def cut(tokens: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, chunk length) of the pieces of a call: up to 16 full chunks each, then one shorter chunk."""
    full = tokens - tokens % chunk
    for start in range(0, full, SUPERBLOCK * chunk):
        yield start, min(start + SUPERBLOCK * chunk, full), chunk
    if full < tokens:
        C = SMALLEST
        while C < tokens - full:
            C *= 2
        yield full, tokens, C


def slice_chunks(x: Inputs, start: int, stop: int, C: int) -> Chunks:
    """Tokens start .. stop of x as chunks of C tokens, the last filled up with neutral tokens."""
    B, _, H, K = x.q.shape

    def tokens(z: mx.array) -> mx.array:
        z = z[:, start:stop].astype(mx.float32)
        missing = -(stop - start) % C
        if missing:
            z = mx.pad(z, [(0, 0), (0, missing)] + [(0, 0)] * (z.ndim - 2))
        return z.reshape(B, -1, C, H, z.shape[2] // H, *z.shape[3:])

    def rows(z: mx.array) -> mx.array:
        return mx.contiguous(tokens(z).transpose(1, 0, 3, 4, 2, 5))

    def scalars(z: mx.array) -> mx.array:
        return tokens(z).transpose(1, 0, 3, 4, 2)

    decay: Decay = NoDecay()
    if x.g is not None:
        decay = HeadDecay(scalars(x.g)) if x.g.ndim == 3 else ChannelDecay(rows(x.g))
    return Chunks(
        rows(x.q),
        rows(x.k),
        rows(x.v),
        decay,
        None if x.beta is None else scalars(x.beta)[..., None],
        None if x.a is None else rows(x.a),
        None if x.b is None else rows(x.b),
    )


Piece = tuple[mx.array, mx.array, mx.array | None]


def add(c: Chunks, S: mx.array, Z: mx.array | None) -> Piece:
    """Additive writes: all chunks' updates at once, then a running state."""
    [[P]] = c.decay.pairs([(c.q, Reads.AFTER)], [c.k])
    Q = c.decay.read(c.q, Reads.AFTER)
    updates = c.v.swapaxes(-1, -2) @ c.decay.write(c.k)
    states = []
    for n in range(c.q.shape[0]):
        states.append(S)
        S = c.decay.carry(n, S) + updates[n]
    y = Q @ mx.stack(states).swapaxes(-1, -2) + P @ c.v
    if Z is None:
        return y, S, None
    sums = c.k.sum(axis=-2, keepdims=True)
    carried = Z + mx.cumsum(sums, axis=0, inclusive=False)
    norm = (c.q * carried).sum(axis=-1, keepdims=True) + P.sum(axis=-1, keepdims=True)
    return y / (norm + NORMALIZER_EPS), S, Z + sums.sum(axis=0)


def delta(c: Chunks, S: mx.array, Z: mx.array | None) -> Piece:
    """Delta writes: the chunk's corrections solve a unit lower-triangular system."""
    assert c.beta is not None
    [[A], [P]] = c.decay.pairs([(c.k, Reads.DECAYED), (c.q, Reads.AFTER)], [c.k])
    T = unit_lower_inverse(c.beta * A) * c.beta.swapaxes(-1, -2)
    K, Q, written = c.decay.read(c.k, Reads.DECAYED), c.decay.read(c.q, Reads.AFTER), c.decay.write(c.k)
    outputs = []
    for n in range(c.q.shape[0]):
        U = T[n] @ (c.v[n] - K[n] @ S.swapaxes(-1, -2))
        outputs.append(Q[n] @ S.swapaxes(-1, -2) + P[n] @ U)
        S = c.decay.carry(n, S) + U.swapaxes(-1, -2) @ written[n]
    return mx.stack(outputs), S, Z


def low_rank(c: Chunks, S: mx.array, Z: mx.array | None) -> Piece:
    """Low-rank writes: what a reads of the state, solved within the chunk, is written along b."""
    assert c.a is not None and c.b is not None
    [[A, A_k], [P, P_k]] = c.decay.pairs([(c.a, Reads.BEFORE), (c.q, Reads.AFTER)], [c.b, c.k])
    T = unit_lower_inverse(-A)
    a, Q = c.decay.read(c.a, Reads.BEFORE), c.decay.read(c.q, Reads.AFTER)
    b, k = c.decay.write(c.b), c.decay.write(c.k)
    known, read = A_k @ c.v, P_k @ c.v
    updates = c.v.swapaxes(-1, -2) @ k
    outputs = []
    for n in range(c.q.shape[0]):
        U = T[n] @ (known[n] + a[n] @ S.swapaxes(-1, -2))
        outputs.append(Q[n] @ S.swapaxes(-1, -2) + P[n] @ U + read[n])
        S = c.decay.carry(n, S) + updates[n] + U.swapaxes(-1, -2) @ b[n]
    return mx.stack(outputs), S, Z


WRITES: dict[str, Callable[[Chunks, mx.array, mx.array | None], Piece]] = {
    "add": add,
    "delta": delta,
    "low_rank": low_rank,
}
