"""Teacher forcing: the semantic logits of a model that is fed another one's frames, and how far two sets are apart."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from fishjax.engine.steps import bind
from fishjax.model.cache import init_cache
from fishjax.model.dual_ar import DualAR, slice_head
from fishjax.text.prompt import Prompter
from fishjax.weights.model_folder import LoadedModel
from fishjax.weights.prepare import prepared_weight
from fishjax.weights.quantize import quantize_head

from .speak import Spoken

_ROWS = 8


def forced_logits(loaded: LoadedModel, prompter: Prompter, spoken: Sequence[Spoken]) -> list[np.ndarray]:
    """Per text float32 (T or T + 1, N): logits of each frame's candidates, given the prompt and the frames before it.

    The last row is that of the end of speech, where it ended. Head and cache have the formats of `loaded.precision`.
    """
    precision = loaded.precision
    whole = [np.concatenate([one.prompt_CT, prompter.frame_columns(one.codes_KT)], axis=1) for one in spoken]
    width = max(columns_CT.shape[1] for columns_CT in whole)

    def logits_of(model: DualAR, head_NK: jax.Array, columns_BKT: jax.Array) -> jax.Array:
        cache = init_cache(model.config, _ROWS, width, precision.kv_dtype)
        x_BTD = model.slow.embed(columns_BKT, generation=True)
        hidden_BTD, _ = model.slow.extend(x_BTD, jnp.zeros(_ROWS, jnp.int32), cache)
        return model.slow.logits(hidden_BTD, head_NK).astype(jnp.float32)

    head_NK = prepared_weight(quantize_head(slice_head(loaded.dual_ar, prompter.tokenizer.im_end_id), precision.head))
    run = bind(loaded.dual_ar, logits_of, first=(head_NK,))
    found: list[np.ndarray] = []
    for first in range(0, len(spoken), _ROWS):
        rows = range(first, min(first + _ROWS, len(spoken)))
        columns_BKT = np.zeros((_ROWS, whole[0].shape[0], width), np.int32)
        for row in rows:
            columns_BKT[row - first, :, : whole[row].shape[1]] = whole[row]
        logits_BTN = np.asarray(run(columns_BKT))
        for row in rows:
            start = spoken[row].prompt_CT.shape[1] - 1
            found.append(logits_BTN[row - first, start : start + spoken[row].num_frames + spoken[row].ended])
    return found


def agreement(wanted: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> tuple[float, float]:
    """(share of rows with the same argmax, worst ||found - wanted|| / ||wanted|| of a row) of two sets of logits."""
    wanted_TN, found_TN = np.concatenate(wanted), np.concatenate(found)
    same = np.mean(wanted_TN.argmax(axis=1) == found_TN.argmax(axis=1))
    norm = np.linalg.norm
    return float(same), float(np.max(norm(found_TN - wanted_TN, axis=1) / norm(wanted_TN, axis=1)))
