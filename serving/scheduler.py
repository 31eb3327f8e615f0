"""Which request sits in which slot. Plain Python: no JAX, no clock, no asyncio, no locks; whoever calls brings `now`.

Two calls make the rhythm: `plan(now)` says what the next step does, `apply(plan, outcomes)` takes in what came of it.
A plan may be applied after the next one was made (results are read one step late), so each entry names a *turn*: the
number of times its slot has been given a new prompt. An entry of an older turn is stale, and counts for nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from fishjax.errors import QueueFull

_FIRST_GUESS_S = 2.0  # of how long a request holds a slot, until one has finished
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Placement:
    """A request in a slot, in the slot's `turn`."""

    request_id: str
    slot: int
    turn: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: what to do, in this order. False when there is nothing to do."""

    now_s: float
    expired: tuple[str, ...] = ()  # requests whose deadline passed; they are gone from the scheduler
    free: tuple[int, ...] = ()  # slots to empty
    start: tuple[Placement, ...] = ()  # read the first prompt, put it into the slot
    resume: tuple[Placement, ...] = ()  # read the next segment's prompt after what the slot holds
    run: tuple[Placement, ...] = ()  # make a frame; includes those that start and resume

    def __bool__(self) -> bool:
        return bool(self.expired or self.free or self.start or self.resume or self.run)


class Outcome(Enum):
    """What a frame meant for its request; no outcome: it goes on."""

    NEXT_SEGMENT = "next segment"
    FINISHED = "finished"


@dataclass(slots=True)
class _Waiting:
    deadline_s: float | None
    ready: bool


@dataclass(slots=True)
class _Seated:
    request_id: str
    deadline_s: float | None
    started_s: float
    turn: int
    needs_prompt: bool = False


class Scheduler:
    """Slots in order of arrival; at most `max_queue` requests wait beyond those that a free slot can take."""

    def __init__(self, num_slots: int, max_queue: int, max_starts_per_step: int = 4):
        self._max_queue = max_queue
        self._max_starts = max_starts_per_step
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._seats: list[_Seated | None] = [None] * num_slots
        self._turns = [0] * num_slots
        self._left: set[int] = set()  # slots whose request is gone, to be emptied by the next plan
        self._hold_s = _FIRST_GUESS_S

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, those being prepared included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Slots with a request."""
        return sum(seat is not None for seat in self._seats)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Everybody here: those with a slot, then those who wait."""
        return (*self.running_ids, *self._waiting)

    @property
    def running_ids(self) -> tuple[str, ...]:
        """Requests with a slot."""
        return tuple(seat.request_id for seat in self._seats if seat)

    def add(self, request_id: str, *, deadline_s: float | None = None, ready: bool = True) -> None:
        """Take a place in the queue. With `ready` false it keeps its place, and gets no slot before `make_ready`.

        Raises QueueFull, with a guess of when a place will be free.
        """
        assert request_id not in self.request_ids, f"{request_id} is here already"
        free_slots = len(self._seats) - self.num_running
        if len(self._waiting) >= self._max_queue + free_slots:
            retry_s = self._hold_s / len(self._seats)
            raise QueueFull(
                f"all {len(self._seats)} slots speak and {len(self._waiting)} requests wait already: "
                f"try again in {retry_s:.1f} s",
                retry_after_s=retry_s,
            )
        self._waiting[request_id] = _Waiting(deadline_s, ready)

    def make_ready(self, request_id: str) -> bool:
        """Let a waiting request have a slot; False when it is gone."""
        if (waiting := self._waiting.get(request_id)) is None:
            return False
        waiting.ready = True
        return True

    def cancel(self, request_id: str) -> bool:
        """Forget a request, wherever it is; its slot is free in the next plan. False when it is not here."""
        if self._waiting.pop(request_id, None) is not None:
            return True
        for slot, seat in enumerate(self._seats):
            if seat and seat.request_id == request_id:
                self._leave(slot)
                return True
        return False

    def plan(self, now_s: float, held: Collection[str] = ()) -> Plan:
        """The next step. Requests in `held` keep their slot and make no frame."""
        expired = self._expire(now_s)
        free, self._left = tuple(sorted(self._left)), set()
        start = self._seat_waiting(now_s)
        resume, run = [], []
        for slot, seat in enumerate(self._seats):
            if seat is None:
                continue
            placement = Placement(seat.request_id, slot, seat.turn)
            if seat.needs_prompt:
                seat.needs_prompt = False
                resume.append(placement)
            if seat.request_id not in held:
                run.append(placement)
        return Plan(now_s, expired, free, start, tuple(resume), tuple(run))

    def is_current(self, placement: Placement) -> bool:
        """Whether the request still sits there and has had no new prompt since."""
        seat = self._seats[placement.slot]
        return seat is not None and (seat.request_id, seat.turn) == (placement.request_id, placement.turn)

    def apply(self, plan: Plan, outcomes: Mapping[str, Outcome], now_s: float) -> None:
        """Take in a step's outcomes, by request id. Stale entries of the plan are passed over."""
        for placement in plan.run:
            outcome = outcomes.get(placement.request_id)
            seat = self._seats[placement.slot]
            if outcome is None or seat is None or not self.is_current(placement):
                continue
            if outcome is Outcome.FINISHED:
                self._hold_s += _SMOOTHING * (now_s - seat.started_s - self._hold_s)
                self._leave(placement.slot)
            else:
                seat.turn = self._next_turn(placement.slot)
                seat.needs_prompt = True

    def _expire(self, now_s: float) -> tuple[str, ...]:
        def passed(entry: _Waiting | _Seated) -> bool:
            return entry.deadline_s is not None and entry.deadline_s <= now_s

        late = [request_id for request_id, waiting in self._waiting.items() if passed(waiting)]
        late += [seat.request_id for seat in self._seats if seat and passed(seat)]
        for request_id in late:
            self.cancel(request_id)
        return tuple(late)

    def _seat_waiting(self, now_s: float) -> tuple[Placement, ...]:
        free_slots = [slot for slot, seat in enumerate(self._seats) if seat is None]
        ready = [request_id for request_id, waiting in self._waiting.items() if waiting.ready]
        start = []
        for request_id, slot in list(zip(ready, free_slots, strict=False))[: self._max_starts]:
            turn = self._next_turn(slot)
            self._seats[slot] = _Seated(request_id, self._waiting.pop(request_id).deadline_s, now_s, turn)
            start.append(Placement(request_id, slot, turn))
        return tuple(start)

    def _next_turn(self, slot: int) -> int:
        self._turns[slot] += 1
        return self._turns[slot]

    def _leave(self, slot: int) -> None:
        self._seats[slot] = None
        self._left.add(slot)
