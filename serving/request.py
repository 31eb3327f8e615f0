"""A request and what happens to it: the words that the loop and the transport share. Plain data.

SpeechRequest (what was asked) -> Started -> Frame, Frame, ... -> Finished | Failed
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fishjax.audio.encode import AudioFormat
from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import FishjaxError
from fishjax.text.prompt import Reference

from .plan import Priority


@dataclass(frozen=True, slots=True)
class Clip:
    """A voice as the caller sent it: a whole sound file, and what is said in it."""

    audio: bytes
    transcript: str


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """What a caller asked for, checked. `text` is None where it arrives in pieces; the deadline is in seconds of the
    server's monotonic clock. `clips` is emptied once they are read: a request that waits holds no megabytes of sound.
    """

    request_id: str
    text: str | None
    clips: list[Clip]
    voice: tuple[Reference, ...]  # of a stored voice, instead of clips
    sampling: SamplingParams
    audio_format: AudioFormat
    priority: Priority
    deadline_s: float | None


@dataclass(frozen=True, slots=True)
class Started:
    """The request got a slot at `at_s`."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Frame:
    """Frame number `index` of the request: float32 samples in -1..1."""

    index: int
    audio_s: np.ndarray


@dataclass(frozen=True, slots=True)
class Finished:
    """The end: why (the value of a `FinishReason`), after how many frames and how many times out of its slot."""

    reason: str
    num_frames: int
    num_saves: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a request that could not be spoken."""

    error: FishjaxError


Event = Started | Frame | Finished | Failed
