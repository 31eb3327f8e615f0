"""Greedy free-running speech from a DualAR, many prompts at once: what the evaluator hears while training.

One jitted call: prefill, then a fixed number of frames; rows that have ended run on and are cut on the host. The
engine does the same with slots; this is the smallest thing that trainers need.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fishjax.model.cache import init_cache
from fishjax.model.dual_ar import DualAR, candidate_ids, slice_head
from fishjax.text.prompt import Prompter, Reference


def greedy_codes(
    model: DualAR, columns_BKT: jax.Array, lengths_B: jax.Array, im_end_id: int, num_frames: int
) -> tuple[jax.Array, jax.Array]:
    """Prompts (B, C+1, P) padded on the right, their lengths -> (codes (B, C, frames) int32, ended (B, frames) bool).

    Frames from the first `ended` on are not speech.
    """
    config = model.config
    head_ND, ids = slice_head(model, im_end_id), jnp.asarray(candidate_ids(config, im_end_id))
    batch, _, prompt_len = columns_BKT.shape
    dtype = model.slow.embeddings.weight[...].dtype
    cache = init_cache(config, batch, prompt_len + num_frames, dtype)
    hidden_BTD, cache = model.slow.extend(
        model.slow.embed(columns_BKT, generation=True), jnp.zeros((batch,), jnp.int32), cache
    )
    hidden_BD = jnp.take_along_axis(hidden_BTD, (lengths_B - 1)[:, None, None], axis=1)[:, 0]

    def frame(carry, _):
        hidden_BD, position_B, cache = carry
        token_B = ids[jnp.argmax(model.slow.logits(hidden_BD, head_ND), axis=-1)]
        codes_BK = model.fast.frame(
            model.fast_input(hidden_BD), model.semantic_code(token_B), lambda k, logits: jnp.argmax(logits, axis=-1)
        )
        # A row that has ended goes on with a frame, as padding: its outputs are cut.
        row_B = model.semantic_code(token_B) + config.semantic_begin_id
        column_BK1 = jnp.concatenate([row_B[:, None], codes_BK], axis=1)[:, :, None]
        hidden_BTD, cache = model.slow.extend(model.slow.embed(column_BK1, generation=True), position_B, cache)
        return (hidden_BTD[:, 0], position_B + 1, cache), (codes_BK, token_B == im_end_id)

    _, (codes_TBK, ended_TB) = jax.lax.scan(frame, (hidden_BD, lengths_B, cache), None, length=num_frames)
    return codes_TBK.transpose(1, 2, 0), ended_TB.T


def prompts(
    prompter: Prompter, texts: Sequence[str], references: Sequence[Sequence[Reference]], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Serving's prompts for the texts, padded to (B, C+1, length), and their lengths."""
    made = [prompter.prompt(list(refs), [], text) for text, refs in zip(texts, references, strict=True)]
    lengths_B = np.array([columns.shape[1] for columns in made], np.int32)
    if lengths_B.max() > length:
        raise ValueError(f"a prompt of {lengths_B.max()} columns does not fit {length}")
    padded = np.zeros((len(made), prompter.num_codebooks + 1, length), np.int32)
    for row, columns in zip(padded, made, strict=True):
        row[:, : columns.shape[1]] = columns
    return padded, lengths_B


def spoken_frames(ended_BT: np.ndarray) -> np.ndarray:
    """Frames before the end in each row; all of them where speech never ended."""
    return np.where(ended_BT.any(axis=1), ended_BT.argmax(axis=1), ended_BT.shape[1])
