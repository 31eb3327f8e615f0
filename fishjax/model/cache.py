"""The key/value cache of the slow transformer: one pair of buffers per layer, written at per-slot positions.

Plain pytrees that go into a jitted function and come out of it: donate them and the writes happen in place.
Rows at or beyond a slot's length are never read, so a cache is never cleared between requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fishjax.config import ModelConfig
from fishjax.model.block import attend_masked
from pallas_kernels import Backend, ScaledKV, append_kv, decode_attention, quantize_kv

# One trace and one lowering for all layers.
_decode_attention = jax.jit(decode_attention)
_append_kv = jax.jit(append_kv, static_argnames="backend")

Half = jax.Array | ScaledKV
"""Keys or values of one layer, (B, G, S, d)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Per layer `k_BGSd` (after norm and rotation) and `v_BGSd`: slots, kv heads, positions, head width.

    Each is an array, or `ScaledKV` for FP8.
    """

    k_BGSd: tuple[Half, ...]
    v_BGSd: tuple[Half, ...]

    @property
    def max_len(self) -> int:
        """Positions a slot can hold."""
        return self.k_BGSd[0].shape[2]


def init_cache(config: ModelConfig, batch: int, max_len: int, dtype=jnp.float32) -> KVCache:
    """An all-zero cache of `batch` slots with `max_len` positions each; `dtype` float8_e4m3fn gives `ScaledKV`."""
    slow = config.slow
    shape = (batch, slow.num_kv_heads, max_len, slow.head_dim)

    def zeros() -> Half:
        if jnp.dtype(dtype) == jnp.float8_e4m3fn:
            return ScaledKV(jnp.zeros(shape, jnp.float8_e4m3fn), jnp.ones(shape[:3], jnp.float32))
        return jnp.zeros(shape, dtype)

    layers = range(slow.num_layers)
    return KVCache(k_BGSd=tuple(zeros() for _ in layers), v_BGSd=tuple(zeros() for _ in layers))


def write(
    k_BGSd: Half,
    v_BGSd: Half,
    k_BTGd: jax.Array,
    v_BTGd: jax.Array,
    start_B: jax.Array,
    *,
    backend: Backend | None = None,
) -> tuple[Half, Half]:
    """Put T keys and values of each slot at its positions start .. start + T - 1; rows that fall outside are dropped.

    One column goes into an FP8 cache through `append_kv`, whose back end `backend` is.
    """
    if k_BTGd.shape[1] == 1 and isinstance(k_BGSd, ScaledKV) and isinstance(v_BGSd, ScaledKV):
        return _append_kv(k_BTGd[:, 0], v_BTGd[:, 0], k_BGSd, v_BGSd, start_B, backend=backend)
    return _put(k_BGSd, k_BTGd, start_B), _put(v_BGSd, v_BTGd, start_B)


def _put(cache: Half, rows_BTGd: jax.Array, start_B: jax.Array) -> Half:
    batch, length, num_heads = rows_BTGd.shape[:3]
    # All leading axes are indexed, in their order: where one is skipped, XLA's scatter on a GPU first transposes the
    # whole cache and afterwards transposes it back.
    slots_B11 = jnp.arange(batch)[:, None, None]
    positions_BT1 = start_B[:, None, None] + jnp.arange(length)[:, None]
    heads_G = jnp.arange(num_heads)

    def put(buffer: jax.Array, rows_BTG: jax.Array) -> jax.Array:
        rows_BTG = rows_BTG.astype(buffer.dtype)
        return buffer.at[slots_B11, heads_G, positions_BT1].set(rows_BTG, mode="drop", unique_indices=True)

    if isinstance(cache, ScaledKV):
        rows = quantize_kv(rows_BTGd)
        return ScaledKV(put(cache.values_BGSd, rows.values_BGSd), put(cache.scale_BGS, rows.scale_BGS))
    return put(cache, rows_BTGd)


def attend_cached(q_BTHd: jax.Array, k_BGSd: Half, v_BGSd: Half, start_B: jax.Array) -> jax.Array:
    """Attention of T queries at positions start .. start + T - 1 over the cache rows at or before each one.

    A single query that lies outside the cache reads nothing and gets zeros.
    """
    max_len = k_BGSd.shape[2]
    if q_BTHd.shape[1] == 1:
        lengths_B = jnp.where(start_B < max_len, start_B + 1, 0)
        return _decode_attention(q_BTHd[:, 0], k_BGSd, v_BGSd, lengths_B)[:, None]
    k_BGSd, v_BGSd = (_plain(half, q_BTHd.dtype) for half in (k_BGSd, v_BGSd))
    positions_BT = start_B[:, None] + jnp.arange(q_BTHd.shape[1])
    mask_BTS = jnp.arange(max_len) <= positions_BT[:, :, None]
    return attend_masked(q_BTHd, k_BGSd, v_BGSd, mask_BTS)


def _plain(half_BGSd: Half, dtype) -> jax.Array:
    return half_BGSd.dequantize().astype(dtype) if isinstance(half_BGSd, ScaledKV) else half_BGSd
