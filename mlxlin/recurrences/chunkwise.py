"""Chunk-parallel form of every rule: a few large products per chunk, no loop over tokens.

In a chunk of C tokens each rule writes U [C, V] along the keys and reads the result (rows are tokens, S is [V, K]):

    y = P U + Q' S^T            S <- S w + U^T K''

    add         U = V
    delta       U = T (V - K' S^T)                 T = (I + diag(beta) A)^-1 diag(beta)
    low rank    U = [T (A_k V + A' S^T); V]        T = (I - A_b)^-1,  K'' = [B''; K''],  P = [P_b, P_k]

' is decayed from the start of the chunk, '' to its end, and A, P are products of rows with earlier keys, decayed in
between (`decay`). Whatever does not involve S is computed for all chunks of 512 tokens at once; only the three to five
products above are sequential, so the graph has O(T / C) nodes and memory is flat in T.

Where delta writes contract nothing (beta = 2) and keys point one way, errors of A, T and T R are multiplied by the
condition of (I + A): half a digit (3e-5). Those three are float64 where the device has it, the CPU; else float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mlxlin.backend import mx

from .decay import ChannelDecay, Decay, HeadDecay, NoDecay, Reads, Row
from .inverse import unit_lower_inverse, widest
from .reference import NORMALIZER_EPS
from .rules import Inputs
from .value_decay import ValueDecay

TOKENS_AT_ONCE = 512  # what fits the processor's caches; more is slower, and costs memory
SHORTEST_CHUNK = 16
LAZY_TOKENS = 1024  # a longer call is evaluated as it goes: its graph would keep every piece's intermediates alive


@dataclass(frozen=True)
class Chunks:
    """Some tokens of a call cut into N chunks: [N, B, H, R, C, *] float32, R value heads per key head (1 for keys)."""

    q: mx.array
    k: mx.array
    v: mx.array
    decay: Decay
    beta: mx.array | None  # [N, B, H, R, C]
    a: mx.array | None
    b: mx.array | None


Correction = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class Plan:
    """All of some chunks that does not involve the state."""

    P: mx.array  # [N, B, H, R, C, C]: how the output reads the chunk's own writes
    Q: mx.array  # queries, decayed from the start of the chunk
    written: mx.array  # keys, decayed to its end
    corrections: Iterable[Correction]  # chunk by chunk, S -> U


def run(x: Inputs, chunk: int) -> tuple[mx.array, mx.array, mx.array | None]:
    """The recurrence over all tokens of x (one sub-step per token) by chunks of at most `chunk` tokens."""
    B, HV, V, K = x.S.shape
    S = x.S.reshape(1, B, x.heads, HV // x.heads, V, K)
    Z = None if x.Z is None else x.Z.reshape(B, x.heads, HV // x.heads, 1, K)
    outputs = []
    for start, stop, C in cut(x.tokens, chunk):
        chunks = slice_chunks(x, start, stop, C)
        if isinstance(chunks.decay, ValueDecay):
            y, S = chunks.decay.scan(chunks.q, chunks.k, chunks.v, S)
        else:
            plan = PLANS[x.rule.write](chunks)
            y, S = scan_chunks(plan, chunks.decay, S)
            if Z is not None:
                y, Z = normalized(y, chunks, plan, Z)
        y = y.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, HV, V)[:, : stop - start]
        outputs.append(y.astype(x.v.dtype))
        if x.tokens > LAZY_TOKENS:
            mx.eval(outputs[-1], S, Z)
    y = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
    return y, S.reshape(x.S.shape), None if Z is None else Z.reshape(B, HV, K)


def cut(tokens: int, chunk: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, chunk length) of the pieces of a call: full chunks, 512 tokens at once, then one shorter chunk."""
    full = tokens - tokens % chunk
    for start in range(0, full, TOKENS_AT_ONCE):
        yield start, min(start + TOKENS_AT_ONCE, full), chunk
    if full < tokens:
        C = SHORTEST_CHUNK
        while C < tokens - full:
            C *= 2
        yield full, tokens, C


