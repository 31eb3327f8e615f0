"""A model that speaks numbers: the engine's verbs and the request logic without JAX, for tests of the service.

A text is spoken one frame a word, and a segment ends at each full stop; "." alone is a segment of no frames. Frame
`f` of a request with seed `s` is `frame_level(s, f)` throughout, so that any swap of requests or frames shows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import InvalidRequest, PromptTooLong
from fishjax.text.live import LiveText
from fishjax.text.prompt import Reference

PATIENCE_S = 60.0  # until a test that hangs has failed: a busy machine can stall for seconds
NUM_CODEBOOKS = 3


def frame_level(seed: int, frame: int) -> float:
    """The level of a frame: a multiple of 1/128 in -1..1."""
    return ((31 * seed + 7 * frame) % 257 - 128) / 128


class Gate:
    """Lets steps, or chunks, through: all of them, or so many."""

    def __init__(self):
        self._condition = threading.Condition()
        self._permits: float = float("inf")

    def open(self) -> None:
        """Let all through."""
        self._set(float("inf"))

    def close(self) -> None:
        """Let none through."""
        self._set(0)

    def allow(self, steps: int = 1) -> None:
        """Let so many more through."""
        with self._condition:
            self._permits += steps
            self._condition.notify_all()

    def pass_through(self) -> None:
        """Wait for a permit and use it."""
        with self._condition:
            while self._permits < 1:
                self._condition.wait()
            self._permits -= 1

    def _set(self, permits: float) -> None:
        with self._condition:
            self._permits = permits
            self._condition.notify_all()


@dataclass
class FakePrefix:
    """`columns` are in the cache, `unread` are not yet; None: they follow the first `kept` that the slot holds.

    The segment has `frames` frames, `made` of them exist; `next_frame` is the request's; levels of frames without sound
    are `held`.
    """

    columns: list[int] | None
    unread: list[list[int]]
    frames: int
    sampling: SamplingParams
    next_frame: int
    kept: int = 0
    made: int = 0
    held: list[float] = field(default_factory=list)

    @property
    def num_chunks(self) -> int:
        """Chunks that are still to be read."""
        return len(self.unread)


def _copied(prefix: FakePrefix, columns: list[int]) -> FakePrefix:
    return replace(prefix, columns=list(columns), unread=list(prefix.unread), held=list(prefix.held))


@dataclass(frozen=True)
class FakeStepResult:
    """As the engine's."""

    codes_BK: np.ndarray
    is_end_B: np.ndarray
    audio_Bs: np.ndarray
    has_sound_B: np.ndarray


class FakeSound:
    """Sound of held frames."""

    def __init__(self, audio_BFs: np.ndarray):
        self._audio_BFs = audio_BFs

    def result(self) -> np.ndarray:
        """The samples."""
        return self._audio_BFs


class FakePending:
    """A step that may have failed: the fault shows when it is read, as on a device."""

    def __init__(self, result: FakeStepResult, fault: Exception | None):
        self._result, self._fault = result, fault

    def result(self) -> FakeStepResult:
        """The frames, or the fault."""
        if self._fault is not None:
            raise self._fault
        return self._result


@dataclass
class FakeVoices:
    """Numbers to be shown."""

    hits: int = 0
    misses: int = 0
    num_bytes: int = 0


class FakeCodes:
    """A frame for a piece, whose codes are its number of samples."""

    def __init__(self, num_samples: int):
        self._num_samples = num_samples

    def result(self) -> np.ndarray:
        """The codes."""
        return np.full((NUM_CODEBOOKS, 1), self._num_samples, np.int32)


class FakeReferences:
    """Clips in pieces of `piece_samples`. `fault` is raised by the next `encode`; others are noted by the engine."""

    def __init__(self, note: Callable[..., None]):
        self.max_frames = 1_000_000
        self.piece_samples = 1_000_000
        self.fault: Exception | None = None
        self._note = note

    def cut(self, audio_T: np.ndarray) -> list[np.ndarray]:
        """Pieces."""
        return [audio_T[at : at + self.piece_samples] for at in range(0, audio_T.size, self.piece_samples)]

    def encode(self, piece: np.ndarray, after: FakeCodes | None = None) -> FakeCodes:
        """One frame."""
        self._note("reference", piece.size, after is not None)
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        return FakeCodes(piece.size)


