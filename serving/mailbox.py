"""One request's events on their way from the loop to its session, and how many frames make a message.

A message costs the event loop about as much whether it holds one frame or ten. So a listener who has nothing yet gets
each frame at once, and one with sound ahead gets as many together as last half of that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence

from .request import Event, Frame

MAX_FRAMES = 16
"""In a message."""


class Mailbox:
    """Events in order; in the event loop's thread. The loop bounds it: it pauses a slot that is not read."""

    def __init__(self):
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._wanted = 1

    def put(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)
        if self.has(self._wanted):
            self._arrived.set()

    def has(self, num_frames: int) -> bool:
        """Whether so many frames are here, or something else that does not wait for more."""
        events = self._events
        if len(events) >= num_frames:
            return True
        return bool(events) and not (isinstance(events[0], Frame) and isinstance(events[-1], Frame))

    async def take(self, num_frames: int = 1, patience_s: float = 0.0) -> list[Event]:
        """The next event; a frame brings the frames right behind it, up to a message's worth.

        Waits until `num_frames` are here, after `patience_s` seconds for one.
        """
        if num_frames > 1 and not self.has(num_frames):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._wait(num_frames)
        while not self._events:
            await self._wait(1)
        events = [self._events.popleft()]
        while (
            isinstance(events[0], Frame)
            and self._events
            and isinstance(self._events[0], Frame)
            and len(events) < MAX_FRAMES
        ):
            events.append(self._events.popleft())
        return events

    async def _wait(self, num_frames: int) -> None:
        self._wanted = num_frames
        self._arrived.clear()
        await self._arrived.wait()


class Playback:
    """What a listener has ahead who plays sound as it arrives, without a pause."""

    def __init__(self, frame_s: float):
        self._frame_s = frame_s
        self._dry_s: float | None = None

    def send(self, num_frames: int, now_s: float) -> None:
        """So many frames are on their way."""
        heard_until_s = now_s if self._dry_s is None else max(self._dry_s, now_s)
        self._dry_s = heard_until_s + num_frames * self._frame_s

    def next_message(self, now_s: float, max_frames: int) -> tuple[int, float]:
        """How many frames to wait for, and for how long (seconds)."""
        ahead_s = 0.0 if self._dry_s is None else max(0.0, self._dry_s - now_s)
        return min(max(1, int(ahead_s / 2 / self._frame_s)), max_frames), ahead_s / 2


def deliver(mail: Sequence[tuple[Mailbox, Event]]) -> None:
    """Put each event into its mailbox."""
    for mailbox, event in mail:
        mailbox.put(event)