def slice_chunks(x: Inputs, start: int, stop: int, C: int) -> Chunks:
    """Tokens start .. stop of x as chunks of C tokens, the last filled up with neutral tokens."""
    missing = -(stop - start) % C

    def cut_tokens(z: mx.array) -> mx.array:
        z = z[:, start:stop].astype(mx.float32)
        if missing:
            z = mx.pad(z, [(0, 0), (0, missing)] + [(0, 0)] * (z.ndim - 2))
        return z.reshape(x.batch, -1, C, x.heads, z.shape[2] // x.heads, *z.shape[3:])

    def vectors(z: mx.array) -> mx.array:
        return mx.contiguous(cut_tokens(z).transpose(1, 0, 3, 4, 2, 5))

    def scalars(z: mx.array) -> mx.array:
        return mx.contiguous(cut_tokens(z).transpose(1, 0, 3, 4, 2))

    decay: Decay = NoDecay()
    if x.g is not None:
        if x.decay == "head":
            decay = HeadDecay(scalars(x.g).astype(widest() if x.rule.write == "delta" else mx.float32))
        else:
            decay = (ValueDecay if x.decay == "value" else ChannelDecay)(vectors(x.g))
    return Chunks(
        vectors(x.q),
        vectors(x.k),
        vectors(x.v),
        decay,
        None if x.beta is None else scalars(x.beta),
        None if x.a is None else vectors(x.a),
        None if x.b is None else vectors(x.b),
    )


def scan_chunks(plan: Plan, decay: Decay, S: mx.array) -> tuple[mx.array, mx.array]:
    """Carry the state [1, B, H, R, V, K] through the chunks; y [N, B, H, R, C, V]."""
    outputs = []
    N = plan.P.shape[0]
    parts = zip(each(plan.P), each(plan.Q), each(plan.written), decay.carries(N), plan.corrections, strict=True)
    for P, Q, written, carry, correct in parts:
        U = correct(S)
        outputs.append(mx.addmm(P @ U, Q, S.swapaxes(-1, -2)))
        S = mx.addmm(carry(S), U.swapaxes(-1, -2), written)
    return mx.concatenate(outputs), S


def each(x: mx.array) -> list[mx.array]:
    """The chunks of x [N, ...] as N views [1, ...]: one operation for all, where indexing costs two for each."""
    return list(mx.split(x, x.shape[0]))


def add(c: Chunks) -> Plan:
    """Additive writes."""
    [[P]] = c.decay.pairs([Row(c.q, Reads.AFTER)], [c.k])

    def correction(v: mx.array) -> Correction:
        return lambda S: v

    return Plan(P, c.decay.read(c.q, Reads.AFTER), c.decay.write(c.k), map(correction, each(c.v)))


def delta(c: Chunks) -> Plan:
    """Delta writes: the corrections of a chunk solve a unit lower-triangular system."""
    assert c.beta is not None
    read, when = (c.k, Reads.DECAYED) if c.a is None else (c.a, Reads.BEFORE)
    wide = widest()
    [[A], [P]] = c.decay.pairs([Row(read, when, wide), Row(c.q, Reads.AFTER)], [c.k])
    beta = c.beta.astype(wide)
    T = unit_lower_inverse(beta[..., :, None] * A) * beta[..., None, :]
    K = c.decay.read(read, when)

    def correction(T: mx.array, v: mx.array, K: mx.array) -> Correction:
        return lambda S: (T @ mx.addmm(v, K, S.swapaxes(-1, -2), alpha=-1.0).astype(wide)).astype(mx.float32)

    corrections = map(correction, each(T), each(c.v), each(K))
    return Plan(P, c.decay.read(c.q, Reads.AFTER), c.decay.write(c.k), corrections)


def low_rank(c: Chunks) -> Plan:
    """Low-rank writes: what a reads is written along b, v along k."""
    assert c.a is not None and c.b is not None
    [[A_b, A_k], [P_b, P_k]] = c.decay.pairs([Row(c.a, Reads.BEFORE), Row(c.q, Reads.AFTER)], [c.b, c.k])
    T = unit_lower_inverse(-A_b)
    a = c.decay.read(c.a, Reads.BEFORE)

    def correction(T: mx.array, v: mx.array, known: mx.array, a: mx.array) -> Correction:
        return lambda S: mx.concatenate([T @ mx.addmm(known, a, S.swapaxes(-1, -2)), v], axis=-2)

    corrections = map(correction, each(T), each(c.v), each(A_k @ c.v), each(a))
    written = mx.concatenate([c.decay.write(c.b), c.decay.write(c.k)], axis=-2)
    return Plan(mx.concatenate([P_b, P_k], axis=-1), c.decay.read(c.q, Reads.AFTER), written, corrections)


PLANS: dict[str, Callable[[Chunks], Plan]] = {"add": add, "delta": delta, "low_rank": low_rank}


def normalized(y: mx.array, c: Chunks, plan: Plan, Z: mx.array) -> tuple[mx.array, mx.array]:
    """y / (Z_t . q_t + eps) and the new Z [B, H, R, 1, K], the sum of the keys so far."""
    sums = c.k.sum(axis=-2, keepdims=True)
    before = Z + mx.cumsum(sums, axis=0, inclusive=False)
    norm = (c.q * before).sum(axis=-1, keepdims=True) + plan.P.sum(axis=-1, keepdims=True)
    return y / (norm + NORMALIZER_EPS), Z + sums.sum(axis=0)
