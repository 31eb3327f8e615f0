"""Building blocks of the codec: causal convolutions, snake, residual units, ConvNeXt.

Everything is causal and channels last: (B, T, C). A block has two doors to one body: `block(x)` runs a whole
signal that starts from silence, `block.stream(x, tail)` runs the next piece of it and returns what the piece
after that needs to know. `tail=None` means silence before; so the whole run is a stream of one piece.

Tails are nested tuples of arrays (B, steps, channels): the last inputs that a later output still sees.

Kernels: convolution (k, in, out). Transposed convolution (k/s, in, s*out), see `CausalTransposedConv`.
Weights set the activation dtype; norms and snake compute in float32 inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.model.layers import Linear
from pallas_kernels import causal_conv
from pallas_kernels.causal_conv.reference import shifted, snake, steps

Tail = Any  # nested tuples of arrays; None is silence


def depthwise(past_BPC: jax.Array, x_BTC: jax.Array, w_k1C: jax.Array) -> jax.Array:
    """Causal convolution of each channel by itself, summed in float32: (B, T, C) behind k - 1 steps -> (B, T, C)."""
    y_BTC = jnp.zeros(x_BTC.shape, jnp.float32)
    for tap, seen_BTC in enumerate(shifted(past_BPC, x_BTC, w_k1C.shape[0])):
        y_BTC += seen_BTC.astype(jnp.float32) * w_k1C[tap].astype(jnp.float32)
    return y_BTC.astype(x_BTC.dtype)


class Kernel(nnx.Module):
    """`weight` and `bias` of a convolution; the level of naming that published checkpoints have (`conv.`)."""

    def __init__(self, shape: tuple[int, ...], fan_in: int, num_out: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.weight = nnx.Param((fan_in**-0.5 * jax.random.normal(rngs.params(), shape)).astype(dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype))


class CausalConv(nnx.Module):
    """Convolution that sees only the past: (B, T, in) -> (B, ceil(T / stride), out).

    Silence before the signal is k_eff - stride zeros, k_eff = (kernel_size - 1) * dilation + 1; a last step
    that is not whole is filled with zeros. `depthwise` convolves each channel by itself (in == out).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        depthwise: bool = False,
        dtype=jnp.float32,
        rngs: nnx.Rngs,
    ):
        fan = 1 if depthwise else in_channels
        shape = (kernel_size, fan, out_channels)
        self.conv = Kernel(shape, kernel_size * fan, out_channels, dtype=dtype, rngs=rngs)
        self.in_channels = in_channels
        self.stride = stride
        self.dilation = dilation
        self.depthwise = depthwise
        self.tail_steps = (kernel_size - 1) * dilation + 1 - stride

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        """A whole signal."""
        return self.stream(x_BTC, None)[0]

    def silence(self, batch: int, dtype) -> Tail:
        """The tail before any signal."""
        return jnp.zeros((batch, self.tail_steps, self.in_channels), dtype)

    def stream(
        self, x_BTC: jax.Array, tail: Tail, *, alpha_C: jax.Array | None = None, residual_BTC: jax.Array | None = None
    ) -> tuple[jax.Array, Tail]:
        """The next piece; its length must be a multiple of the stride when another piece follows.

        `residual_BTC` is added to what comes out, and a snake of `alpha_C` bends that; neither goes with `depthwise`.
        """
        fill = -x_BTC.shape[1] % self.stride
        past_BPC = self.silence(x_BTC.shape[0], x_BTC.dtype) if tail is None else tail
        if self.depthwise:
            assert alpha_C is None and residual_BTC is None, "a depthwise convolution stands alone"
            tail = steps(past_BPC, x_BTC, x_BTC.shape[1], self.tail_steps)
            return depthwise(past_BPC, x_BTC, self.conv.weight[...]) + self.conv.bias[...], tail
        return causal_conv(
            past_BPC,
            jnp.pad(x_BTC, ((0, 0), (0, fill), (0, 0))),
            self.conv.weight[...],
            self.conv.bias[...],
            stride=self.stride,
            dilation=self.dilation,
            alpha_O=alpha_C,
            residual_BTO=residual_BTC,
        )