@dataclass
class FakeEngine:
    """Slots of numbers. Asserts the rules of the verbs: one thread, warm first, insert and read before step, no freed
    slot runs. A chunk has `chunk_columns` columns. With a `sound_group` sound of all but a segment's first frame is
    made by `sound`.

    `fault` is raised by the result of the next step, `warmup_fault` by the warm-up; `trace` lists the verbs.
    """

    num_slots: int = 2
    max_len: int = 64
    num_codebooks: int = NUM_CODEBOOKS
    sample_rate_hz: int = 22050
    samples_per_frame: int = 4
    model_name: str = "fake"
    chunk_columns: int = 4
    sound_group: int = 1
    voices: FakeVoices = field(default_factory=FakeVoices)
    gate: Gate = field(default_factory=Gate)
    fault: Exception | None = None
    warmup_fault: Exception | None = None
    warmup_gate: Gate = field(default_factory=Gate)
    read_gate: Gate = field(default_factory=Gate)
    trace: list[tuple[Any, ...]] = field(default_factory=list)
    runs: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self):
        self.references = FakeReferences(self._note)
        self._slots: list[FakePrefix | None] = [None] * self.num_slots
        self._thread: int | None = None

    def warmup(self, progress: Callable[[str], None] | None = None) -> None:
        """Wait for `warmup_gate`."""
        self._thread = threading.get_ident()
        self.warmup_gate.pass_through()
        if self.warmup_fault is not None:
            raise self.warmup_fault
        if progress:
            progress("nothing")

    def prefill(
        self,
        columns_CT: np.ndarray,
        sampling: SamplingParams,
        *,
        prefix_length: int = 0,
        voice_length: int = 0,
        first_frame: int = 0,
    ) -> FakePrefix:
        """The last column's row 1 says how many frames the segment has."""
        self._note("prefill", prefix_length, columns_CT.shape[1], first_frame)
        length = prefix_length + columns_CT.shape[1]
        if length > self.max_len:
            raise PromptTooLong(f"the prompt has {length} columns; a slot holds {self.max_len}: shorten it")
        ids, step = columns_CT[0].tolist(), self.chunk_columns
        chunks = [ids[at : at + step] for at in range(0, len(ids), step)]
        return FakePrefix(None, chunks, int(columns_CT[1, -1]), sampling, first_frame, prefix_length)

    def insert(self, prefix: FakePrefix, slot: int) -> None:
        """Into the slot."""
        self._note("insert", slot)
        columns = prefix.columns
        if columns is None:
            row = self._slots[slot]
            held = [] if row is None or row.columns is None else row.columns
            assert prefix.kept <= len(held), f"{prefix.kept} columns of {len(held)}"
            columns = held[: prefix.kept]
        self._slots[slot] = _copied(prefix, columns)

    def read(self, slot: int) -> None:
        """A chunk."""
        self.read_gate.pass_through()
        self._note("read", slot)
        row = self._slots[slot]
        assert row is not None and row.columns is not None, f"slot {slot} is empty"
        row.columns += row.unread.pop(0)

    def step(self, run: Collection[int]) -> FakePending:
        """One frame of each."""
        self.gate.pass_through()
        self._note("step", tuple(run))
        self.runs.append(tuple(run))
        codes_BK = np.full((self.num_slots, self.num_codebooks), -1, np.int32)
        is_end_B = np.zeros(self.num_slots, bool)
        audio_Bs = np.full((self.num_slots, self.samples_per_frame), np.nan, np.float32)
        has_sound_B = np.zeros(self.num_slots, bool)
        assert len(set(run)) == len(list(run)), f"a slot runs twice: {run}"
        for slot in run:
            row = self._slots[slot]
            assert row is not None and row.columns is not None, f"slot {slot} runs empty"
            assert not row.unread, f"slot {slot} runs before its prompt is read"
            is_end_B[slot] = row.made >= row.frames
            codes_BK[slot] = [row.sampling.seed % 1000, row.next_frame, row.made]
            level, has_sound_B[slot] = (
                frame_level(row.sampling.seed, row.next_frame),
                self.sound_group == 1 or not row.made,
            )
            if has_sound_B[slot]:
                audio_Bs[slot] = level
            else:
                row.held.append(level)
                assert row.made >= row.frames or len(row.held) <= 2 * self.sound_group, "no room for a frame"
            row.columns.append(-1)
            row.made += 1
            row.next_frame += 1
        fault, self.fault = self.fault, None
        return FakePending(FakeStepResult(codes_BK, is_end_B, audio_Bs, has_sound_B), fault)

    def sound(self, slots: Collection[int]) -> FakeSound:
        """The oldest frames that each holds."""
        self._note("sound", tuple(slots))
        audio_BFs = np.full((self.num_slots, self.sound_group, self.samples_per_frame), np.nan, np.float32)
        for slot in slots:
            row = self._slots[slot]
            assert row is not None, f"slot {slot} is empty"
            for place, level in enumerate(row.held[: self.sound_group]):
                audio_BFs[slot, place] = level
            del row.held[: self.sound_group]
        return FakeSound(audio_BFs)

    def extract(self, slot: int) -> FakePrefix:
        """A copy."""
        self._note("extract", slot)
        row = self._slots[slot]
        assert row is not None and row.columns is not None, f"slot {slot} is empty"
        return _copied(row, row.columns)

    def free(self, slot: int) -> None:
        """Empty it."""
        self._note("free", slot)
        self._slots[slot] = None

    def _note(self, *what: Any) -> None:
        assert self._thread == threading.get_ident(), f"{what[0]} outside the loop's thread"
        self.trace.append(what)


