"""The device programs: pure functions from state to state, and `bind`, which compiles one over a module's weights.

prefill_step: columns of a prompt -> keys and values of one slot (take_block, put_block: copies of some of them)
decode_step: column -> slow step -> semantic candidate -> fast loop -> codes -> next column
codec_step:  codes -> sound, each slot's stream state carried; or hold_codes each step, group_step for several at once
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fishjax.codec import Codec
from fishjax.codec.stream import CodecStreamState, stream_decode
from fishjax.engine import sampling
from fishjax.engine.state import DecodeState, SlotState, StepInputs, StepOutput
from fishjax.model.cache import KVCache
from fishjax.model.dual_ar import DualAR
from fishjax.model.fused import frame_codes, slow_step
from pallas_kernels import FastWeights

Rows = tuple[DecodeState, CodecStreamState, jax.Array]
"""All that the device holds of slots: state, streams, and codes whose sound is not made yet, (B, K, W) int32."""


def bind(
    module: nnx.Module, fn: Callable, *, first: tuple = (), donate: tuple[int, ...] = (), **static: Any
) -> partial[Any]:
    """`fn(module, *first, *args, **static)` as one jitted function of `args`.

    The module is split once and its weights go in as flat leaves: walking an nnx object on every call costs
    milliseconds of Python. `donate` counts positions in (*first, *args).
    """
    graph, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)

    def run(leaves: list[jax.Array], *args: Any) -> Any:
        return fn(nnx.merge(graph, jax.tree.unflatten(tree, leaves)), *args, **static)

    run.__name__ = fn.__name__
    return partial(jax.jit(run, donate_argnums=tuple(1 + position for position in donate)), leaves, *first)


def decode_step(
    model: DualAR,
    head_NK: jax.Array,
    frame_weights: FastWeights | None,
    state: DecodeState,
    inputs: StepInputs,
    *,
    short: bool,
    fused_slow: bool = False,
) -> tuple[DecodeState, StepOutput]:
    """One frame for every slot that runs. Rows are independent: nothing of a slot depends on its neighbours.

    With `fused_slow` the slow transformer goes through fused kernels, with `frame_weights` the fast one, see
    `model.fused`. `short`: the top_k of every slot that runs is at most `sampling.TOP_K_CAP`.
    """
    config, slots = model.config, state.slots
    num_semantic = head_NK.shape[0] - 1

    # Slots that do not run write outside the cache, that is nowhere.
    start_B = jnp.where(inputs.run_B, slots.length_B, state.cache.max_len)
    x_B1D = model.slow.embed(slots.column_BK[:, :, None], generation=True)
    if fused_slow:
        hidden_BD, cache = slow_step(model.slow, x_B1D[:, 0], start_B, state.cache)
    else:
        hidden_B1D, cache = model.slow.extend(x_B1D, start_B, state.cache)
        hidden_BD = hidden_B1D[:, 0]

    knobs = sampling.Knobs(slots.temperature_B, slots.top_p_B, slots.top_k_B, short)
    logits_BN = model.slow.logits(hidden_BD, head_NK)
    # The line that samples the semantic token of a frame.
    candidate_B = sampling.sample_semantic(logits_BN, slots.window_BW, knobs, slots.seed_B, slots.frame_B)
    semantic_B = jnp.minimum(candidate_B, config.codebook_size - 1)

    def pick(codebook: int, logits_BN: jax.Array) -> jax.Array:
        return sampling.sample_code(logits_BN, knobs, slots.seed_B, slots.frame_B, codebook)

    fast_BD = model.fast_input(hidden_BD)
    codes_BK = None if frame_weights is not None and short else model.fast.frame(fast_BD, semantic_B, pick)
    if frame_weights is not None:
        draws = sampling.frame_draws(knobs, slots.seed_B, slots.frame_B, config.num_codebooks, config.codebook_size)
        fused_BK = frame_codes(fast_BD, semantic_B, frame_weights, draws)
        # The kernel looks at candidates one by one. A slot that wants too many of them draws without it, and alone.
        many_B1 = slots.top_k_B[:, None] > sampling.TOP_K_CAP
        codes_BK = fused_BK if codes_BK is None else jnp.where(many_B1, codes_BK, fused_BK)
    assert codes_BK is not None

    token_B = config.semantic_begin_id + candidate_B
    stepped = dataclasses.replace(
        slots,
        length_B=slots.length_B + 1,
        column_BK=jnp.concatenate([token_B[:, None], codes_BK], axis=1),
        # The first frame of a segment never enters the window.
        window_BW=jnp.where(
            (slots.segment_frame_B > 0)[:, None],
            jnp.concatenate([slots.window_BW[:, 1:], candidate_B[:, None]], axis=1),
            slots.window_BW,
        ),
        frame_B=slots.frame_B + 1,
        segment_frame_B=slots.segment_frame_B + 1,
    )
    slots = _where(inputs.run_B, stepped, slots)
    slots = dataclasses.replace(slots, length_B=jnp.where(inputs.cancel_B, 0, slots.length_B))
    output = StepOutput(is_end_B=candidate_B == num_semantic, codes_BK=codes_BK)
    return DecodeState(slots=slots, cache=cache), output


def codec_step(
    codec: Codec, state: CodecStreamState, output: StepOutput, inputs: StepInputs
) -> tuple[CodecStreamState, jax.Array]:
    """Sound of the frames just made: (state, audio_Bs float32). The end of speech is not sound."""
    sounds_B = inputs.run_B & ~output.is_end_B
    reset_B = inputs.reset_B & sounds_B
    state, audio_Bs = stream_decode(codec, state, output.codes_BK[:, :, None], sounds_B, reset_B)
    return state, audio_Bs.astype(jnp.float32)


def hold_codes(held_BKW: jax.Array, codes_BK: jax.Array, place_B: jax.Array) -> jax.Array:
    """Keep each slot's frame at its place among those that have no sound yet; past the last place it is dropped."""
    slots_B = jnp.arange(codes_BK.shape[0])
    return held_BKW.at[slots_B, :, place_B].set(codes_BK, mode="drop", unique_indices=True)