class CausalTransposedConv(nnx.Module):
    """Transposed convolution without its last k - s samples: (B, T, in) -> (B, T * stride, out).

    Output sample t * s + r is the sum over j < k/s of x[t - j] w[j * s + r]: an ordinary causal convolution
    of k/s taps that makes `stride` samples of `out` channels at a time. `weight` is stored as that kernel,
    (k/s, in, s * out) with the oldest tap first, so that nothing is rearranged when it runs.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, stride: int, *, dtype=jnp.float32, rngs: nnx.Rngs
    ):
        taps = kernel_size // stride
        self.conv = Kernel(
            (taps, in_channels, stride * out_channels), taps * in_channels, out_channels, dtype=dtype, rngs=rngs
        )
        self.in_channels = in_channels
        self.stride = stride
        self.tail_steps = taps - 1

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        """A whole signal."""
        return self.stream(x_BTC, None)[0]

    def silence(self, batch: int, dtype) -> Tail:
        """The tail before any signal."""
        return jnp.zeros((batch, self.tail_steps, self.in_channels), dtype)

    def stream(self, x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece, of any length."""
        batch, num_steps = x_BTC.shape[:2]
        past_BPC = self.silence(batch, x_BTC.dtype) if tail is None else tail
        y, tail = causal_conv(past_BPC, x_BTC, self.conv.weight[...], self.conv.bias[...])
        return y.reshape(batch, num_steps * self.stride, -1), tail


class Snake(nnx.Module):
    """x + sin(alpha x)^2 / (alpha + 1e-9), `alpha` (C,) per channel."""

    def __init__(self, channels: int, *, dtype=jnp.float32):
        self.alpha = nnx.Param(jnp.ones((channels,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Any shape (..., C)."""
        return snake(x, self.alpha[...])

    def silence(self, batch: int, dtype) -> Tail:
        """Nothing is remembered."""
        return ()

    def stream(self, x: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece, of any length."""
        return self(x), ()


class Chain(nnx.Module):
    """Blocks one after the other, under the published name `block`."""

    def __init__(self, blocks: Sequence[Any]):
        self.block = nnx.List(blocks)

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        """A whole signal."""
        return self.stream(x_BTC, None)[0]

    def silence(self, batch: int, dtype) -> Tail:
        """The tail before any signal."""
        return chain_silence(self.block, batch, dtype)

    def stream(self, x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece."""
        return run_chain(self.block, x_BTC, tail)


def chain_silence(blocks: Sequence[Any], batch: int, dtype) -> Tail:
    """The tails of `blocks` before any signal."""
    return tuple(block.silence(batch, dtype) for block in blocks)


def run_chain(blocks: Sequence[Any], x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
    """Run `blocks` in turn on the next piece of a signal."""
    tails = []
    for index, block in enumerate(blocks):
        x_BTC, next_tail = block.stream(x_BTC, None if tail is None else tail[index])
        tails.append(next_tail)
    return x_BTC, tuple(tails)


class ResidualUnit(Chain):
    """Snake, dilated convolution of 7 taps, snake, convolution of 1 tap; plus the input."""

    def __init__(self, channels: int, dilation: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        super().__init__(
            [
                Snake(channels, dtype=dtype),
                CausalConv(channels, channels, 7, dilation=dilation, dtype=dtype, rngs=rngs),
                Snake(channels, dtype=dtype),
                CausalConv(channels, channels, 1, dtype=dtype, rngs=rngs),
            ]
        )

    def stream(self, x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece, of any length."""
        bend, convolution, bend_again, point = self.block
        tails = (None,) * 4 if tail is None else tail
        y, convolution_tail = convolution.stream(bend(x_BTC), tails[1], alpha_C=bend_again.alpha[...])
        y, point_tail = point.stream(y, tails[3], residual_BTC=x_BTC)
        return y, ((), convolution_tail, (), point_tail)


class LayerNorm(nnx.Module):
    """Layer norm over channels, computed in float32."""

    def __init__(self, width: int, eps: float, *, dtype=jnp.float32):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.bias = nnx.Param(jnp.zeros((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Any shape (..., C)."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.weight[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)).astype(x.dtype)


class ConvNeXt(nnx.Module):
    """Depthwise convolution of 7 taps, layer norm, two linears with GELU between, scaled; plus the input."""

    def __init__(self, channels: int, *, expansion: int = 4, dtype=jnp.float32, rngs: nnx.Rngs):
        self.dwconv = CausalConv(channels, channels, 7, depthwise=True, dtype=dtype, rngs=rngs)
        self.norm = LayerNorm(channels, 1e-6, dtype=dtype)
        self.pwconv1 = Linear(channels, expansion * channels, use_bias=True, dtype=dtype, rngs=rngs)
        self.pwconv2 = Linear(expansion * channels, channels, use_bias=True, dtype=dtype, rngs=rngs)
        self.gamma = nnx.Param(jnp.full((channels,), 1e-2, dtype))

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        """A whole signal."""
        return self.stream(x_BTC, None)[0]

    def silence(self, batch: int, dtype) -> Tail:
        """The tail before any signal."""
        return self.dwconv.silence(batch, dtype)

    def stream(self, x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece, of any length."""
        y, tail = self.dwconv.stream(x_BTC, tail)
        y = jax.nn.gelu(self.pwconv1(self.norm(y)), approximate=False)
        return x_BTC + self.gamma[...] * self.pwconv2(y), tail
