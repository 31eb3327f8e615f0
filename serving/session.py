"""The asynchronous side of one request: prepare it, wait for its sound, let it go. Knows no protobuf.

    reserve a place -> read its clips -> submit -> Sound, Sound, ...

Text that arrives in pieces is read by a task beside the sound (`read_text`); its first segment submits the request.

Whatever way a session is left, its place or slot is given up at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from fishjax.errors import EngineFailed, FishjaxError, InvalidRequest, SlowReader
from fishjax.text.prompt import Reference

from .contract import Speech, Utterance
from .desk import Desk
from .mailbox import MAX_FRAMES, Mailbox, Playback
from .request import Clip, Failed, Finished, Frame, SpeechRequest, Started

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sound:
    """`num_frames` frames from number `first_frame` on: float32 in -1..1. `waited`: the reader was up to date."""

    audio_T: np.ndarray
    first_frame: int
    num_frames: int
    waited: bool


class Session:
    """One request, from its place in the queue to its end: `async with` it, then read `sound()`.

    Entering raises QueueFull, Draining, NotReady, DeadlineExceeded, InvalidRequest or PromptTooLong.
    """

    def __init__(
        self,
        request: SpeechRequest,
        speech: Speech,
        desk: Desk[Mailbox],
        executor: Executor,
        read: Callable[[tuple[Clip, ...]], Awaitable[Sequence[Reference]]],
        clock: Callable[[], float],
    ):
        self.started_s: float | None = None  # when it got a slot
        self.reference_frames = 0  # of its clips or its voice, once entered
        self.finished: Finished | None = None  # once `sound()` is at its end
        self._request = request
        self._speech = speech
        self._desk = desk
        self._executor = executor
        self._read = read
        self._clock = clock
        self._mailbox = Mailbox()
        self._utterance: Utterance | None = None  # of a request that is not submitted yet
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Session:
        request = self._request
        self._desk.reserve(request.request_id, request.priority, deadline_s=request.deadline_s)
        try:
            try:
                references = request.voice or await self._read(tuple(request.clips))
            finally:
                request.clips.clear()
            self.reference_frames = sum(reference.codes_KT.shape[1] for reference in references)
            self._utterance = await self._in_pool(self._speech.utterance, request.text, references, request.sampling)
            if request.text is not None:
                self._submit()
        except BaseException:
            self._desk.cancel(request.request_id)
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._desk.cancel(self._request.request_id)
        if self._reader is not None:
            self._reader.cancel()

    def read_text(self, pieces: AsyncIterator[str | None], max_bytes: int) -> None:
        """Speak the text that `pieces` brings, until it ends; None among them means: what is there, now.

        What goes wrong with it is raised by `sound()`: InvalidRequest for more than `max_bytes`, or no text at all.
        """
        self._reader = asyncio.create_task(self._read_text(pieces, max_bytes))

    async def _read_text(self, pieces: AsyncIterator[str | None], max_bytes: int) -> None:
        live, num_bytes = self._speech.live_text(), 0
        try:
            async for piece in pieces:
                num_bytes += len((piece or "").encode("utf-8"))
                if num_bytes > max_bytes:
                    raise InvalidRequest(f"the text has more than {max_bytes} bytes: start a new call for the rest")
                await self._say(live.flush() if piece is None else await self._in_pool(live.feed, piece), last=False)
            await self._say(live.flush(), last=True)
            if self._utterance is not None:
                raise InvalidRequest("there is no text to speak: all of it was tags, spaces or invisible characters")
        except FishjaxError as error:
            self._mailbox.put(Failed(error))
        except Exception:
            logger.exception("the text could not be read")
            self._mailbox.put(Failed(EngineFailed("the text could not be read")))

    async def _say(self, segments: Sequence[str], *, last: bool) -> None:
        if self._utterance is None:
            if segments or last:
                self._desk.extend(self._request.request_id, segments, last=last)
        elif segments:
            await self._in_pool(partial(self._utterance.extend, segments, last=last))
            self._submit()

    def _submit(self) -> None:
        assert self._utterance is not None
        self._desk.submit(self._request.request_id, self._utterance, self._mailbox)
        self._utterance = None

    async def sound(self) -> AsyncIterator[Sound]:
        """All sound in order, as it is made. Raises what ended the request, if it did not end well."""
        engine = self._speech.engine
        playback = Playback(engine.samples_per_frame / engine.sample_rate_hz)
        max_frames = min(MAX_FRAMES, self._desk.max_unread_frames)
        while True:
            num_frames, patience_s = playback.next_message(self._clock(), max_frames)
            waited = not self._mailbox.has(num_frames)
            events = await self._mailbox.take(num_frames, patience_s)
            match events[0]:
                case Started(at_s):
                    self.started_s = at_s
                case Frame(index=first_frame):
                    self._desk.taken(self._request.request_id, len(events))
                    audio_T = np.concatenate([event.audio_s for event in events if isinstance(event, Frame)])
                    playback.send(len(events), self._clock())
                    yield Sound(audio_T, first_frame, len(events), waited)
                case Finished() as finished:
                    self.finished = finished
                    return
                case Failed(error):
                    raise error

    async def _in_pool(self, function: Callable[..., Any], *arguments: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


class ReaderPace:
    """How far a reader lags behind sound that waits for it, and the end of our patience.

    While sound waits, a reader must take it at least as fast as it plays. One that falls `patience_s` seconds behind
    is cut off. Time in which nothing was ready for it does not count.
    """

    def __init__(self, patience_s: float, clock: Callable[[], float]):
        self.lag_s = 0.0
        self._patience_s = patience_s
        self._clock = clock

    def caught_up(self) -> None:
        """The reader had taken all there was."""
        self.lag_s = 0.0

    async def write(self, message: Awaitable[None], audio_s: float) -> None:
        """Wait until the reader has room for a message of so many seconds. Raises SlowReader."""
        began_s = self._clock()
        try:
            async with asyncio.timeout(self._patience_s - self.lag_s):
                await message
        except TimeoutError:
            raise self._too_slow() from None
        self.lag_s = max(0.0, self.lag_s + self._clock() - began_s - audio_s)
        if self.lag_s >= self._patience_s:
            raise self._too_slow()

    def _too_slow(self) -> SlowReader:
        return SlowReader(
            f"the caller fell {self._patience_s:g} s behind the speech that waits for it and was cut off: "
            "read the stream at least as fast as it plays"
        )
