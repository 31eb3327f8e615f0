"""DualAR: the slow transformer over frames and the fast one over codebooks, and how they are joined.

One frame = one slow step (token and hidden state) + one fast loop (the other codes). Sampling, slots and
random numbers belong to the engine; this module only computes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.config import ModelConfig
from fishjax.model.fast import FastTransformer
from fishjax.model.slow import SlowTransformer


class DualAR(nnx.Module):
    """The whole model: `.slow` and `.fast`. Every parameter path is a published name (see `weights.names`)."""

    def __init__(self, config: ModelConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.config = config
        self.slow = SlowTransformer(config, dtype=dtype, rngs=rngs)
        self.fast = FastTransformer(config, dtype=dtype, rngs=rngs)

    def fast_hidden(self, hidden_BTD: jax.Array) -> jax.Array:
        """What the fast part is given of a pre-norm slow hidden state: after the final norm, or as it is."""
        return self.slow.norm(hidden_BTD) if self.config.norm_fastlayer_input else hidden_BTD

    def fast_input(self, hidden_BTD: jax.Array) -> jax.Array:
        """Pre-norm slow hidden (..., D) -> position 0 of the fast sequence (..., Df)."""
        return self.fast.project(self.fast_hidden(hidden_BTD))

    def semantic_code(self, tokens_B: jax.Array) -> jax.Array:
        """Code 0 of a semantic token id; other ids (the end of speech) are clamped into the codebook."""
        return jnp.clip(tokens_B - self.config.semantic_begin_id, 0, self.config.codebook_size - 1)

    def generate_forward(self, columns_BKT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cache-free pass as in generation (embedding scaling on): (hidden_BTD pre-norm, logits_BTV)."""
        hidden_BTD = self.slow.forward(self.slow.embed(columns_BKT, generation=True))
        return hidden_BTD, self.slow.logits(hidden_BTD)

    def train_logits(
        self, columns_BKT: jax.Array, key_padding_mask_BT: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Training pass over columns (B, C+1, T): (hidden_BTD for `fast_logits`, logits_BTV).

        `key_padding_mask_BT` is true at padding. Fixed shapes, differentiable; the loss masks what it ignores.
        """
        hidden_BTD = self.slow.forward(self.slow.embed(columns_BKT, generation=False), key_padding_mask_BT)
        return self.fast_hidden(hidden_BTD), self.slow.logits(hidden_BTD)

    def fast_logits(self, hidden_ND: jax.Array, codes_NK: jax.Array) -> jax.Array:
        """Teacher-forced fast pass over N frames: logits (N, C, codebook size); position k predicts code k.

        `hidden_ND` is `train_logits`' hidden state at the column *before* each frame; `codes_NK` its C codes.
        """
        return self.fast.forward(self.fast.project(hidden_ND), codes_NK)


def select_frames(
    config: ModelConfig, hidden_BTD: jax.Array, labels_BKT: np.ndarray | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Positions whose row-0 label is semantic, batch-major: (hidden_ND, codes_NK) for `fast_logits`.

    `labels_BKT` (B, C+1, T): row 0 the next token (or a negative number: no label), rows 1..C its codes. The
    number of frames depends on the labels, so this runs outside jit.
    """
    labels_BKT = np.asarray(labels_BKT)
    tokens_BT = labels_BKT[:, 0]
    is_frame_BT = (tokens_BT >= config.semantic_begin_id) & (tokens_BT <= config.semantic_end_id)
    codes_NK = labels_BKT[:, 1:].transpose(0, 2, 1)[is_frame_BT]
    return hidden_BTD[np.nonzero(is_frame_BT)], jnp.asarray(codes_NK, jnp.int32)


def candidate_ids(config: ModelConfig, im_end_id: int) -> np.ndarray:
    """Token ids that constrained decoding may choose, int32: all semantic ids in order, then the end of speech."""
    semantic = np.arange(config.semantic_begin_id, config.semantic_end_id + 1, dtype=np.int32)
    return np.append(semantic, np.int32(im_end_id))


def slice_head(model: DualAR, im_end_id: int) -> jax.Array:
    """Rows of the head for `candidate_ids`, in that order: (number of semantic ids + 1, D)."""
    return model.slow.head_weight()[candidate_ids(model.config, im_end_id)]
