"""The engine's programs of one case, described, lowered, filled with random weights and driven as the loop does.

Until `fill` everything is shapes: a machine without a GPU can lower S2-Pro's step for one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.codec.stream import init_stream
from fishjax.engine import memory, steps
from fishjax.engine.engine import CHUNK_COLUMNS, GROUP_FRAMES, PendingSound, PendingStep
from fishjax.engine.sampling_params import SamplingParams
from fishjax.engine.state import StepInputs, new_state, segment_start
from fishjax.errors import InvalidRequest
from fishjax.model.dual_ar import DualAR, slice_head
from fishjax.model.fused import frame_weights, why_not
from fishjax.weights.load_codec import abstract_codec
from fishjax.weights.prepare import prepared, prepared_weight
from fishjax.weights.quantize import abstract_model, quantize_head
from pallas_kernels import FastWeights

from .cases import CYCLE, StepCase
from .peer import Both, PeerState, peer_step
from .weights import random_like

Program = partial[Any]
WARM_STEPS = CYCLE
_SEED = 10_000  # apart by more than the leaves of a tree


class Pending(Protocol):
    """A step on its way."""

    def result(self) -> Any:
        """Wait for it."""


class Rig:
    """Shapes of a case: model and codec as an engine reads them, head, state, and the memory an engine plans."""

    def __init__(self, case: StepCase):
        self.case, precision = case, case.precision
        config, codec_config = case.configs
        end = case.im_end_id
        self.model = nnx.eval_shape(prepared, abstract_model(config, precision))
        self.codec = abstract_codec(codec_config, precision.codec_dtype)
        self.head = nnx.eval_shape(
            lambda m: prepared_weight(quantize_head(slice_head(m, end), precision.head)), self.model
        )
        if reason := why_not(self.model, case.slots, case.fused):
            raise InvalidRequest(f"the fused step cannot be: {reason}")
        self.frame_weights = nnx.eval_shape(_frame_weights, self.model) if case.fused == "both" else None
        kv_dtype = precision.kv_dtype
        self.state = jax.eval_shape(lambda: new_state(config, case.slots, case.max_len, kv_dtype))
        self.codec_state = jax.eval_shape(lambda: init_stream(self.codec, case.slots, case.max_len))
        self.memory = memory.plan(
            self.model,
            self.codec,
            (self.head, self.frame_weights),
            num_slots=case.slots,
            max_len=case.max_len,
            kv_dtype=kv_dtype,
        )

    @property
    def mask(self) -> jax.ShapeDtypeStruct:
        """One bool a slot."""
        return jax.ShapeDtypeStruct((self.case.slots,), bool)

    def decode(self) -> tuple[Program, tuple[Any, ...]]:
        """The decode step as the engine binds it, and its arguments; all top_k short, as the sampler's defaults are."""
        bound = steps.bind(
            self.model,
            steps.decode_step,
            donate=(2,),
            first=(self.head, self.frame_weights),
            short=True,
            fused_slow=self.case.fused != "none",
        )
        return bound, (self.state, StepInputs(self.mask, self.mask, self.mask))

    def sound(self) -> tuple[Program, tuple[Any, ...]]:
        """The codec step as the engine binds it, and its arguments."""
        bound = steps.bind(self.codec, steps.codec_step, donate=(0,))
        inputs = StepInputs(self.mask, self.mask, self.mask)
        config = self.case.configs[0]
        output = jax.eval_shape(
            lambda: steps.StepOutput(
                is_end_B=jnp.zeros(self.case.slots, bool),
                codes_BK=jnp.zeros((self.case.slots, config.num_codebooks), jnp.int32),
            )
        )
        return bound, (self.codec_state, output, inputs)

    def group(self) -> tuple[Program, tuple[Any, ...]]:
        """The codec's call for several frames of every slot, and its arguments."""
        bound = steps.bind(self.codec, steps.group_step, donate=(0, 1))
        return bound, (self.codec_state, self.held_BKW, self.mask)

    @property
    def held_BKW(self) -> jax.ShapeDtypeStruct:
        """Codes whose sound is not made yet."""
        return jax.ShapeDtypeStruct((self.case.slots, self.case.configs[0].num_codebooks, 2 * GROUP_FRAMES), jnp.int32)

    def prefill(self) -> tuple[Program, tuple[Any, ...]]:
        """The reading of the longest chunk into the last slot, and its arguments: NumPy but for the state."""
        bound = steps.bind(self.model, steps.prefill_step, donate=(0,))
        columns_1KT = np.zeros((1, self.case.configs[0].num_codebooks + 1, CHUNK_COLUMNS), np.int32)
        start = self.case.max_len - CHUNK_COLUMNS - 1
        row = segment_start(columns_1KT[0, :, -1], start + CHUNK_COLUMNS, 0, SamplingParams())
        return bound, (self.state, columns_1KT, np.int32(start), row, np.int32(self.case.slots - 1))

    def peer(self) -> tuple[Program, tuple[Any, ...]]:
        """Plain XLA's frame over the same weights (of a bf16 case), and its arguments."""
        bound = steps.bind(Both(self.model, self.codec), peer_step, donate=(1,), first=(self.head,))
        cache = self.state.cache
        state = PeerState(
            self.state.slots.length_B,
            self.state.slots.column_BK,
            tuple(zip(cache.k_BGSd, cache.v_BGSd, strict=True)),
            self.codec_state,
        )
        return bound, (state,)

    def fill(self) -> Filled:
        """Weights and state on the default device."""
        trees = (nnx.state(self.model), nnx.state(self.codec), self.head)
        model, codec, head = (random_like(tree, _SEED * i) for i, tree in enumerate(trees, start=1))
        frame_weights = None
        if self.case.fused == "both":
            graph = nnx.graphdef(self.model)
            frame_weights = jax.jit(lambda state: _frame_weights(nnx.merge(graph, state)))(model)
        return jax.block_until_ready(Filled(model, codec, head, frame_weights))


