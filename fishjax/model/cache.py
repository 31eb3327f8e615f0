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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Per layer `k_BGSd` (after norm and rotation) and `v_BGSd`: slots, kv heads, positions, head width."""

    k_BGSd: tuple[jax.Array, ...]
    v_BGSd: tuple[jax.Array, ...]

    @property
    def max_len(self) -> int:
        """Positions a slot can hold."""
        return self.k_BGSd[0].shape[2]


def init_cache(config: ModelConfig, batch: int, max_len: int, dtype=jnp.float32) -> KVCache:
    """An all-zero cache of `batch` slots with `max_len` positions each."""
    slow = config.slow
    shape = (batch, slow.num_kv_heads, max_len, slow.head_dim)
    zeros = [jnp.zeros(shape, dtype) for _ in range(2 * slow.num_layers)]
    return KVCache(k_BGSd=tuple(zeros[::2]), v_BGSd=tuple(zeros[1::2]))


def write(cache_BGSd: jax.Array, rows_BTGd: jax.Array, start_B: jax.Array) -> jax.Array:
    """Put T rows of each slot at its positions start .. start + T - 1; rows that fall outside are dropped."""
    batch, length = rows_BTGd.shape[:2]
    slots_B1 = jnp.arange(batch)[:, None]
    positions_BT = start_B[:, None] + jnp.arange(length)
    rows_BTGd = rows_BTGd.astype(cache_BGSd.dtype)
    return cache_BGSd.at[slots_B1, :, positions_BT].set(rows_BTGd, mode="drop", unique_indices=True)


def attend_cached(q_BTHd: jax.Array, k_BGSd: jax.Array, v_BGSd: jax.Array, start_B: jax.Array) -> jax.Array:
    """Attention of T queries at positions start .. start + T - 1 over the cache rows at or before each one."""
    positions_BT = start_B[:, None] + jnp.arange(q_BTHd.shape[1])
    mask_BTS = jnp.arange(k_BGSd.shape[2]) <= positions_BT[:, :, None]
    return attend_masked(q_BTHd, k_BGSd, v_BGSd, mask_BTS)
