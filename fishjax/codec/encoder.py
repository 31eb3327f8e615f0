"""Sound to latents, one per hop: strided causal convolutions that double the channels, a transformer at the end."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.codec.layers import CausalConv, Chain, ResidualUnit, Snake
from fishjax.codec.transformer import WindowTransformer
from fishjax.config import CodecConfig, CodecTransformerConfig
from fishjax.errors import WeightsError


class Encoder(Chain):
    """(B, T, 1) -> (B, T / hop_length, latent_dim). Published names: `block.0` .. `block.{rates + 2}`."""

    def __init__(self, config: CodecConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        channels = config.encoder_dim
        blocks: list[nnx.Module] = [CausalConv(1, channels, 7, dtype=dtype, rngs=rngs)]
        for stride, num_layers in zip(config.encoder_rates, config.encoder_transformer_layers, strict=True):
            blocks.append(_encoder_block(config, channels, stride, num_layers, dtype=dtype, rngs=rngs))
            channels *= 2
        blocks.append(Snake(channels, dtype=dtype))
        blocks.append(CausalConv(channels, config.latent_dim, 3, dtype=dtype, rngs=rngs))
        super().__init__(blocks)

    def __call__(self, audio_BT1: jax.Array) -> jax.Array:
        """A whole signal."""
        return super().__call__(audio_BT1.astype(self.block[0].conv.weight.dtype))


def _encoder_block(config: CodecConfig, channels: int, stride: int, num_layers: int, *, dtype, rngs) -> Chain:
    """c channels -> 2c channels at 1 / stride of the rate, then a transformer if the config has one here."""
    blocks: list[nnx.Module] = [
        *(ResidualUnit(channels, dilation, dtype=dtype, rngs=rngs) for dilation in (1, 3, 9)),
        Snake(channels, dtype=dtype),
        CausalConv(channels, 2 * channels, 2 * stride, stride=stride, dtype=dtype, rngs=rngs),
    ]
    if num_layers:
        transformer = encoder_transformer(config, 2 * channels, num_layers)
        blocks.append(WindowTransformer(transformer, 2 * channels, dtype=dtype, rngs=rngs))
    return Chain(blocks)


def encoder_transformer(config: CodecConfig, dim: int, num_layers: int) -> CodecTransformerConfig:
    """The shape of the transformer behind an encoder block that ends in `dim` channels."""
    if dim % config.encoder_head_dim:
        raise WeightsError(f"an encoder transformer of {dim} channels is not whole heads of {config.encoder_head_dim}")
    return dataclasses.replace(
        config.transformer,
        num_layers=num_layers,
        dim=dim,
        num_heads=dim // config.encoder_head_dim,
        head_dim=config.encoder_head_dim,
        ffn_dim=3 * dim,
        window=config.encoder_window,
    )