def _frame_weights(model: DualAR) -> FastWeights:
    return frame_weights(model.fast)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Filled:
    """Arrays of the model, the codec, the head and the fused frame, in the order in which `bind` flattens them."""

    model: Any
    codec: Any
    head: Any
    frame_weights: FastWeights | None

    def decode(self, bound: Program) -> Program:
        """The bound decode step over these weights: the same jitted function."""
        return partial(bound.func, jax.tree.leaves(self.model), self.head, self.frame_weights)

    def prefill(self, bound: Program) -> Program:
        """The bound reading of a chunk over these weights."""
        return partial(bound.func, jax.tree.leaves(self.model))

    def sound(self, bound: Program) -> Program:
        """The bound codec step over these weights, or its call for several frames."""
        return partial(bound.func, jax.tree.leaves(self.codec))

    def peer(self, bound: Program) -> Program:
        """The bound peer over these weights: its module holds the codec before the model."""
        return partial(bound.func, jax.tree.leaves({"codec": self.codec, "model": self.model}), self.head)


class EngineRun:
    """The slots in the middle of their requests, stepped as `Engine.step` does.

    Sound is made of each frame by `sound`, of several at a time by `group`, or not at all.
    """

    def __init__(self, rig: Rig, decode: Program, sound: Program | None = None, group: Program | None = None):
        self._case, self._decode, self._sound, self._group = rig.case, decode, sound, group
        self._hold = jax.jit(steps.hold_codes, donate_argnums=(0,))
        self._held_BKW = jnp.zeros(rig.held_BKW.shape, rig.held_BKW.dtype)
        self._num_held = 0
        config = rig.case.configs[0]
        params = SamplingParams()
        slots = new_state(config, rig.case.slots, 1, jnp.bfloat16).slots
        slots = dataclasses.replace(
            slots,
            column_BK=jnp.asarray(_frames(rig.case)),
            seed_B=jnp.arange(rig.case.slots, dtype=jnp.uint32),
            temperature_B=jnp.full(rig.case.slots, params.temperature, jnp.float32),
            top_p_B=jnp.full(rig.case.slots, params.top_p, jnp.float32),
            top_k_B=jnp.full(rig.case.slots, params.top_k, jnp.int32),
        )
        self._state = dataclasses.replace(rig.state, slots=slots, cache=random_like(rig.state.cache, 4))
        self._codec_state = init_stream(rig.codec, rig.case.slots, rig.case.max_len)
        self._run_B = np.ones(rig.case.slots, bool)
        self._none_B = np.zeros(rig.case.slots, bool)

    def set_back(self) -> None:
        """Every slot at the beginning of its cycle; the device does not stop for it."""
        slots = dataclasses.replace(self._state.slots, length_B=jnp.asarray(self._case.start_B))
        self._state = dataclasses.replace(self._state, slots=slots)

    def step(self) -> Pending:
        """Start a step."""
        inputs = StepInputs(self._run_B, self._none_B, self._none_B)
        self._state, output = self._decode(self._state, inputs)
        if self._group is not None:
            return self._step_of_group(output, self._group)
        if self._sound is None:
            return PendingStep(output, output.codes_BK, self._none_B)
        self._codec_state, audio_Bs = self._sound(self._codec_state, output, inputs)
        return PendingStep(output, audio_Bs, self._run_B)

    def _step_of_group(self, output: steps.StepOutput, group: Program) -> Pending:
        place_B = np.full(self._case.slots, self._num_held, np.int32)
        self._held_BKW = self._hold(self._held_BKW, output.codes_BK, place_B)
        self._num_held = (self._num_held + 1) % GROUP_FRAMES
        if self._num_held:
            return PendingStep(output, output.codes_BK, self._none_B)
        self._codec_state, self._held_BKW, audio_BT = group(self._codec_state, self._held_BKW, self._run_B)
        return PendingStep(output, audio_BT, self._run_B)


