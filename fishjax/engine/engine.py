"""The engine: weights and slots on the device, driven by seven verbs. NumPy in, NumPy out.

    prefill(columns) -> Prefix -> insert(prefix, slot) -> read(slot) ... -> step(run) -> frames ... -> free(slot)
                                  ^------- Prefix <- extract(slot)             '-> sound(slots), where grouped

A prompt is read straight into its slot, a chunk at a time, between the steps of the others. One step is two device
programs, `decode_step` (codes) and `codec_step` (sound), or more where sound is made in groups. `step` only
dispatches; its result is read through `PendingStep.result()`, one step late, so that the device never waits for
Python. Every program has one shape per engine (prefill: one per width of a chunk) and is compiled by `warmup`. Knows
nothing of text, requests or clocks.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from fishjax.codec import Codec
from fishjax.codec.stream import init_stream
from fishjax.config import Fused
from fishjax.engine import memory, steps
from fishjax.engine.ahead import Program, compile_ahead
from fishjax.engine.chunks import SMALLEST_CHUNK, Chunk, cut, widths
from fishjax.engine.prefix import Prefix
from fishjax.engine.references import ReferenceEncoder
from fishjax.engine.sampling import TOP_K_CAP
from fishjax.engine.sampling_params import SamplingParams
from fishjax.engine.snapshots import BLOCK_COLUMNS, Snapshots, VoiceKey
from fishjax.engine.state import StepInputs, StepOutput, new_state, segment_start
from fishjax.errors import InvalidRequest, PromptTooLong
from fishjax.model.cache import KVCache, init_cache
from fishjax.model.dual_ar import DualAR, slice_head
from fishjax.model.fused import frame_weights, why_not
from fishjax.weights.precision import Precision
from fishjax.weights.prepare import prepared_weight
from fishjax.weights.quantize import quantize_head
from pallas_kernels import comes_first

CHUNK_COLUMNS = 256
"""Of a prompt, read at a time: the longest that a step waits for somebody else's prompt."""
CHUNK_COLUMNS_ON_CPU = 64
"""There a chunk takes as long as it has columns, so small ones cost nothing."""
SINGLE_FRAMES = 4
"""At the beginning of a segment, whose sound is made at once, each by itself."""
GROUP_FRAMES, GROUP_MAX_SLOTS = 4, 16


