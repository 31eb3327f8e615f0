"""One new key and value row per slot into an FP8 cache: the formula.

    values[b, g, positions[b]], scale[b, g, positions[b]] = quantize_kv(row[b, g])

Everything else of the cache stays as it is. A position counts from the end where it is negative, as NumPy's indices do;
one that lies outside all the same, below -S or at S and beyond, writes nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..decode_attention.reference import quantize_kv
from ..types import ScaledKV


def append_kv(
    k_BGd: jax.Array, v_BGd: jax.Array, k_cache: ScaledKV, v_cache: ScaledKV, positions_B: jax.Array
) -> tuple[ScaledKV, ScaledKV]:
    """The two caches with one row more per slot and kv head; see the module for the formula."""
    return _append(k_BGd, k_cache, positions_B), _append(v_BGd, v_cache, positions_B)


def _append(x_BGd: jax.Array, cache: ScaledKV, positions_B: jax.Array) -> ScaledKV:
    rows = quantize_kv(x_BGd[:, :, None])
    B, G = x_BGd.shape[:2]
    # All leading axes are indexed, in their order: where one is skipped, XLA's scatter on a GPU transposes the cache.
    where = jnp.arange(B)[:, None], jnp.arange(G), positions_B[:, None]

    def put(buffer: jax.Array, rows: jax.Array) -> jax.Array:
        return buffer.at[where].set(rows[:, :, 0], mode="drop", unique_indices=True)

    return ScaledKV(put(cache.values_BGSd, rows.values_BGSd), put(cache.scale_BGS, rows.scale_BGS))
