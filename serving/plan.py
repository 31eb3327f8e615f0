"""What the scheduler and the loop tell each other: classes, a step's plan, and what came of it. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Priority(IntEnum):
    """How urgent a request is; less is more."""

    REALTIME = 1
    STANDARD = 2
    BATCH = 3


@dataclass(frozen=True, slots=True)
class Placement:
    """A request in a slot, in its `turn`."""

    request_id: str
    slot: int
    turn: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: what to do, in this order. False when there is nothing to do."""

    now_s: float
    expired: tuple[str, ...] = ()  # requests whose deadline passed; they are gone from the scheduler
    save: tuple[Placement, ...] = ()  # take what the slot holds: the request will go on from it later
    free: tuple[int, ...] = ()  # slots to empty
    start: tuple[Placement, ...] = ()  # put the first prompt into the slot
    restore: tuple[Placement, ...] = ()  # put what was saved into the slot
    resume: tuple[Placement, ...] = ()  # put the next segment's prompt behind what the slot holds
    read: tuple[Placement, ...] = ()  # read a chunk of the slot's prompt; an entry a chunk
    run: tuple[Placement, ...] = ()  # make a frame; includes those whose last chunk is read before

    @property
    def num_chunks(self) -> int:
        """Chunks of prompts that are read before the frames."""
        return len(self.read)

    def __bool__(self) -> bool:
        return any((self.expired, self.save, self.free, self.start, self.restore, self.resume, self.read, self.run))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step was for a request: frames whose sound came with it; the end of its segment or of itself or neither.

    `waits`: the next segment's text is not here yet.
    """

    num_frames: int = 1
    segment_over: bool = False
    waits: bool = False
    request_over: bool = False
