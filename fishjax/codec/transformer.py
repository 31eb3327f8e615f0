"""The windowed transformer of the codec: after the last encoder block, before and after the quantiser.

Positions count from the start of the signal. The rotary table is built on the host for a stated longest
length; a whole signal needs exactly its own length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.codec.attention import KV, TransformerLayer
from fishjax.codec.layers import Tail
from fishjax.config import CodecTransformerConfig
from fishjax.model.layers import Linear, RMSNorm, rope_table


class WindowTransformer(nnx.Module):
    """`num_layers` layers and a final norm; (B, T, in_dim) -> (B, T, in_dim).

    `input_proj` and `output_proj` exist only when `in_dim` differs from the transformer's width.
    """

    def __init__(self, config: CodecTransformerConfig, in_dim: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        projected = in_dim != config.dim
        self.config = config
        self.input_proj = Linear(in_dim, config.dim, use_bias=True, dtype=dtype, rngs=rngs) if projected else None
        self.layers = nnx.List([TransformerLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.dim, config.norm_eps, dtype=dtype)
        self.output_proj = Linear(config.dim, in_dim, use_bias=True, dtype=dtype, rngs=rngs) if projected else None

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        """A whole signal from position 0."""
        rope_1Td2 = jnp.asarray(self.table(x_BTC.shape[1]))[None]
        x = x_BTC if self.input_proj is None else self.input_proj(x_BTC)
        for layer in self.layers:
            x = layer(x, rope_1Td2)
        return self._end(x)

    def stream_positions(
        self, x_BTC: jax.Array, kv: tuple[KV, ...], start_B: jax.Array, run_B: jax.Array, max_len: int
    ) -> tuple[jax.Array, tuple[KV, ...]]:
        """The next piece of each row, from position start_B; `kv` holds one ring per layer.

        `max_len` (static) is the longest stream; positions at or past it would be given the last table row.
        """
        position_BT = start_B[:, None] + jnp.arange(x_BTC.shape[1])[None]
        rope_BTd2 = jnp.asarray(self.table(max_len))[position_BT]
        x = x_BTC if self.input_proj is None else self.input_proj(x_BTC)
        rings = []
        for layer, ring in zip(self.layers, kv, strict=True):
            x, ring = layer.stream(x, rope_BTd2, ring, start_B, run_B)
            rings.append(ring)
        return self._end(x), tuple(rings)

    def empty_kv(self, batch: int, dtype) -> tuple[KV, ...]:
        """Rings before any signal: per layer keys and values (B, window, H, d)."""
        shape = (batch, self.config.window, self.config.num_heads, self.config.head_dim)
        return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in self.layers)

    def table(self, num_positions: int):
        """The rotary table (positions, head_dim / 2, 2), bfloat16 NumPy."""
        return rope_table(num_positions, self.config.head_dim, self.config.rope_base)

    def _end(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = self.norm(x_BTD)
        return x_BTD if self.output_proj is None else self.output_proj(x_BTD)

    def stream(self, x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """As a block of a whole run; only `stream_positions` carries a state."""
        if tail is not None:
            raise ValueError("as a block it runs whole signals only: pieces go through stream_positions")
        return self(x_BTC), ()
