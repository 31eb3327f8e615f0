"""The slow transformer: one step per frame, over text tokens and frames of codes.

A column is one time step of the prompt matrix (C+1, T): row 0 a token id (text, or the semantic token of a
frame), rows 1..C the codes of that frame. Knows nothing of sampling; returns hidden states and logits.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.config import ModelConfig
from fishjax.model.block import Block, attend_masked, cached_rope_table
from fishjax.model.cache import KVCache, attend_cached, write
from fishjax.model.layers import Embedding, Linear, RMSNorm
from pallas_kernels import BlockScaled, MxScaled, matmul


class SlowTransformer(nnx.Module):
    """Embeddings, blocks, final norm and head. Parameter paths are the published flat names."""

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        slow = config.slow
        self.config = config
        self.embeddings = Embedding(config.vocab_size, slow.dim, dtype=dtype, rngs=rngs)
        num_code_rows = config.num_codebooks * config.codebook_size
        self.codebook_embeddings = Embedding(num_code_rows, slow.dim, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Block(slow, dtype=dtype, rngs=rngs) for _ in range(slow.num_layers)])
        self.norm = RMSNorm(slow.dim, slow.norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        self.output = None if tied else Linear(slow.dim, config.vocab_size, dtype=dtype, rngs=rngs)

    def embed(self, columns_BKT: jax.Array, *, generation: bool) -> jax.Array:
        """Columns (B, C+1, T) int32 -> x_BTD.

        Frames add the embeddings of their codes to that of their token. `generation` scales frames by
        1/sqrt(C+1) where the config says so; training never does (both as in the reference).
        """
        config = self.config
        tokens_BT = columns_BKT[:, 0]
        is_frame_BT = (tokens_BT >= config.semantic_begin_id) & (tokens_BT <= config.semantic_end_id)
        first_row_K1 = config.codebook_size * jnp.arange(config.num_codebooks)[:, None]
        codes_BKTD = self.codebook_embeddings(columns_BKT[:, 1:] + first_row_K1)
        x_BTD = self.embeddings(tokens_BT)
        codes_BTD = codes_BKTD.sum(axis=1, dtype=jnp.float32).astype(x_BTD.dtype)
        frames_BTD = x_BTD + codes_BTD
        if generation and config.scale_codebook_embeddings:
            frames_BTD = frames_BTD / math.sqrt(config.num_codebooks + 1)
        return jnp.where(is_frame_BT[..., None], frames_BTD, x_BTD)

    def forward(self, x_BTD: jax.Array, key_padding_mask_BT: jax.Array | None = None) -> jax.Array:
        """Cache-free causal pass at positions 0..T-1 -> hidden_BTD before the final norm.

        `key_padding_mask_BT` is true where a key is padding and must not be seen.
        """
        length = x_BTD.shape[1]
        mask_BTS = jnp.tril(jnp.ones((length, length), bool))[None]
        if key_padding_mask_BT is not None:
            mask_BTS = mask_BTS & ~key_padding_mask_BT[:, None, :]
        table_1Td2 = jnp.asarray(self._rope_table(length))[None]

        def attend(q_BTHd: jax.Array, k_BTGd: jax.Array, v_BTGd: jax.Array) -> jax.Array:
            return attend_masked(q_BTHd, k_BTGd.swapaxes(1, 2), v_BTGd.swapaxes(1, 2), mask_BTS)

        for layer in self.layers:
            x_BTD = layer(x_BTD, table_1Td2, attend)
        return x_BTD

    def extend(self, x_BTD: jax.Array, start_B: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """T more columns of each slot at its positions start .. start + T - 1 -> (hidden_BTD pre-norm, cache).

        Each column sees the cache rows at or before its own position. Rows that fall outside the cache are
        not written: a slot that must stay as it is gets `start = cache.max_len`.
        """
        positions_BT = start_B[:, None] + jnp.arange(x_BTD.shape[1])
        table_BTd2 = jnp.asarray(self._rope_table(cache.max_len))[positions_BT]
        keys, values = [], []

        def attend(q_BTHd: jax.Array, k_BTGd: jax.Array, v_BTGd: jax.Array) -> jax.Array:
            layer = len(keys)
            k_BGSd, v_BGSd = write(cache.k_BGSd[layer], cache.v_BGSd[layer], k_BTGd, v_BTGd, start_B)
            keys.append(k_BGSd)
            values.append(v_BGSd)
            return attend_cached(q_BTHd, k_BGSd, v_BGSd, start_B)

        for layer in self.layers:
            x_BTD = layer(x_BTD, table_BTd2, attend)
        return x_BTD, KVCache(k_BGSd=tuple(keys), v_BGSd=tuple(values))

    def head_weight(self) -> jax.Array:
        """The head's rows (V, D): `output.weight`, or the embeddings when they are tied."""
        return self.embeddings.weight[...] if self.output is None else self.output.weight[...]

    def logits(self, hidden_BTD: jax.Array, head_NK: jax.Array | BlockScaled | MxScaled | None = None) -> jax.Array:
        """Pre-norm hidden (..., D) -> logits (..., V), or (..., N) for the rows of a sliced head.

        Logits have the activations' type; a float32 head makes them float32.
        """
        head_NK = self.head_weight() if head_NK is None else head_NK
        normed_BTD = self.norm(hidden_BTD)
        return matmul(normed_BTD.astype(jnp.float32) if head_NK.dtype == jnp.float32 else normed_BTD, head_NK)

    def _rope_table(self, num_positions: int):
        slow = self.config.slow
        return cached_rope_table(num_positions, slow.head_dim, slow.rope_base)
