"""Sound of several frames in one call, where the engine groups them: what waits for it, and when it is asked for.

    frame without sound -> waits -> group asked for -> (next step is dispatched) -> sound, handed out

A group is asked for once it is whole and those who speak beside it have a whole one too, so that one call serves all;
at once when a listener is about to run dry, or when one more frame would have no room. Which frames are made together
depends on their numbers alone, so the samples are the same whenever that is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from .contract import Engine, PendingSound
from .request import Event, Frame

MailboxT = TypeVar("MailboxT")
Mail = list[tuple[MailboxT, Event]]


@dataclass(slots=True)
class Waiting(Generic[MailboxT]):
    """A request's frames that have no sound yet, by number, oldest first."""

    request_id: str
    mailbox: MailboxT
    frames: deque[int] = field(default_factory=deque)


class FrameGroups(Generic[MailboxT]):
    """Asks the engine for sound. In the loop's thread."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._asked: list[tuple[PendingSound, int, Waiting[MailboxT], list[int]]] = []

    def ask(self, speaking: Sequence[tuple[int, Waiting[MailboxT]]], about_to_run_dry: Callable[[str], bool]) -> None:
        """Ask for what is due of requests, each with its slot."""
        group = self._engine.sound_group
        some = [(slot, waiting) for slot, waiting in speaking if waiting.frames]
        whole = [(slot, waiting) for slot, waiting in some if len(waiting.frames) >= group]
        due = len(whole) == len(some) or any(
            len(waiting.frames) >= 2 * group - 1 or about_to_run_dry(waiting.request_id) for _, waiting in whole
        )
        if not whole or not due:
            return
        sound = self._engine.sound([slot for slot, _ in whole])
        for slot, waiting in whole:
            self._asked.append((sound, slot, waiting, [waiting.frames.popleft() for _ in range(group)]))

    def arrived(self) -> tuple[Mail[MailboxT], Counter[str]]:
        """Frames that were asked for, and how many they are for each request; blocks until their sound is there."""
        asked, self._asked = self._asked, []
        mail: Mail[MailboxT] = []
        for sound, slot, waiting, frames in asked:
            mail += _mail(sound, slot, waiting, frames)
        return mail, Counter({waiting.request_id: len(frames) for _, _, waiting, frames in asked})

    def rest(self, slot: int, waiting: Waiting[MailboxT]) -> Mail[MailboxT]:
        """All frames that wait, at the end of a segment; blocks until their sound is there."""
        mail: Mail[MailboxT] = []
        while waiting.frames:
            number = min(self._engine.sound_group, len(waiting.frames))
            frames = [waiting.frames.popleft() for _ in range(number)]
            mail += _mail(self._engine.sound([slot]), slot, waiting, frames)
        return mail


def _mail(sound: PendingSound, slot: int, waiting: Waiting[MailboxT], frames: list[int]) -> Mail[MailboxT]:
    # Copies: a row would keep the sound of all slots alive while it waits for its reader.
    rows = zip(frames, sound.result()[slot], strict=False)
    return [(waiting.mailbox, Frame(index, audio_s.copy())) for index, audio_s in rows]
