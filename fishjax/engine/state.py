"""What the device keeps between two steps: one row per slot, all shapes fixed.

`DecodeState` goes into `decode_step` and comes out of it (donated); `StepInputs` is the little that the host
decides each step. Sampling works in *candidate* numbers: 0..num_semantic-1 are semantic codes, num_semantic is the
end of speech; token ids exist only in the columns that the slow transformer reads.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fishjax.codec.stream import CodecStreamState
from fishjax.config import ModelConfig
from fishjax.engine.sampling import RAS_WINDOW
from fishjax.engine.sampling_params import SamplingParams
from fishjax.model.cache import KVCache, init_cache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SlotState:
    """Everything about a slot but its cache and codec state; each field has the slot axis B first."""

    length_B: jax.Array  # int32: columns whose keys and values are in the cache
    column_BK: jax.Array  # int32 (B, C+1): the next column to read; row 0 is a token id
    window_BW: jax.Array  # int32 (B, 10): latest semantic candidates of this segment, -1 where none yet
    frame_B: jax.Array  # int32: frames sampled since the request began; keys the random numbers
    segment_frame_B: jax.Array  # int32: frames sampled since the segment began
    seed_B: jax.Array  # uint32
    temperature_B: jax.Array  # float32
    top_p_B: jax.Array  # float32
    top_k_B: jax.Array  # int32


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


@dataclass(frozen=True)
class Prefix:
    """One request's state outside the slots: enough to go on to the same codes in any slot.

    `slots` and `cache` have one row; `top_k` is the request's, for the host; `codec` is None where sound starts from
    silence.
    """

    slots: SlotState
    cache: KVCache
    top_k: int
    codec: CodecStreamState | None = None

    @property
    def length(self) -> int:
        """Columns held by the cache."""
        return int(self.slots.length_B[0])


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
    """The one-row state of a segment whose cache holds `length` columns and whose next column is `column` (C+1)."""
    return dataclasses.replace(
        new_slots(1, len(column) - 1),
        length_B=jnp.array([length], jnp.int32),
        column_BK=jnp.asarray(column, jnp.int32)[None],
        frame_B=jnp.array([first_frame], jnp.int32),
        seed_B=jnp.array([sampling.seed], jnp.uint32),
        temperature_B=jnp.array([sampling.temperature], jnp.float32),
        top_p_B=jnp.array([sampling.top_p], jnp.float32),
        top_k_B=jnp.array([sampling.top_k], jnp.int32),
    )
