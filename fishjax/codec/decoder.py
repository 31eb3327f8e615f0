"""Latents to sound: causal transposed convolutions that halve the channels, residual units after each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.codec.layers import (
    CausalConv,
    CausalTransposedConv,
    Chain,
    ResidualUnit,
    Snake,
    Tail,
    chain_silence,
    run_chain,
)
from fishjax.config import CodecConfig


class Decoder(nnx.Module):
    """(B, T, latent_dim) -> (B, T * hop_length, 1) float32 in -1..1. Published names: `model.0` .. ."""

    def __init__(self, config: CodecConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        channels = config.decoder_dim
        blocks: list[nnx.Module] = [CausalConv(config.latent_dim, channels, 7, dtype=dtype, rngs=rngs)]
        for stride in config.decoder_rates:
            blocks.append(_decoder_block(channels, stride, dtype=dtype, rngs=rngs))
            channels //= 2
        blocks.append(Snake(channels, dtype=dtype))
        blocks.append(CausalConv(channels, 1, 7, dtype=dtype, rngs=rngs))
        self.model = nnx.List(blocks)

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        """A whole signal."""
        return self.stream(x_BTC, None)[0]

    def silence(self, batch: int, dtype) -> Tail:
        """The tail before any signal."""
        return chain_silence(self.model, batch, dtype)

    def stream(self, x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece, of any length."""
        y, tail = run_chain(self.model, x_BTC, tail)
        return jnp.tanh(y.astype(jnp.float32)), tail


def _decoder_block(channels: int, stride: int, *, dtype, rngs: nnx.Rngs) -> Chain:
    """c channels -> c / 2 channels at `stride` times the rate."""
    return Chain(
        [
            Snake(channels, dtype=dtype),
            CausalTransposedConv(channels, channels // 2, 2 * stride, stride, dtype=dtype, rngs=rngs),
            *(ResidualUnit(channels // 2, dilation, dtype=dtype, rngs=rngs) for dilation in (1, 3, 9)),
        ]
    )
