"""The fast transformer: within one frame, from the slow hidden state and code 0 to codes 1..C-1.

Its sequence has C positions: the projected hidden state, then the embeddings of codes 0..C-2; position k
predicts code k. All positions share one embedding table and one head. In generation code 0 comes from the
slow head, so positions 0 and 1 go in together and the logits of position 0 are never computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.config import ModelConfig
from fishjax.model.block import Block, attend_masked, cached_rope_table
from fishjax.model.layers import Embedding, Linear, RMSNorm

# Per layer the keys and the values (B, G, d) of each position so far: they live inside one frame. Separate arrays,
# because one that grows by concatenation, and batched products of four rows by ten, cost a GPU seven launches a layer.
FrameCache = tuple[tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]], ...]
# (codebook k as a Python int, logits_BN) -> codes_B int32
PickFn = Callable[[int, jax.Array], jax.Array]


class FastTransformer(nnx.Module):
    """Parameter paths are the published flat names without their `fast_` prefix."""

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        fast = config.fast
        self.config = config
        self.project_in = (
            Linear(config.slow.dim, fast.dim, use_bias=True, dtype=dtype, rngs=rngs)
            if config.has_fast_projection
            else None
        )
        self.embeddings = Embedding(config.codebook_size, fast.dim, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Block(fast, dtype=dtype, rngs=rngs) for _ in range(fast.num_layers)])
        self.norm = RMSNorm(fast.dim, fast.norm_eps, dtype=dtype)
        self.output = Linear(fast.dim, config.codebook_size, dtype=dtype, rngs=rngs)

    def project(self, hidden_BD: jax.Array) -> jax.Array:
        """The slow hidden state (..., D) at the fast width and type; the identity when both agree."""
        hidden_BD = hidden_BD.astype(self.embeddings.weight[...].dtype)
        return hidden_BD if self.project_in is None else self.project_in(hidden_BD)

    def forward(self, projected_ND: jax.Array, codes_NK: jax.Array) -> jax.Array:
        """Teacher forced over N frames: (N, Df) and codes (N, C or C-1) int -> logits (N, C, codebook size).

        Only codes 0..C-2 are read.
        """
        codes_NK = codes_NK[:, : self.config.num_codebooks - 1]
        x_NKD = jnp.concatenate([projected_ND[:, None], self.embeddings(codes_NK)], axis=1)
        length = x_NKD.shape[1]
        mask_1TS = jnp.tril(jnp.ones((length, length), bool))[None]

        def attend(q_BTHd: jax.Array, k_BTGd: jax.Array, v_BTGd: jax.Array) -> jax.Array:
            k_BGSd, v_BGSd = k_BTGd.swapaxes(1, 2), v_BTGd.swapaxes(1, 2)
            return attend_masked(q_BTHd, k_BGSd, v_BGSd, mask_1TS, score_dtype=q_BTHd.dtype)

        for layer in self.layers:
            x_NKD = layer(x_NKD, self._rope(0, length), attend)
        return self.output(self.norm(x_NKD))

    def start(self, projected_BD: jax.Array, semantic_code_B: jax.Array) -> tuple[jax.Array, FrameCache]:
        """Positions 0 and 1 of a frame in one pass -> (logits_BN of code 1, cache)."""
        x_B2D = jnp.stack([projected_BD, self.embeddings(semantic_code_B)], axis=1)
        hidden_B2D, cache = self._extend(x_B2D, ())
        return self.output(self.norm(hidden_B2D[:, -1])), cache

    def step(self, code_B: jax.Array, cache: FrameCache) -> tuple[jax.Array, FrameCache]:
        """The next position, holding code k -> (logits_BN of code k + 1, cache)."""
        hidden_B1D, cache = self._extend(self.embeddings(code_B)[:, None], cache)
        return self.output(self.norm(hidden_B1D[:, -1])), cache

    def frame(self, projected_BD: jax.Array, semantic_code_B: jax.Array, pick: PickFn) -> jax.Array:
        """All codes of one frame (B, C) int32: code 0 as given, `pick` chooses codes 1..C-1 from their logits.

        C-1 passes: the first one carries two rows a slot.
        """
        codes = [semantic_code_B.astype(jnp.int32)]
        logits_BN, cache = self.start(projected_BD, semantic_code_B)
        for k in range(1, self.config.num_codebooks):
            codes.append(pick(k, logits_BN).astype(jnp.int32))
            if k + 1 < self.config.num_codebooks:
                logits_BN, cache = self.step(codes[-1], cache)
        return jnp.stack(codes, axis=1)

    def _extend(self, x_BTD: jax.Array, cache: FrameCache) -> tuple[jax.Array, FrameCache]:
        """T more positions after those in `cache` (empty: from position 0)."""
        start, length = len(cache[0][0]) if cache else 0, x_BTD.shape[1]
        grown: list[tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]] = []

        def attend(q_BTHd: jax.Array, k_BTGd: jax.Array, v_BTGd: jax.Array) -> jax.Array:
            before = cache[len(grown)] if cache else ((), ())
            keys, values = (
                (*past, *(new[:, t] for t in range(length))) for past, new in zip(before, (k_BTGd, v_BTGd), strict=True)
            )
            grown.append((keys, values))
            seen = (start + t + 1 for t in range(length))
            return jnp.stack([_attend(q_BTHd[:, t], keys[:n], values[:n]) for t, n in enumerate(seen)], axis=1)

        for layer in self.layers:
            x_BTD = layer(x_BTD, self._rope(start, length), attend)
        return x_BTD, tuple(grown)

    def _rope(self, start: int, length: int) -> jax.Array:
        """The rotary rows of so many positions, (1, T, d / 2, 2)."""
        fast = self.config.fast
        table = cached_rope_table(self.config.num_codebooks, fast.head_dim, fast.rope_base)
        return jnp.asarray(table[start : start + length])[None]


def _attend(q_BHd: jax.Array, keys: tuple[jax.Array, ...], values: tuple[jax.Array, ...]) -> jax.Array:
    """`attend_masked` of one query over a few positions, each an array (B, G, d); scores in the type of q."""
    dtype, head_dim = q_BHd.dtype, q_BHd.shape[-1]
    q_BGRd = q_BHd.reshape(*keys[0].shape[:2], -1, head_dim).astype(jnp.float32)
    dots = [jnp.sum(q_BGRd * k_BGd[:, :, None], axis=-1, keepdims=True) for k_BGd in keys]
    scores = [(dot.astype(dtype) * head_dim**-0.5).astype(jnp.float32) for dot in dots]
    top = functools.reduce(jnp.maximum, scores)
    weights = [jnp.exp(score - top) for score in scores]
    total = sum(weights[1:], start=weights[0])
    parts = [
        (weight / total).astype(dtype).astype(jnp.float32) * v_BGd[:, :, None]
        for weight, v_BGd in zip(weights, values, strict=True)
    ]
    return sum(parts[1:], start=parts[0]).reshape(q_BHd.shape).astype(dtype)