def sound_group_for(num_slots: int) -> int:
    """How many frames of sound a call suit a server: several on a GPU with few slots, where a call costs more than
    what it computes. Where it is the frames that cost, single calls for newcomers would come on top.
    """
    return GROUP_FRAMES if jax.default_backend() == "gpu" and num_slots <= GROUP_MAX_SLOTS else 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step, on the host. Rows of slots that did not run are meaningless.

    `codes_BK` int32 (slots, codebooks); `is_end_B` bool: the model ended its segment and the row is not sound;
    `audio_Bs` float32 (slots, samples_per_frame) in -1..1, where `has_sound_B`: elsewhere `Engine.sound` makes it.
    """

    codes_BK: np.ndarray
    is_end_B: np.ndarray
    audio_Bs: np.ndarray
    has_sound_B: np.ndarray


class PendingStep:
    """A step that the device is making; `result()` waits for it."""

    def __init__(self, output: StepOutput, audio_Bs: jax.Array | np.ndarray, has_sound_B: np.ndarray):
        self._output, self._audio_Bs, self._has_sound_B = output, audio_Bs, has_sound_B
        for array in (output.codes_BK, output.is_end_B, audio_Bs):
            if isinstance(array, jax.Array):
                array.copy_to_host_async()

    def result(self) -> StepResult:
        """Block until the frames are on the host."""
        return StepResult(
            codes_BK=np.asarray(self._output.codes_BK),
            is_end_B=np.asarray(self._output.is_end_B),
            audio_Bs=np.asarray(self._audio_Bs),
            has_sound_B=self._has_sound_B,
        )


class PendingSound:
    """Sound of several frames a slot that the device is making."""

    def __init__(self, audio_BT: jax.Array, group: int):
        self._audio_BT, self._group = audio_BT, group
        audio_BT.copy_to_host_async()

    def result(self) -> np.ndarray:
        """Block until it is on the host: float32 (slots, frames, samples_per_frame)."""
        audio_BT = np.asarray(self._audio_BT)
        return audio_BT.reshape(audio_BT.shape[0], self._group, -1)


class Engine:
    """A model, its codec and `num_slots` slots of `max_len` columns each.

    `precision` says how the head and the cache are kept (the weights come as they are); `max_reference_s` is the
    longest reference clip in seconds; at most `chunk_columns` of a prompt (None: what suits the platform) are read
    between two steps; snapshots of voices may take `voice_bytes`. With `sound_group` above 1, sound of a segment's
    frames after its first ones is not made by `step` but by `sound`, so many frames at a time. `fused` says which
    transformers step through fused kernels (None: where those come first on this chip and know the model). `memory` is
    what all of it takes, `voices` what is known of snapshots, `references` makes codes of clips. Not thread-safe: one
    loop owns it. Raises InvalidRequest for sizes that cannot be, or that the device has no room for; so does every
    verb, before it changes anything, for a slot that is not there, is named twice, or holds nothing to do this to.
    """

    def __init__(
        self,
        model: DualAR,
        codec: Codec,
        *,
        im_end_id: int,
        num_slots: int,
        max_len: int,
        precision: Precision | None = None,
        max_reference_s: float = 30.0,
        chunk_columns: int | None = None,
        voice_bytes: int = 0,
        sound_group: int = 1,
        fused: Fused | None = None,
        model_name: str = "fishjax",
    ):
        config = model.config
        if num_slots < 1:
            raise InvalidRequest(f"slots must be at least 1, not {num_slots}")
        if not SMALLEST_CHUNK <= max_len <= config.max_seq_len:
            raise InvalidRequest(
                f"max-len must lie in {SMALLEST_CHUNK}..{config.max_seq_len} (the model's longest), not {max_len}"
            )
        self.config, self.codec_config = config, codec.config
        self.num_slots, self.max_len, self.model_name = num_slots, max_len, model_name
        self.num_codebooks, self.sound_group = config.num_codebooks, sound_group
        self.sample_rate_hz = codec.config.sample_rate_hz
        self.samples_per_frame = codec.config.samples_per_frame
        self.frame_rate_hz = codec.config.frame_rate_hz

        self.precision = precision or Precision.default()
        kv_dtype = self.precision.kv_dtype
        head_NK = prepared_weight(quantize_head(slice_head(model, im_end_id), self.precision.head))
        fused = self._fused(model, fused)
        kept = (head_NK, frame_weights(model.fast) if fused == "both" else None)
        self.memory = memory.plan(
            model, codec, kept, num_slots=num_slots, max_len=max_len, kv_dtype=kv_dtype, voice_bytes=voice_bytes
        )
        self.memory.check(memory.device_limit())
        self._decode = {
            short: steps.bind(
                model, steps.decode_step, donate=(2,), first=kept, short=short, fused_slow=fused != "none"
            )
            for short in (True, False)
        }
        self._prefill = steps.bind(model, steps.prefill_step, donate=(0,))
        self._sound = steps.bind(codec, steps.codec_step, donate=(0,))
        self._group_sound = steps.bind(codec, steps.group_step, donate=(0, 1))
        self._hold = jax.jit(steps.hold_codes, donate_argnums=(0,))
        self._insert = jax.jit(steps.insert_slot, donate_argnums=(0,))
        self._extract = jax.jit(steps.extract_slot)
        block_columns = min(BLOCK_COLUMNS, max_len)
        self._take_block = jax.jit(partial(steps.take_block, columns=block_columns))
        self._put_block = jax.jit(steps.put_block, donate_argnums=(0,))

        state = new_state(config, num_slots, max_len, kv_dtype)
        held_BKW = jnp.zeros((num_slots, self.num_codebooks, 2 * sound_group), jnp.int32)
        rows: steps.Rows = state, init_stream(codec, num_slots, max_len), held_BKW
        # Committed to the device, as weights are that were restored, and so whatever programs return: to jit an array
        # that is not is another kind of argument, and what `warmup` ran first would compile again at the first request.
        self._state, self._codec_state, self._held_BKW = jax.device_put(rows, jax.local_devices()[0])
        self.references = ReferenceEncoder(codec, max(1, round(max_reference_s * self.frame_rate_hz)))
        block_bytes = memory.described(lambda: init_cache(config, 1, block_columns, kv_dtype))
        self.voices = Snapshots(voice_bytes, block_bytes, block_columns)
        on_cpu = jax.default_backend() == "cpu"
        self._widths = widths(max_len, chunk_columns or (CHUNK_COLUMNS_ON_CPU if on_cpu else CHUNK_COLUMNS))
        self._unread: list[deque[Chunk]] = [deque() for _ in range(num_slots)]
        self._no_sound_Bs = np.zeros((num_slots, self.samples_per_frame), np.float32)
        self._num_made_B, self._num_held_B = np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32)
        self._filled_B, self._cancel_B = np.zeros(num_slots, bool), np.zeros(num_slots, bool)
        self._top_k_B = np.ones(num_slots, np.int32)

    def warmup(self, progress: Callable[[str], None] | None = None) -> None:
        """Compile every program and run it once; afterwards nothing compiles. `progress` hears what is done or next."""
        say = progress or (lambda _: None)
        sound, others = self._programs()
        say("compiling")
        # XLA chooses convolutions by timing them, so the programs of the codec have the device alone.
        for program in sound:
            compile_ahead([program], say)
        compile_ahead(others, say)
        for width in self._widths:
            say(f"prefill of {width} columns")
            columns_CT = np.zeros((self.num_codebooks + 1, min(width, self.max_len - 1) + 1), np.int32)
            self.insert(self.prefill(columns_CT, SamplingParams()), 0)
            self.read(0)
        say("copies of a voice")
        self._put_voice((self._take_block(self._state.cache, np.int32(0), np.int32(0)),), 0)
        for top_k, ordering in ((1, "short"), (TOP_K_CAP + 1, "whole")):
            say(f"decode step, {ordering} ordering of candidates")
            self.insert(dataclasses.replace(self.extract(0), top_k=top_k, num_made=0), 0)
            self.step([0]).result()
        if self.sound_group > 1:
            say(f"sound of {self.sound_group} frames")
            self.insert(dataclasses.replace(self.extract(0), num_made=SINGLE_FRAMES), 0)
            self.step([0]).result()
            self.sound([0]).result()
        self.free(0)
        self.step([]).result()
        say("reference encoder")
        self.references.encode_whole(np.zeros(self.samples_per_frame, np.float32))

    def prefill(
        self,
        columns_CT: np.ndarray,
        sampling: SamplingParams,
        *,
        prefix_length: int = 0,
        voice_length: int = 0,
        first_frame: int = 0,
    ) -> Prefix:
        """A prompt for a slot, nothing of it read yet.

        All but the last of `columns_CT` int32 (C+1, T) are read into the cache; the first step reads the last one.
        They follow the first `prefix_length` columns that the slot holds. Where that is none, the first
        `voice_length` are those that other prompts with this voice have too: they are copied if they are known, and
        kept once they are read. `first_frame` counts the frames that the request already has: it keys the random
        numbers. Raises PromptTooLong when no position is left for a frame, InvalidRequest for what is no prompt.
        """
        rows = self.num_codebooks + 1
        if columns_CT.ndim != 2 or columns_CT.shape[0] != rows or not columns_CT.shape[1]:
            raise InvalidRequest(f"a prompt is ({rows}, one or more) columns for this model, not {columns_CT.shape}")
        num_new = columns_CT.shape[1] - 1
        length = prefix_length + num_new
        if prefix_length < 0 or not 0 <= voice_length <= num_new:
            raise InvalidRequest(f"{num_new + 1} columns cannot follow {prefix_length}, {voice_length} of a voice")
        if length >= self.max_len:
            raise PromptTooLong(f"the prompt has {length + 1} columns; a slot holds {self.max_len}: shorten it")
        slots = segment_start(columns_CT[:, -1], length, first_frame, sampling)
        new_CT = columns_CT[:, :-1]
        if prefix_length or voice_length < SMALLEST_CHUNK:  # too little to gain from a copy
            return Prefix(cut(new_CT, prefix_length, slots, self._widths), sampling.top_k)
        # Cut here whether it is known or not, so that the codes are the same bit for bit.
        voice_CT, rest_CT = np.split(new_CT, [voice_length], axis=1)
        rest = cut(rest_CT, voice_length, slots, self._widths)
        if (voice := self.voices.find(key := VoiceKey.of(voice_CT))) is not None:
            return Prefix(rest, sampling.top_k, voice=voice)
        return Prefix((*cut(voice_CT, 0, slots, self._widths, key), *rest), sampling.top_k)

    def insert(self, prefix: Prefix, slot: int) -> None:
        """Put a request into a slot, whatever it holds; once its prompt is read, its next step makes its next frame."""
        follows = prefix.saved is None and not prefix.voice and prefix.unread[0].start > 0
        self._check([slot], filled=follows)
        self._filled_B[slot] = True
        self._unread[slot] = deque(prefix.unread)
        self._num_made_B[slot], self._num_held_B[slot] = prefix.num_made, prefix.num_held
        self._cancel_B[slot] = False
        self._top_k_B[slot] = prefix.top_k
        if prefix.saved is not None:
            self._state, self._codec_state, self._held_BKW = self._insert(self._rows, prefix.saved, np.int32(slot))
        self._put_voice(prefix.voice, slot)

    def read(self, slot: int) -> None:
        """Read the next chunk of a slot's prompt; returns at once."""
        self._check([slot])
        if not self._unread[slot]:
            raise InvalidRequest(f"the prompt in slot {slot} is read: step it")
        chunk = self._unread[slot].popleft()
        self._state = self._prefill(self._state, chunk.columns_1KT, np.int32(chunk.start), chunk.slots, np.int32(slot))
        if chunk.voice is not None and (starts := self.voices.make_room(chunk.voice)):
            cache = self._state.cache
            blocks = tuple(self._take_block(cache, np.int32(slot), np.int32(start)) for start in starts)
            self.voices.add(chunk.voice, blocks)

    def step(self, run: Collection[int]) -> PendingStep:
        """Make the next frame of each slot in `run`, after what is unread of its prompt; returns at once."""
        self._check(run)
        for slot in run:
            while self._unread[slot]:
                self.read(slot)
        run_B = np.zeros(self.num_slots, bool)
        run_B[list(run)] = True
        # NumPy arrays that nobody writes to again: jit takes them ten times faster than jnp.array makes device arrays.
        inputs = StepInputs(run_B, self._num_made_B == 0, self._cancel_B.copy())
        # One large top_k orders all candidates of the whole batch; a slot that is free or paused does not ask for it.
        short = not np.any(self._top_k_B[run_B] > TOP_K_CAP)
        self._state, output = self._decode[short](self._state, inputs)
        alone_B = run_B & (self._num_made_B < (SINGLE_FRAMES if self.sound_group > 1 else np.inf))
        audio_Bs = self._no_sound_Bs
        if alone_B.any():
            inputs = dataclasses.replace(inputs, run_B=alone_B)
            self._codec_state, audio_Bs = self._sound(self._codec_state, output, inputs)
        if (held_B := run_B & ~alone_B).any():
            place_B = np.where(held_B, self._num_held_B, 2 * self.sound_group)
            self._held_BKW = self._hold(self._held_BKW, output.codes_BK, place_B)
        self._num_made_B += run_B
        self._num_held_B += held_B
        self._cancel_B[:] = False
        return PendingStep(output, audio_Bs, alone_B)

    def sound(self, slots: Collection[int]) -> PendingSound:
        """Make sound of the oldest `sound_group` frames of each slot whose sound is not made yet; returns at once.

        Where a segment is over there may be fewer: what comes after them means nothing. A slot has room for twice as
        many; which frames are made together depends on their number in the segment alone, whenever it is done.
        """
        self._check(slots)
        for slot in slots:
            if self._num_held_B[slot] <= 0:
                raise InvalidRequest(f"slot {slot} has no frames whose sound is not made")
        run_B = np.zeros(self.num_slots, bool)
        run_B[list(slots)] = True
        self._codec_state, self._held_BKW, audio_BT = self._group_sound(self._codec_state, self._held_BKW, run_B)
        self._num_held_B -= self.sound_group * run_B.astype(np.int32)
        return PendingSound(audio_BT, self.sound_group)

    def extract(self, slot: int) -> Prefix:
        """Take a copy of everything that the request in `slot` needs to go on elsewhere to the same codes."""
        self._check([slot])
        return Prefix(
            tuple(self._unread[slot]),
            int(self._top_k_B[slot]),
            int(self._num_made_B[slot]),
            int(self._num_held_B[slot]),
            self._extract(self._rows, np.int32(slot)),
        )

    def free(self, slot: int) -> None:
        """Empty a slot (carried out by the next step); one that is empty stays so."""
        self._check([slot], filled=False)
        self._filled_B[slot], self._cancel_B[slot] = False, True
        self._unread[slot].clear()

    def _check(self, slots: Collection[int], *, filled: bool = True) -> None:
        """Raises InvalidRequest unless all are slots of this engine, each named once and, with `filled`, not empty."""
        for slot in slots:
            if not 0 <= slot < self.num_slots:
                raise InvalidRequest(f"there is no slot {slot}: this engine has 0..{self.num_slots - 1}")
            if filled and not self._filled_B[slot]:
                raise InvalidRequest(f"slot {slot} is empty: insert a prompt first")
        if len(set(slots)) < len(slots):
            raise InvalidRequest(f"a slot is named twice: {list(slots)}")

    @property
    def _rows(self) -> steps.Rows:
        return self._state, self._codec_state, self._held_BKW

    def _fused(self, model: DualAR, fused: Fused | None) -> Fused:
        """Which transformers step through fused kernels: what is asked for, else what this chip does best."""
        if fused is None:
            firsts: dict[Fused, tuple[str, ...]] = {
                "both": ("between_attentions", "fast_frame"),
                "slow": ("between_attentions",),
            }
            for kind, ops in firsts.items():
                if all(map(comes_first, ops)) and not why_not(model, self.num_slots, kind):
                    return kind
            return "none"
        if reason := why_not(model, self.num_slots, fused):
            raise InvalidRequest(f"fused kernels do not know this model: {reason}")
        return fused

    def _programs(self) -> tuple[list[Program], list[Program]]:
        """Those that take long to compile, the codec's and the others."""
        none_B, slot = np.zeros(self.num_slots, bool), np.int32(0)
        inputs = StepInputs(none_B, none_B, none_B)
        put = partial(jax.device_put, device=jax.local_devices()[0])
        output = StepOutput(put(none_B), put(np.zeros((self.num_slots, self.num_codebooks), np.int32)))
        sound: list[Program] = [("sound", self._sound, (self._codec_state, output, inputs))]
        if self.sound_group > 1:
            name = f"sound of {self.sound_group} frames"
            sound.append((name, self._group_sound, (self._codec_state, self._held_BKW, none_B)))
        sound.append(self.references.program())
        others: list[Program] = [
            (f"decode step, {'short' if short else 'whole'} ordering of candidates", bound, (self._state, inputs))
            for short, bound in self._decode.items()
        ]
        for width in self._widths:
            columns_1KT = np.zeros((1, self.num_codebooks + 1, width), np.int32)
            row = segment_start(columns_1KT[0, :, -1], width, 0, SamplingParams())
            others.append((f"prefill of {width} columns", self._prefill, (self._state, columns_1KT, slot, row, slot)))
        return sound, others

    def _put_voice(self, blocks: tuple[KVCache, ...], slot: int) -> None:
        cache = self._state.cache
        for index, block in enumerate(blocks):
            start = np.int32(index * self.voices.block_columns)
            cache = self._put_block(cache, block, np.int32(slot), start)
        self._state = dataclasses.replace(self._state, cache=cache)
