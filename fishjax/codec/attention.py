"""The codec's transformer layer: attention over a window of the past, whole signals or pieces with a ring of keys.

`layer(x, rope)` runs a whole signal; `layer.stream(...)` runs the next piece of each row and carries the newest
`window` keys and values. Both see the same keys; softmax and norms compute in float32 inside.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.config import CodecTransformerConfig
from fishjax.model.layers import FeedForward, Linear, RMSNorm, apply_rope

KV = tuple[jax.Array, jax.Array]  # one layer's ring: keys and values, (B, window, H, d) each


class LayerScale(nnx.Module):
    """Multiply by `gamma` (C,)."""

    def __init__(self, width: int, *, dtype=jnp.float32):
        self.gamma = nnx.Param(jnp.full((width,), 1e-2, dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Any shape (..., C)."""
        return x * self.gamma[...]


def window_mask(num_queries: int, window: int) -> jax.Array:
    """(T, T) bool: query i sees keys j with i - window < j <= i."""
    return _sees(jnp.arange(num_queries)[:, None], jnp.arange(num_queries)[None], window)


def _sees(query: jax.Array, key: jax.Array, window: int) -> jax.Array:
    return (key <= query) & (key > query - window)


class Attention(nnx.Module):
    """Multi-head attention over a window of the past, rotary positions, no biases."""

    def __init__(self, config: CodecTransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        heads_dim = config.num_heads * config.head_dim
        self.wqkv = Linear(config.dim, 3 * heads_dim, dtype=dtype, rngs=rngs)
        self.wo = Linear(heads_dim, config.dim, dtype=dtype, rngs=rngs)
        self.num_heads = config.num_heads
        self.window = config.window

    def __call__(self, x_BTD: jax.Array, rope_BTd2: jax.Array) -> jax.Array:
        """A whole signal. Memory grows with T * window, not T^2: long ones go in blocks of `window` queries."""
        q, k, v = self._qkv(x_BTD, rope_BTd2)
        steps, window = x_BTD.shape[1], self.window
        if steps <= 2 * window:
            return self._merge(_attend(q, [(k, v, window_mask(steps, window)[None])]))
        q, k, v = (_in_blocks(part, window) for part in (q, k, v))
        # Block n sees itself and block n - 1; block 0 sees a block of zeros, which the mask hides.
        k, v = (jnp.concatenate([_shifted(part), part], axis=2) for part in (k, v))
        key = jnp.arange(-window, window)[None]
        mask = _sees(jnp.arange(window)[:, None], key, window)
        mask_nQS = mask[None] & ((jnp.arange(q.shape[1]) > 0)[:, None, None] | (key >= 0)[None])
        batch, blocks = q.shape[:2]
        mask_BQS = jnp.broadcast_to(mask_nQS[None], (batch, *mask_nQS.shape)).reshape(-1, *mask.shape)
        q, k, v = (part.reshape(-1, *part.shape[2:]) for part in (q, k, v))
        out = _attend(q, [(k, v, mask_BQS)])
        return self._merge(out.reshape(batch, blocks * window, *out.shape[2:])[:, :steps])

    def stream(
        self, x_BTD: jax.Array, rope_BTd2: jax.Array, kv: KV, start_B: jax.Array, run_B: jax.Array
    ) -> tuple[jax.Array, KV]:
        """The next T positions, start_B .. start_B + T - 1, of each row.

        `kv` is the ring: position p lies in place p mod window. Places whose position is not yet reached are
        hidden, so a row restarts by start = 0 alone. Rows outside `run_B` write nothing.
        """
        q, k, v = self._qkv(x_BTD, rope_BTd2)
        window, steps = self.window, x_BTD.shape[1]
        query_BT = start_B[:, None] + jnp.arange(steps)[None]
        place_S = jnp.arange(window)[None]
        if steps == 1:
            # The one new key takes the place of the one that leaves the window: written first, the ring is all there is
            # to look at, which takes fewer launches than the ring and the key by themselves.
            kv = _written(kv, (k, v), query_BT, run_B)
            return self._merge(_attend(q, [(*kv, (place_S <= query_BT)[:, None])])), kv
        # The newest position before start_B that falls in each place; negative: never written.
        held_BS = start_B[:, None] - 1 - (start_B[:, None] - 1 - place_S) % window
        old_mask = _sees(query_BT[:, :, None], held_BS[:, None], window) & (held_BS >= 0)[:, None]
        out = _attend(q, [(*kv, old_mask), (k, v, window_mask(steps, window)[None])])
        kept = min(steps, window)
        newest = k[:, steps - kept :], v[:, steps - kept :]
        return self._merge(out), _written(kv, newest, query_BT[:, steps - kept :], run_B)

    def _qkv(self, x_BTD: jax.Array, rope_BTd2: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = jnp.split(self.wqkv(x_BTD), 3, axis=-1)
        q, k, v = (part.reshape(*part.shape[:2], self.num_heads, -1) for part in (q, k, v))
        return apply_rope(q, rope_BTd2), apply_rope(k, rope_BTd2), v

    def _merge(self, out_BTHd: jax.Array) -> jax.Array:
        return self.wo(out_BTHd.reshape(*out_BTHd.shape[:2], -1))


def _written(kv: KV, new: KV, position_BT: jax.Array, run_B: jax.Array) -> KV:
    """The ring with keys and values of some positions in their places; rows outside `run_B` write nothing."""
    window = kv[0].shape[1]
    row_B1 = jnp.arange(position_BT.shape[0])[:, None]
    place_BT = jnp.where(run_B[:, None], position_BT % window, window)
    k, v = (
        ring.at[row_B1, place_BT].set(part.astype(ring.dtype), mode="drop") for ring, part in zip(kv, new, strict=True)
    )
    return k, v


def _in_blocks(x_BTHd: jax.Array, size: int) -> jax.Array:
    """(B, T, H, d) -> (B, blocks, size, H, d), filled up with zeros."""
    x_BTHd = jnp.pad(x_BTHd, ((0, 0), (0, -x_BTHd.shape[1] % size), (0, 0), (0, 0)))
    return x_BTHd.reshape(x_BTHd.shape[0], -1, size, *x_BTHd.shape[2:])


def _shifted(blocks: jax.Array) -> jax.Array:
    """The block before each block; zeros before the first."""
    return jnp.pad(blocks[:, :-1], ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))


def _attend(q_BTHd: jax.Array, parts: Sequence[tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
    """Attention of queries over several sets of (keys BSHd, values BSHd, mask B|1 T S); softmax in float32."""
    scale = q_BTHd.shape[-1] ** -0.5
    scores = [
        jnp.where(
            mask[:, None],
            jnp.einsum("bthd,bshd->bhts", q_BTHd, k.astype(q_BTHd.dtype), preferred_element_type=jnp.float32) * scale,
            -jnp.inf,
        )
        for k, _, mask in parts
    ]
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q_BTHd.dtype)
    splits = jnp.split(weights, [parts[0][0].shape[1]], axis=-1) if len(parts) == 2 else [weights]
    out = sum(
        jnp.einsum("bhts,bshd->bthd", weight, v.astype(weight.dtype), preferred_element_type=jnp.float32)
        for weight, (_, v, _) in zip(splits, parts, strict=True)
    )
    return jnp.asarray(out).astype(q_BTHd.dtype)


class TransformerLayer(nnx.Module):
    """Attention and feed-forward, each normed before and scaled after."""

    def __init__(self, config: CodecTransformerConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.dim, config.norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, rngs=rngs)
        self.attention_layer_scale = LayerScale(config.dim, dtype=dtype)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps, dtype=dtype)
        self.feed_forward = FeedForward(config.dim, config.ffn_dim, dtype=dtype, rngs=rngs)
        self.ffn_layer_scale = LayerScale(config.dim, dtype=dtype)

    def __call__(self, x_BTD: jax.Array, rope_BTd2: jax.Array) -> jax.Array:
        """A whole signal."""
        return self._rest(x_BTD, self.attention(self.attention_norm(x_BTD), rope_BTd2))

    def stream(
        self, x_BTD: jax.Array, rope_BTd2: jax.Array, kv: KV, start_B: jax.Array, run_B: jax.Array
    ) -> tuple[jax.Array, KV]:
        """The next piece; arguments as `Attention.stream`."""
        attended, kv = self.attention.stream(self.attention_norm(x_BTD), rope_BTd2, kv, start_B, run_B)
        return self._rest(x_BTD, attended), kv

    def _rest(self, x_BTD: jax.Array, attended_BTD: jax.Array) -> jax.Array:
        x_BTD = x_BTD + self.attention_layer_scale(attended_BTD)
        return x_BTD + self.ffn_layer_scale(self.feed_forward(self.ffn_norm(x_BTD)))
