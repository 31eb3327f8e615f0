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
    start: tuple[Placement, ...] = ()  # read the first prompt, put it into the slot
    restore: tuple[Placement, ...] = ()  # put what was saved into the slot
    resume: tuple[Placement, ...] = ()  # read the next segment's prompt after what the slot holds
    run: tuple[Placement, ...] = ()  # make a frame; includes those that start, and those that resume

    @property
    def num_prompts(self) -> int:
        """Prompts that are read before the frames."""
        return len(self.start) + len(self.resume)

    def __bool__(self) -> bool:
        return bool(self.expired or self.save or self.free or self.start or self.restore or self.resume or self.run)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a frame was for its request: sound or not, and the last of its segment or of the request or neither.

    `waits`: the next segment's text is not here yet.
    """

    sound: bool = True
    segment_over: bool = False
    waits: bool = False
    request_over: bool = False
