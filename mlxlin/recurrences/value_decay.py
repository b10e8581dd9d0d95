"""A decay per value channel, S <- diag(exp g) S + v k^T: the state forgets along the rows that it answers with.

The writes decay and the products q . k do not, so nothing factors out of these; what a chunk says about itself is found
by halving, as in `ChannelDecay`: tokens of the right half read what the left half wrote, faded to the border between
them and from there on.
"""

from __future__ import annotations

from mlxlin.backend import mx

from .decay import ChannelDecay, halves


class ValueDecay(ChannelDecay):
    """The decay of a batch of chunks; g [N, B, H, R, C, V], natural log; C a power of two >= 16."""

    def inside(self, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        """Sums of (q_t . k_j) v_j over the tokens j <= t of the chunk, v_j decayed from j to t, [N, B, H, R, C, V]."""
        y = (q * k).sum(axis=-1, keepdims=True) * v
        half = 1
        while half < v.shape[-2]:
            since, until = self._border(half)
            left, right = halves(k, half)[0], halves(q, half)[1]
            read = since * ((right @ left.swapaxes(-1, -2)) @ (halves(v, half)[0] * until))
            before, after = halves(y, half)
            y = mx.stack([before, after + read], axis=-3).reshape(v.shape)
            half *= 2
        return y

    def scan(self, q: mx.array, k: mx.array, v: mx.array, S: mx.array) -> tuple[mx.array, mx.array]:
        """Carry the state [1, B, H, R, V, K] through the chunks; y [N, B, H, R, C, V]."""
        N, outputs = v.shape[0], []
        whole, end = self._whole.swapaxes(-1, -2), (v * self._end).swapaxes(-1, -2)
        parts = (mx.split(z, N) for z in (self.inside(q, k, v), q, self._start, whole, end, k))
        for inside, query, start, carry, written, key in zip(*parts, strict=True):
            outputs.append(inside + start * (query @ S.swapaxes(-1, -2)))
            S = mx.addmm(S * carry, written, key)
        return mx.concatenate(outputs), S
