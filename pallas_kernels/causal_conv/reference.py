"""A causal convolution behind its past, and what a codec does next with the result: the formula.

    seen = past, x                                        (B, P + T, in), P = (taps - 1) * dilation + 1 - stride
    y[b, t] = bias + sum over taps k of seen[b, t * stride + k * dilation] w[k]               (B, T / stride, out)
    y += residual
    y += sin(alpha * y)^2 / (alpha + 1e-9)                snake (Ziyin et al., arXiv:2006.08195)

The next piece's past is the end of what was seen. A bias shorter than the output channels repeats: such a convolution
makes several samples of a transposed one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

SNAKE_EPS = 1e-9
MATMUL_BYTES = 48 * 2**20
"""On a GPU a convolution of several taps is one matmul over the taps' shifted copies of its input, where these copies
take at most so much. Above it, and on other devices, XLA's convolution runs.

Where a tap makes few channels of many (the codec's last convolution makes one), the matmul comes first, over what is
there once, and its products are shifted.

For the matmul: a convolution of a library cannot be part of a captured graph. It ends the graph, is launched by itself,
and its weights are transposed first. A step whose convolutions are all matmuls is one graph.
Against it: the copies are written and read once more; the operations are the same. While the copies stay in the L2
cache (50 MB on Hopper) that costs less than a launch; past it, the memory's time for twice the copies.
In the published codec, in bfloat16, the largest copies are 2.75 MB a slot and frame: with up to 18 slots times frames a
call all are matmuls; with 64 those are that have many channels and few steps, whose weights are the large ones.

The sizes are known when a program is made: a server of so many slots always computes the same way.
"""


def causal_conv(
    past_BPI: jax.Array,
    x_BTI: jax.Array,
    w_kIO: jax.Array,
    bias_O: jax.Array,
    stride: int = 1,
    dilation: int = 1,
    alpha_O: jax.Array | None = None,
    residual_BTO: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(B, T / stride, out) of x's type, rounded to it after each line of the formula, and the next past."""
    past = steps(past_BPI, x_BTI, x_BTI.shape[1], past_BPI.shape[1])
    y = convolve(past_BPI, x_BTI, w_kIO, stride, dilation)
    batch, num_steps, num_out = y.shape
    y = (y.reshape(batch, num_steps, -1, bias_O.shape[0]) + bias_O).reshape(batch, num_steps, num_out)
    if residual_BTO is not None:
        y = residual_BTO + y
    return y if alpha_O is None else snake(y, alpha_O), past


def snake(x: jax.Array, alpha_C: jax.Array) -> jax.Array:
    """x + sin(alpha x)^2 / (alpha + 1e-9) in float32, of x's type (..., C)."""
    wide, alpha = x.astype(jnp.float32), alpha_C.astype(jnp.float32)
    return (wide + jnp.square(jnp.sin(alpha * wide)) / (alpha + SNAKE_EPS)).astype(x.dtype)


def convolve(past_BPI: jax.Array, x_BTI: jax.Array, w_kIO: jax.Array, stride: int = 1, dilation: int = 1) -> jax.Array:
    """The sum alone: (B, T / stride, out). Which program it becomes: see MATMUL_BYTES."""
    taps, num_in, num_out = w_kIO.shape
    num_steps = x_BTI.shape[1]
    few = stride == 1 and taps * num_out < num_in  # fewer products of a step than numbers: they are shifted, not these

    def matmul(past_BPI: jax.Array, x_BTI: jax.Array, w_kIO: jax.Array) -> jax.Array:
        if few:
            seen = jnp.concatenate([past_BPI, x_BTI], axis=1)
            products = jnp.einsum("bti,kio->btko", seen, w_kIO, preferred_element_type=jnp.float32)
            y = jnp.zeros((x_BTI.shape[0], num_steps, num_out), jnp.float32)
            for tap in range(taps):
                y += products[:, tap * dilation :][:, :num_steps, tap]
            return y.astype(x_BTI.dtype)
        stacked = jnp.concatenate(shifted(past_BPI, x_BTI, taps, stride, dilation), axis=-1)
        return stacked @ w_kIO.reshape(-1, num_out)

    def convolution(past_BPI: jax.Array, x_BTI: jax.Array, w_kIO: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            jnp.concatenate([past_BPI, x_BTI], axis=1),
            w_kIO,
            window_strides=(stride,),
            padding=((0, 0),),
            rhs_dilation=(dilation,),
            dimension_numbers=("NWC", "WIO", "NWC"),
        )

    if taps == 1 and stride == 1:
        return matmul(past_BPI, x_BTI, w_kIO)
    if (x_BTI.nbytes if few else taps * x_BTI.nbytes // stride) > MATMUL_BYTES:
        return convolution(past_BPI, x_BTI, w_kIO)
    return jax.lax.platform_dependent(past_BPI, x_BTI, w_kIO, cuda=matmul, default=convolution)


def shifted(past_BPC: jax.Array, x_BTC: jax.Array, taps: int, stride: int = 1, dilation: int = 1) -> list[jax.Array]:
    """What each tap sees, oldest first: every `stride`-th of the steps."""
    span = x_BTC.shape[1] - stride + 1
    return [steps(past_BPC, x_BTC, tap * dilation, span)[:, ::stride] for tap in range(taps)]


def steps(past_BPC: jax.Array, x_BTC: jax.Array, start: int, num: int) -> jax.Array:
    """`num` steps from `start` of the past and the signal, as if they were one. No copy of both is made for it."""
    seam = past_BPC.shape[1]
    old = past_BPC[:, start : start + num]
    new = x_BTC[:, max(start - seam, 0) : max(start + num - seam, 0)]
    return new if start >= seam else jnp.concatenate([old, new], axis=1)
