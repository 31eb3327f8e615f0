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
    LENGTH = "length"  # max_frames, the slot's cache or, in a segment, max_segment_frames was full
    RUNAWAY = "runaway"  # more frames than the text can need: the model missed its end
    EMPTY = "empty"  # the model ended before the first frame


@dataclass(frozen=True, slots=True)
class Prompt:
    """Columns (C+1, T) that follow `prefix_length` columns already in the cache.

    The first `voice_length` of them belong to the voice alone; 0 where the cache holds those already.
    """

    columns_CT: np.ndarray
    prefix_length: int
    voice_length: int
    first_frame: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a frame was: `keep` if it is sound; whether its segment, and with `finish_reason` the request, is over."""

    keep: bool
    segment_done: bool
    finish_reason: FinishReason | None = None


class Utterance:
    """A request being spoken. Raises InvalidRequest for blank text, PromptTooLong when a prompt leaves no room.

    With `text` None the text arrives while it is spoken: `extend` brings segments, until one call says `last`.
    """

    def __init__(
        self,
        text: str | None,
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
        self._given = tuple(references)
        self._voice: tuple[Reference, ...] = ()  # the first segment, once it stands in for a reference
        self._more_to_come = text is None
        self._waiting: list[str] = []
        if text is not None:
            text = text if profile.keep_tags else strip_tags(text)
            self._waiting = split_for_speech(text, profile.segment_bytes)
        self._history: list[Reference] = []  # finished segments: their text and codes (C, T)
        self._cached_CT = np.zeros((prompter.num_codebooks + 1, 0), np.int32)
        self._text = ""
        self._prompt_CT = self._cached_CT
        self._frames: list[np.ndarray] = []
        self._frame_limit = 0
        self._limit_reason = FinishReason.LENGTH
        self._worst = FinishReason.STOP
        self.num_frames = 0
        self.finish_reason: FinishReason | None = None
        self._next = self._prepare_segment() if self._waiting else None
        self._between_segments = self._next is None

    @property
    def waits(self) -> bool:
        """Whether all text so far is spoken, and more may come."""
        return self._between_segments and self.finish_reason is None

    def extend(self, segments: Sequence[str], *, last: bool = False) -> None:
        """More text, as segments that fit a prompt each; with `last` no more follows. Raises PromptTooLong."""
        if self.finish_reason is not None:
            return  # a limit came first
        self._waiting += segments
        self._more_to_come = not last
        if not self._between_segments:
            return
        if self._waiting:
            self._next = self._prepare_segment()
            self._between_segments = False
        elif last:
            self._finish()

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
            if self._worst is FinishReason.STOP:
                self._worst = self._limit_reason
        self._end_segment(last_frame_cached=is_end)
        out_of_frames = self._frames_left() <= 0
        text_left = bool(self._waiting) or self._more_to_come
        if text_left and not out_of_frames:
            self._next = self._prepare_segment() if self._waiting else None
            self._between_segments = self._next is None
            return Accepted(keep=not is_end, segment_done=True)
        if out_of_frames and text_left:
            self._worst = FinishReason.LENGTH
        self._finish()
        return Accepted(keep=not is_end, segment_done=True, finish_reason=self.finish_reason)

    def _finish(self) -> None:
        self.finish_reason = FinishReason.EMPTY if self.num_frames == 0 else self._worst

    def _frames_left(self) -> float:
        limit = self.sampling.max_frames
        return math.inf if limit is None else limit - self.num_frames

    def _prepare_segment(self) -> Prompt:
        self._text = self._waiting.pop(0)
        self._frames = []
        guard = _guard(self._text, self._frame_rate_hz)
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
        voice_length = 0 if known else self._prompter.voice(self._given).shape[1]
        return Prompt(prompt_CT[:, known:], known, voice_length, self.num_frames)

    def _fit(self, wanted: int) -> np.ndarray:
        """The prompt of this segment, with history where it leaves room for `wanted` frames."""
        prompt_CT = self._columns(self._history)
        if prompt_CT.shape[1] + wanted > self._max_len:
            self._forget(wanted)
            prompt_CT = self._columns(self._history)
        if prompt_CT.shape[1] + _min_room(wanted, self._frame_rate_hz) > self._max_len:
            raise PromptTooLong(
                f"the prompt takes {prompt_CT.shape[1]} of {self._max_len} positions and leaves no room to speak: "
                "use shorter references, shorter words, or a larger --max-len"
            )
        return prompt_CT

    def _forget(self, wanted: int) -> None:
        """Drop history for good, oldest segments first, until it takes at most half of the room that it could have.

        Half, so that the segments after this one fit again and find the prompt before theirs in the cache; dropping
        just enough would have everything read anew for each of them. The first segment becomes the reference where
        none was given, so that the voice stays; it goes too when it leaves this text no room to speak.
        """
        if not self._given and not self._voice and self._history:
            self._voice = (self._history.pop(0),)
        if self._columns(()).shape[1] + _min_room(wanted, self._frame_rate_hz) > self._max_len:
            self._voice = ()
        bare = self._columns(()).shape[1]
        room = max(0, self._max_len - bare - wanted)
        while self._history and self._columns(self._history).shape[1] - bare > room // 2:
            self._history.pop(0)

    def _columns(self, history: Sequence[Reference]) -> np.ndarray:
        """The prompt (C+1, T) of this segment's text after `history`."""
        return self._prompter.prompt(self._given or self._voice, history, self._text)

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


def least_max_len(prompter: Prompter, profile: SpeechProfile, frame_rate_hz: float) -> int:
    """Positions of the smallest slot that takes a text at all: of one letter, without references and `max_frames`."""
    letter = "a"
    wanted = min(_guard(letter, frame_rate_hz), profile.max_segment_frames)
    return prompter.prompt((), (), letter).shape[1] + _min_room(wanted, frame_rate_hz)


def _guard(text: str, frame_rate_hz: float) -> int:
    """Frames that no honest reading of `text` needs: a second and a half, and 0.37 s a byte."""
    return math.ceil(1.5 * frame_rate_hz + 0.372 * frame_rate_hz * len(text.encode("utf-8")))


def _min_room(wanted: int, frame_rate_hz: float) -> int:
    """Frames that a prompt must leave room for: those wanted, or two seconds."""
    return min(wanted, math.ceil(2 * frame_rate_hz))


def _common_columns(cached_CT: np.ndarray, prompt_CT: np.ndarray) -> int:
    """How many leading columns agree; at least one column of the prompt is left to read."""
    width = min(cached_CT.shape[1], prompt_CT.shape[1] - 1)
    differs = np.flatnonzero(np.any(cached_CT[:, :width] != prompt_CT[:, :width], axis=0))
    return int(differs[0]) if differs.size else width