def group_step(
    codec: Codec, state: CodecStreamState, held_BKW: jax.Array, run_B: jax.Array
) -> tuple[CodecStreamState, jax.Array, jax.Array]:
    """Sound of the older half of what is held for each slot in `run_B`: (state, held_BKW, audio (B, samples) float32).

    The newer half becomes the older one.
    """
    group = held_BKW.shape[2] // 2
    state, audio_BT = stream_decode(codec, state, held_BKW[:, :, :group], run_B, jnp.zeros_like(run_B))
    moved_BKW = jnp.concatenate([held_BKW[:, :, group:]] * 2, axis=2)
    return state, jnp.where(run_B[:, None, None], moved_BKW, held_BKW), audio_BT.astype(jnp.float32)


def prefill_step(
    model: DualAR, state: DecodeState, columns_1KT: jax.Array, start: jax.Array, row: SlotState, slot: jax.Array
) -> DecodeState:
    """Read a chunk of columns (1, C+1, T) into a slot's cache at positions `start` ..; `row` is the slot's state now.

    No logits. The other slots are not touched: chunks go between the steps of a busy engine.
    """
    cache = jax.tree.map(partial(_take, slot=slot), state.cache)
    x_1TD = model.slow.embed(columns_1KT, generation=True)
    cache = model.slow.extend(x_1TD, start[None], cache)[1]
    return jax.tree.map(partial(_put, slot=slot), state, DecodeState(slots=row, cache=cache))


def insert_slot(whole: Rows, saved: Rows, slot: jax.Array) -> Rows:
    """Overwrite one slot with what was taken out of another."""
    return jax.tree.map(partial(_put, slot=slot), whole, saved)


def extract_slot(whole: Rows, slot: jax.Array) -> Rows:
    """Copies of one slot's rows."""
    return jax.tree.map(partial(_take, slot=slot), whole)


def take_block(cache: KVCache, slot: jax.Array, start: jax.Array, *, columns: int) -> KVCache:
    """A copy of a slot's keys and values at positions `start` .. start + columns - 1, or of the last ones there are."""

    def take(whole: jax.Array) -> jax.Array:
        sizes = (1, whole.shape[1], columns, *whole.shape[3:])
        return jax.lax.dynamic_slice(whole, (slot, 0, start, *[0] * (whole.ndim - 3)), sizes)

    return jax.tree.map(take, cache)


def put_block(cache: KVCache, block: KVCache, slot: jax.Array, start: jax.Array) -> KVCache:
    """What `take_block` took, put into a slot at the same positions."""

    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(whole, part, (slot, 0, start, *[0] * (whole.ndim - 3)))

    return jax.tree.map(put, cache, block)


def _take(whole: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(whole, slot, 1, axis=0)


def _put(whole: jax.Array, part: jax.Array, slot: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(whole, part.astype(whole.dtype), slot, axis=0)


def _where(mask_B: jax.Array, new: Any, old: Any) -> Any:
    """Row-wise choice between two pytrees whose leaves have the slot axis first."""
    return jax.tree.map(lambda a, b: jnp.where(mask_B.reshape(-1, *(1,) * (a.ndim - 1)), a, b), new, old)