class GroupRun:
    """The codec's call for several frames alone."""

    def __init__(self, rig: Rig, group: Program):
        self._group = group
        self._state = init_stream(rig.codec, rig.case.slots, rig.case.max_len)
        self._held_BKW = jnp.zeros(rig.held_BKW.shape, rig.held_BKW.dtype)
        self._run_B = np.ones(rig.case.slots, bool)

    def set_back(self) -> None:
        """Nothing has a length here."""

    def step(self) -> Pending:
        """Start a call."""
        self._state, self._held_BKW, audio_BT = self._group(self._state, self._held_BKW, self._run_B)
        return PendingSound(audio_BT, GROUP_FRAMES)


class SoundRun:
    """The codec step alone, on the same codes again and again."""

    def __init__(self, rig: Rig, sound: Program):
        self._sound = sound
        self._state = init_stream(rig.codec, rig.case.slots, rig.case.max_len)
        every_B, none_B = jnp.ones(rig.case.slots, bool), jnp.zeros(rig.case.slots, bool)
        self._inputs = StepInputs(every_B, none_B, none_B)
        self._output = steps.StepOutput(is_end_B=none_B, codes_BK=jnp.asarray(_frames(rig.case)[:, 1:]))

    def set_back(self) -> None:
        """Nothing has a length here."""

    def step(self) -> Pending:
        """Start a frame."""
        self._state, audio_Bs = self._sound(self._state, self._output, self._inputs)
        return PendingStep(self._output, audio_Bs, self._inputs.run_B)


class PeerRun:
    """The peer, stepped and read in the same way."""

    def __init__(self, rig: Rig, peer: Program):
        self._case, self._peer = rig.case, peer
        cache = random_like(rig.state.cache, 4)
        self._state = PeerState(
            jnp.asarray(rig.case.start_B),
            jnp.asarray(_frames(rig.case)),
            tuple(zip(cache.k_BGSd, cache.v_BGSd, strict=True)),
            init_stream(rig.codec, rig.case.slots, rig.case.max_len),
        )
        self._none_B = jnp.zeros(rig.case.slots, bool)
        self._every_B = np.ones(rig.case.slots, bool)

    def set_back(self) -> None:
        """As `EngineRun.set_back`."""
        self._state = dataclasses.replace(self._state, length_B=jnp.asarray(self._case.start_B))

    def step(self) -> Pending:
        """Start a step."""
        self._state, (codes_BK, audio_Bs) = self._peer(self._state)
        return PendingStep(steps.StepOutput(is_end_B=self._none_B, codes_BK=codes_BK), audio_Bs, self._every_B)


def steady_ms(
    run: EngineRun | SoundRun | GroupRun | PeerRun, num_steps: int, warm: Callable[[], None] = lambda: None
) -> np.ndarray:
    """Milliseconds of `num_steps` steps after the warm-up: from one result to the next, each read one step late.

    `warm` is called when the warm-up has ended.
    """
    seconds: list[float] = []
    previous: Pending | None = None
    for index in range(WARM_STEPS + num_steps + 1):
        if index % CYCLE == 0:
            run.set_back()
        if index == WARM_STEPS:
            warm()
        pending = run.step()
        if previous is not None:
            previous.result()
            seconds.append(time.perf_counter())
        previous = pending
    if previous is not None:
        previous.result()
    return np.diff(seconds)[-num_steps:] * 1e3


def chunk_ms(rig: Rig, prefill: Program, num_chunks: int) -> float:
    """Milliseconds for a chunk of a prompt, read into a slot again and again without a pause: the mean of so many."""
    slots = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), rig.state.slots)
    state = dataclasses.replace(rig.state, slots=slots, cache=random_like(rig.state.cache, 4))
    _, (_, *arguments) = rig.prefill()
    state, started = jax.block_until_ready(prefill(state, *arguments)), time.perf_counter()
    for _ in range(num_chunks):
        state = prefill(state, *arguments)
    jax.block_until_ready(state)
    return (time.perf_counter() - started) / num_chunks * 1e3


def _frames(case: StepCase) -> np.ndarray:
    """One frame a slot as the next column, int32 (B, C+1)."""
    config, codec = case.configs
    rng = np.random.default_rng(5)
    sizes = np.minimum(codec.codebook_sizes, config.codebook_size)
    codes_BK = rng.integers(0, sizes, (case.slots, config.num_codebooks), dtype=np.int64)
    return np.concatenate([config.semantic_begin_id + codes_BK[:, :1], codes_BK], axis=1).astype(np.int32)
