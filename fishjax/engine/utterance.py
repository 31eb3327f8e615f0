"""One request from text to its last frame: segments, prompts, history, limits. Plain Python and NumPy.

Place in the flow: the loop asks `next_prompt()`, has it prefilled and inserted, and hands every frame to
`accept()`, which says whether it is sound and when a segment is over. Knows nothing of slots, devices or clocks.

    text -> segments -> [prompt -> frames -> history] per segment
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from fishjax.config import SpeechProfile
from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import PromptTooLong
from fishjax.text.prompt import Prompter, Reference
from fishjax.text.split import split_for_speech, strip_tags


class FinishReason(StrEnum):
    """Why an utterance ended."""

    STOP = "stop"  # the model said so
    LENGTH = "length"  # max_frames, or the slot's cache, was full
    RUNAWAY = "runaway"  # more frames than the text can need: the model missed its end
    EMPTY = "empty"  # the model ended before the first frame


@dataclass(frozen=True, slots=True)
class Prompt:
    """Columns (C+1, T) that follow `prefix_length` columns already in the cache."""

    columns_CT: np.ndarray
    prefix_length: int
    first_frame: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a frame was: `keep` if it is sound; whether its segment, and with `finish_reason` the request, is over."""

    keep: bool
    segment_done: bool
    finish_reason: FinishReason | None = None


class Utterance:
    """A request being spoken. Raises InvalidRequest for blank text, PromptTooLong when a prompt leaves no room."""

    def __init__(
        self,
        text: str,
        references: Sequence[Reference],
        sampling: SamplingParams,
        *,
        prompter: Prompter,
        profile: SpeechProfile,
        max_len: int,
        frame_rate_hz: float,
    ):
        self.sampling = sampling
        self._prompter = prompter
        self._profile = profile
        self._max_len = max_len
        self._frame_rate_hz = frame_rate_hz
        self._references = tuple(references)
        text = text if profile.keep_tags else strip_tags(text)
        self._waiting = list(split_for_speech(text, profile.segment_bytes))
        self._history: list[Reference] = []  # finished segments: their text and codes (C, T)
        self._cached_CT = np.zeros((prompter.num_codebooks + 1, 0), np.int32)
        self._text = ""
        self._prompt_CT = self._cached_CT
        self._frames: list[np.ndarray] = []
        self._frame_limit = 0
        self._limit_reason = FinishReason.STOP
        self._worst = FinishReason.STOP
        self.num_frames = 0
        self.finish_reason: FinishReason | None = None
        self._next = self._prepare_segment()

    def next_prompt(self) -> Prompt | None:
        """The prompt of the segment to speak now; None once the request is finished."""
        prompt, self._next = self._next, None
        return prompt

    def accept(self, codes_K: np.ndarray, is_end: bool) -> Accepted:
        """Take the frame that the step made: `codes_K` (C,), or the end of speech, which is not sound."""
        if not is_end:
            self._frames.append(np.asarray(codes_K, np.int32))
            self.num_frames += 1
            if len(self._frames) < self._frame_limit:
                return Accepted(keep=True, segment_done=False)
            if self._limit_reason is not FinishReason.STOP and self._worst is FinishReason.STOP:
                self._worst = self._limit_reason
        self._end_segment(last_frame_cached=is_end)
        out_of_frames = self._frames_left() <= 0
        if self._waiting and not out_of_frames:
            self._next = self._prepare_segment()
            return Accepted(keep=not is_end, segment_done=True)
        if out_of_frames and self._waiting:
            self._worst = FinishReason.LENGTH
        self.finish_reason = FinishReason.EMPTY if self.num_frames == 0 else self._worst
        return Accepted(keep=not is_end, segment_done=True, finish_reason=self.finish_reason)

    def _frames_left(self) -> float:
        limit = self.sampling.max_frames
        return math.inf if limit is None else limit - self.num_frames

    def _guard(self, text: str) -> int:
        """Frames that no honest reading of `text` needs: a second and a half, and 0.37 s a byte."""
        return math.ceil(1.5 * self._frame_rate_hz + 0.372 * self._frame_rate_hz * len(text.encode("utf-8")))

    def _prepare_segment(self) -> Prompt:
        self._text = self._waiting.pop(0)
        self._frames = []
        guard = self._guard(self._text)
        wanted = int(min(guard, self._profile.max_segment_frames, self._frames_left()))
        prompt_CT = self._fit(wanted)
        room = self._max_len - prompt_CT.shape[1]
        limits = {
            FinishReason.RUNAWAY: guard,
            FinishReason.LENGTH: int(min(self._profile.max_segment_frames, self._frames_left(), room)),
        }
        self._limit_reason = min(limits, key=lambda reason: limits[reason])
        self._frame_limit = limits[self._limit_reason]
        known = _common_columns(self._cached_CT, prompt_CT)
        self._prompt_CT = prompt_CT
        return Prompt(prompt_CT[:, known:], known, self.num_frames)

    def _fit(self, wanted: int) -> np.ndarray:
        """The prompt with as much history as leaves room for `wanted` frames; the oldest segments go first."""
        references, history = self._references, list(self._history)
        while True:
            prompt_CT = self._prompter.prompt(references, history, self._text)
            if prompt_CT.shape[1] + wanted <= self._max_len:
                return prompt_CT
            if not history:
                break
            oldest = history.pop(0)
            if not references and history:
                references = (oldest,)  # with no reference, the first segment keeps the voice
        if prompt_CT.shape[1] + self._min_room(wanted) > self._max_len:
            raise PromptTooLong(
                f"the prompt takes {prompt_CT.shape[1]} of {self._max_len} positions and leaves no room to speak: "
                "use shorter references or a server with a larger --max-len"
            )
        return prompt_CT

    def _min_room(self, wanted: int) -> int:
        return min(wanted, math.ceil(2 * self._frame_rate_hz))

    def _end_segment(self, *, last_frame_cached: bool) -> None:
        frames_CT = np.stack(self._frames, axis=1) if self._frames else self._cached_CT[1:, :0]
        columns_CT = self._prompter.frame_columns(frames_CT)
        # At a limit the last frame was made but perhaps not read back in by the slow transformer.
        known = frames_CT.shape[1] if last_frame_cached else max(frames_CT.shape[1] - 1, 0)
        self._cached_CT = np.concatenate([self._prompt_CT, columns_CT[:, :known]], axis=1)
        if frames_CT.shape[1] and self._profile.max_history_segments != 0:
            self._history.append(Reference(self._text, frames_CT))
            if self._profile.max_history_segments is not None:
                self._history = self._history[-self._profile.max_history_segments :]


def _common_columns(cached_CT: np.ndarray, prompt_CT: np.ndarray) -> int:
    """How many leading columns agree; at least one column of the prompt is left to read."""
    width = min(cached_CT.shape[1], prompt_CT.shape[1] - 1)
    differs = np.flatnonzero(np.any(cached_CT[:, :width] != prompt_CT[:, :width], axis=0))
    return int(differs[0]) if differs.size else width