@dataclass(frozen=True)
class FakePrompt:
    """As the request logic's."""

    columns_CT: np.ndarray
    prefix_length: int
    voice_length: int
    first_frame: int


@dataclass(frozen=True)
class FakeAccepted:
    """As the request logic's."""

    keep: bool
    segment_done: bool
    finish_reason: str | None = None


class FakeUtterance:
    """Segments of so many frames, each prompt behind the frames before it. Checks that each frame is its own."""

    def __init__(self, text: str | None, references: Sequence[Reference], sampling: SamplingParams):
        self.sampling = sampling
        self.references = tuple(references)
        self.num_frames = 0
        self.finish_reason: str | None = None
        self._segments = _lengths(text) if text is not None else []
        self._more_to_come = text is None
        self._made = 0
        self._cached = 0
        self._next: FakePrompt | None = self._prompt(1 + len(references)) if self._segments else None

    @property
    def waits(self) -> bool:
        """All text so far is spoken, and more may come."""
        return not self._segments and self.finish_reason is None

    def extend(self, segments: Sequence[str], *, last: bool = False) -> None:
        """More text. "unpronounceable" is refused."""
        if any("unpronounceable" in segment for segment in segments):
            raise InvalidRequest("this text cannot be spoken")
        waited = self.waits
        self._segments += [length for segment in segments for length in _lengths(segment)]
        self._more_to_come = not last
        if waited and self._segments:
            self._made = 0
            self._next = self._prompt(1 if self._cached else 1 + len(self.references))
        elif waited and last:
            self.finish_reason = "stop" if self.num_frames else "empty"

    def next_prompt(self) -> FakePrompt | None:
        """The segment to speak now."""
        prompt, self._next = self._next, None
        return prompt

    def accept(self, codes_K: np.ndarray, is_end: bool) -> FakeAccepted:
        """Count a frame, after checking whose it is."""
        expected = [self.sampling.seed % 1000, self.num_frames, self._made]
        assert codes_K.tolist() == expected, f"got frame {codes_K.tolist()} instead of {expected}"
        if not is_end:
            self.num_frames += 1
            self._made += 1
            if self.num_frames == self.sampling.max_frames:
                self.finish_reason = "length"
                return FakeAccepted(True, True, "length")
            return FakeAccepted(True, False)
        self._cached += self._made
        self._segments.pop(0)
        if self._segments:
            self._made = 0
            self._next = self._prompt(1)
            return FakeAccepted(False, True)
        if self._more_to_come:
            return FakeAccepted(False, True)
        self.finish_reason = "stop" if self.num_frames else "empty"
        return FakeAccepted(False, True, self.finish_reason)

    def _prompt(self, width: int) -> FakePrompt:
        columns_CT = np.zeros((NUM_CODEBOOKS + 1, width), np.int32)
        columns_CT[1, -1] = self._segments[0]
        prompt = FakePrompt(columns_CT, self._cached, 0, self.num_frames)
        self._cached += width
        return prompt


def _lengths(text: str) -> list[int]:
    parts = [part.split() for part in text.split(".")]
    if len(parts) > 1 and not parts[-1]:
        parts.pop()
    return [len(words) for words in parts]


@dataclass
class FakeSpeech:
    """The fake engine with its text side. The word "unpronounceable" is refused."""

    engine: FakeEngine = field(default_factory=FakeEngine)
    utterances: list[FakeUtterance] = field(default_factory=list)
    least_max_len: int = 1

    def default_sampling(self, seed: int = 0) -> SamplingParams:
        """Its own defaults."""
        return SamplingParams(0.7, 0.9, 20, seed)

    def live_text(self) -> LiveText:
        """The real one."""
        return LiveText(200)

    def utterance(self, text: str | None, references: Sequence[Reference], sampling: SamplingParams) -> FakeUtterance:
        """Ready to be spoken."""
        if text is not None and "unpronounceable" in text:
            raise InvalidRequest("this text cannot be spoken")
        utterance = FakeUtterance(text, references, sampling)
        self.utterances.append(utterance)
        return utterance
