"""What the device keeps between two steps: one row per slot, all shapes fixed.

`DecodeState` goes into `decode_step` and comes out of it (donated); `StepInputs` is the little that the host
decides each step. Sampling works in *candidate* numbers: 0..num_semantic-1 are semantic codes, num_semantic is the
end of speech; token ids exist only in the columns that the slow transformer reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fishjax.config import ModelConfig
from fishjax.engine.sampling import RAS_WINDOW
from fishjax.engine.sampling_params import SamplingParams
from fishjax.model.cache import KVCache, init_cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """Everything about a slot but its cache and codec state, of JAX or of NumPy; the slot axis B is first in each."""

    length_B: Any  # int32: columns whose keys and values are in the cache
    column_BK: Any  # int32 (B, C+1): the next column to read; row 0 is a token id
    window_BW: Any  # int32 (B, 10): latest semantic candidates of this segment, -1 where none yet
    frame_B: Any  # int32: frames sampled since the request began; keys the random numbers
    segment_frame_B: Any  # int32: frames sampled since the segment began
    seed_B: Any  # uint32
    temperature_B: Any  # float32
    top_p_B: Any  # float32
    top_k_B: Any  # int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """The slots and their key/value cache."""

    slots: SlotState
    cache: KVCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepInputs:
    """Per slot, bool, of NumPy or of JAX: make a frame, start the codec from silence, or be emptied."""

    run_B: Any
    reset_B: Any
    cancel_B: Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """`is_end_B` bool: the model ended its segment; `codes_BK` int32: the frame's codes."""

    is_end_B: jax.Array
    codes_BK: jax.Array


def new_slots(num_slots: int, num_codebooks: int) -> SlotState:
    """Empty slots."""
    zeros = jnp.zeros((num_slots,), jnp.int32)
    return SlotState(
        length_B=zeros,
        column_BK=jnp.zeros((num_slots, num_codebooks + 1), jnp.int32),
        window_BW=jnp.full((num_slots, RAS_WINDOW), -1, jnp.int32),
        frame_B=jnp.zeros((num_slots,), jnp.int32),
        segment_frame_B=jnp.zeros((num_slots,), jnp.int32),
        seed_B=jnp.zeros((num_slots,), jnp.uint32),
        temperature_B=jnp.ones((num_slots,), jnp.float32),
        top_p_B=jnp.ones((num_slots,), jnp.float32),
        top_k_B=jnp.ones((num_slots,), jnp.int32),
    )


def new_state(config: ModelConfig, num_slots: int, max_len: int, kv_dtype) -> DecodeState:
    """All slots empty, a cache of `max_len` columns each."""
    return DecodeState(
        slots=new_slots(num_slots, config.num_codebooks), cache=init_cache(config, num_slots, max_len, kv_dtype)
    )


def segment_start(column: np.ndarray, length: int, first_frame: int, sampling: SamplingParams) -> SlotState:
    """The one-row state of a segment whose cache holds `length` columns and whose next column is `column` (C+1).

    Of NumPy arrays: they go into the program that reads the prompt, and making them costs the device nothing.
    """
    return SlotState(
        length_B=np.array([length], np.int32),
        column_BK=np.asarray(column, np.int32)[None],
        window_BW=np.full((1, RAS_WINDOW), -1, np.int32),
        frame_B=np.array([first_frame], np.int32),
        segment_frame_B=np.zeros(1, np.int32),
        seed_B=np.array([sampling.seed], np.uint32),
        temperature_B=np.array([sampling.temperature], np.float32),
        top_p_B=np.array([sampling.top_p], np.float32),
        top_k_B=np.array([sampling.top_k], np.int32),
    )
