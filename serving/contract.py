"""What the service asks of a model: `fishjax.speech.SpeechModel` has this shape, and so has a fake in the tests.

Arrays are NumPy. The engine's verbs and `References.encode` are called from the loop's thread only; the rest from any.
"""

# ruff: noqa: D102 - each method is documented where it is implemented

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np

from fishjax.engine.sampling_params import SamplingParams
from fishjax.text.live import LiveText
from fishjax.text.prompt import Reference


class StepResult(Protocol):
    """One frame of each slot that ran: codes int32 (B, K), whether it is the end bool (B,), and samples float32 (B, s).

    `has_sound_B` bool (B,): whether the samples are here; where they are not, `Engine.sound` makes them.
    """

    @property
    def codes_BK(self) -> np.ndarray: ...
    @property
    def is_end_B(self) -> np.ndarray: ...
    @property
    def audio_Bs(self) -> np.ndarray: ...
    @property
    def has_sound_B(self) -> np.ndarray: ...


class PendingStep(Protocol):
    """A step on its way."""

    def result(self) -> StepResult:
        """Block until it is made."""
        ...


class PendingSound(Protocol):
    """Sound on its way."""

    def result(self) -> np.ndarray:
        """Block until it is made: float32 (slots, frames, samples)."""
        ...


class PendingCodes(Protocol):
    """A piece of a clip that is being encoded."""

    def result(self) -> np.ndarray:
        """Block until it is: codes int32 (K, frames). In any thread."""
        ...


class References(Protocol):
    """Clips to codes; see `fishjax.engine.references.ReferenceEncoder`. `max_frames`: of one clip that are used."""

    max_frames: int

    def cut(self, audio_T: np.ndarray) -> Sequence[Any]: ...
    def encode(self, piece: Any, after: Any = None) -> PendingCodes: ...


class Prefix(Protocol):
    """A request's state outside the slots, with so many chunks of its prompt still to be read."""

    @property
    def num_chunks(self) -> int: ...


class Voices(Protocol):
    """Snapshots of voices on the device: how often one was there and was not, and the bytes of all."""

    @property
    def hits(self) -> int: ...
    @property
    def misses(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


class Engine(Protocol):
    """Fixed slots and seven verbs; see `fishjax.engine.engine.Engine`."""

    num_slots: int
    max_len: int
    num_codebooks: int
    sample_rate_hz: int
    samples_per_frame: int
    model_name: str
    sound_group: int  # frames of a slot that `sound` makes at a time; it has room for twice as many

    @property
    def voices(self) -> Voices: ...
    @property
    def references(self) -> References: ...
    def warmup(self, progress: Callable[[str], None] | None = None) -> None: ...
    def prefill(
        self,
        columns_CT: np.ndarray,
        sampling: SamplingParams,
        *,
        prefix_length: int = 0,
        voice_length: int = 0,
        first_frame: int = 0,
    ) -> Prefix: ...
    def insert(self, prefix: Any, slot: int) -> None: ...
    def read(self, slot: int) -> None: ...
    def step(self, run: Collection[int]) -> PendingStep: ...
    def sound(self, slots: Collection[int]) -> PendingSound: ...
    def extract(self, slot: int) -> Prefix: ...
    def free(self, slot: int) -> None: ...


class Prompt(Protocol):
    """Columns int32 (C+1, T) behind `prefix_length` columns of the slot; the first `voice_length` are of a voice."""

    @property
    def columns_CT(self) -> np.ndarray: ...
    @property
    def prefix_length(self) -> int: ...
    @property
    def voice_length(self) -> int: ...
    @property
    def first_frame(self) -> int: ...


class Accepted(Protocol):
    """What a frame was; `finish_reason` is a `fishjax.engine.utterance.FinishReason` once the request is over."""

    @property
    def keep(self) -> bool: ...
    @property
    def segment_done(self) -> bool: ...
    @property
    def finish_reason(self) -> str | None: ...


class Utterance(Protocol):
    """One request being spoken; see `fishjax.engine.utterance.Utterance`."""

    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def num_frames(self) -> int: ...
    @property
    def waits(self) -> bool: ...
    @property
    def finish_reason(self) -> str | None: ...
    def extend(self, segments: Sequence[str], *, last: bool = False) -> None: ...
    def next_prompt(self) -> Prompt | None: ...
    def accept(self, codes_K: np.ndarray, is_end: bool) -> Accepted: ...


class Speech(Protocol):
    """An engine and the text side of its model."""

    @property
    def engine(self) -> Engine: ...
    @property
    def least_max_len(self) -> int: ...
    def default_sampling(self, seed: int = 0) -> SamplingParams: ...
    def live_text(self) -> LiveText: ...
    def utterance(self, text: str | None, references: Sequence[Reference], sampling: SamplingParams) -> Utterance: ...
