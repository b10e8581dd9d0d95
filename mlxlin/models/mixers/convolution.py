"""Short causal depthwise convolution, and the inputs it remembers."""

from __future__ import annotations

from mlxlin.backend import mx


def short_convolution(
    x: mx.array, memory: mx.array, weight: mx.array, bias: mx.array | None, lengths: mx.array | None
) -> tuple[mx.array, mx.array]:
    """y_t = sum_j weight_j x_{t - W + 1 + j} + bias, each channel for itself.

    Args:
        x: inputs [B, T, C].
        memory: the W - 1 inputs before the first, [B, W - 1, C]; raw, before any activation.
        weight: taps [W, C], the last one for the current input.
        bias: [C] or None.
        lengths: real inputs of each row, [B] int32; None when all are.

    Returns:
        y [B, T, C] and the memory after the last real input of each row, [B, W - 1, C].
    """
    size, length = weight.shape[0], x.shape[1]
    window = mx.concatenate([memory, x], axis=1)
    if length == 1:
        y = (window * weight).sum(axis=1, keepdims=True)
    else:
        y = window[:, :length] * weight[0]
        for tap in range(1, size):
            y = y + window[:, tap : tap + length] * weight[tap]
    if bias is not None:
        y = y + bias
    if lengths is not None:
        kept = lengths[:, None] + mx.arange(size - 1)
        return y, mx.take_along_axis(window, kept[:, :, None], axis=1)
    # A plain slice would keep the whole window alive for its last W - 1 rows.
    return y, mx.contiguous(window[:, length:])
