"""A second way to run the codec's convolutions while training: one matmul over shifted copies (im2col).

XLA hands 1-D convolutions to cuDNN, which is slow (and slow to tune) for a dozen channels and dilated taps. Which
way is faster is measured at the start of training; the weights are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp


def _im2col_conv(
    lhs,
    rhs,
    window_strides=(1,),
    padding=((0, 0),),
    lhs_dilation=None,
    rhs_dilation=None,
    dimension_numbers=("NWC", "WIO", "NWC"),
    feature_group_count: int = 1,
    **unused,
):
    """`jax.lax.conv_general_dilated` for what the codec uses: NWC, one group or depthwise, any stride and dilation."""
    if lhs_dilation is not None or dimension_numbers != ("NWC", "WIO", "NWC") or unused:
        raise NotImplementedError("only the codec's own convolutions")
    taps, (stride,) = rhs.shape[0], window_strides
    dilation = 1 if rhs_dilation is None else rhs_dilation[0]
    lhs = jnp.pad(lhs, ((0, 0), tuple(padding[0]), (0, 0)))
    steps = (lhs.shape[1] - (taps - 1) * dilation - 1) // stride + 1
    shifted = [_strided(lhs, tap * dilation, steps, stride) for tap in range(taps)]
    if feature_group_count > 1:
        return sum(part * rhs[tap, 0] for tap, part in enumerate(shifted))
    columns = shifted[0] if taps == 1 else jnp.concatenate(shifted, axis=-1)
    return columns @ rhs.reshape(-1, rhs.shape[-1])


def _strided(x_BTC: jax.Array, first: int, steps: int, stride: int) -> jax.Array:
    """x[first], x[first + stride], ... (`steps` of them); by reshape, whose gradient is a plain pad."""
    if stride == 1:
        return x_BTC[:, first : first + steps]
    end = first + steps * stride
    if end > x_BTC.shape[1]:
        x_BTC = jnp.pad(x_BTC, ((0, 0), (0, end - x_BTC.shape[1]), (0, 0)))
    window = x_BTC[:, first:end]
    return window.reshape(window.shape[0], steps, stride, window.shape[2])[:, :, 0]


@contextlib.contextmanager
def convolutions(kind: str) -> Iterator[None]:
    """While tracing inside: "conv" leaves `jax.lax`'s convolution, "im2col" puts the matmul in its place."""
    original = jax.lax.conv_general_dilated
    if kind == "im2col":
        jax.lax.conv_general_dilated = _im2col_conv
    try:
        yield
    finally:
        jax.lax.conv_general_dilated = original
