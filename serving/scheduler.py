"""Which request sits in which slot. Plain Python: no JAX, no clock, no asyncio, no locks; whoever calls brings `now`.

    add -> queue of its class -> slot: prompt, frames, prompt, frames ... -> gone
                  ^                |
                  +-- save (BATCH) +

Two calls make the rhythm: `plan(now)` says what the next step does, `apply(plan, outcomes)` takes in what came of it.
A plan may be applied after the next one was made (results are read one step late), so each entry names a *turn*: a
number that a request gets with each prompt that is read for it. An entry of an older turn is stale, and counts for
nothing. A request that moves to another slot keeps its turn: its frames are its own, wherever they were made.

The policy, whole:

1. A free slot goes to REALTIME, else STANDARD, else BATCH, each in order of arrival; but while STANDARD waits, at most
   three REALTIME requests go before it.
2. REALTIME and STANDARD that find no free slot take one from BATCH, in the very next step: from the request with the
   most sound ahead of its listener. It is saved whole, waits at the head of its queue, and goes on to the same codes.
   No more BATCH requests are begun and not over than there are slots, which limits what is saved.
3. Each class has a queue with an end; whoever comes to a full one is told when to come back.
4. A passed deadline ends a request, waiting or speaking.
5. Prompts are read in chunks, between the steps of those who speak. A step reads one chunk, or as many as the listener
   with the least sound ahead can wait for, by what steps and chunks took so far; of BATCH none while somebody has
   little ahead. Chunks go first to whoever is about to run dry, soonest first; the others take turns, REALTIME as if
   it had waited for some chunks longer; BATCH comes last. Every listener is assumed to play, without a pause, from
   the first sound on.
6. A request whose text has not all arrived may have nothing to speak: it keeps its slot and is *idle* until `wake`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from fishjax.errors import QueueFull

from .plan import Outcome, Placement, Plan, Priority

_FIRST_GUESS_S = 2.0  # of how long a request holds a slot, until one has finished
_SMOOTHING = 0.2
_MAX_OVERTAKES = 3  # REALTIME requests that go before a waiting STANDARD one
_LITTLE_S = 0.15  # of sound: about three frames
_HEAD_START = 8  # chunks of others that REALTIME need not wait for


def _one_chunk(request_id: str) -> int:
    """What a prompt takes at least."""
    return 1


@dataclass(slots=True)
class _Request:
    priority: Priority
    deadline_s: float | None
    ready: bool
    slot: int | None = None  # None: it waits
    turn: int = 0
    started_s: float | None = None  # when it first got a slot
    needs_prompt: bool = True
    chunks_left: int = 0  # of its prompt, to be read
    waits_since: int = 0  # chunks read for all when it had its latest one, or when its prompt came
    idle: bool = False
    was_saved: bool = False
    dry_s: float = math.inf  # when a listener runs out of the sound made so far; inf: has not begun to listen

    @property
    def has_prompt(self) -> bool:
        """Whether its slot can make a frame."""
        return not self.needs_prompt and not self.chunks_left and not self.idle


@dataclass(slots=True)
class _StepTime:
    """How long a step takes, and how much longer with each chunk that is read before it. Learns from both kinds."""

    step_s: float = 0.01
    chunk_s: float = 0.03

    def learn(self, took_s: float, num_chunks: int) -> None:
        if num_chunks:
            self.chunk_s += _SMOOTHING * (max(0.0, took_s - self.step_s) / num_chunks - self.chunk_s)
        else:
            self.step_s += _SMOOTHING * (took_s - self.step_s)

    def of(self, num_chunks: int) -> float:
        return self.step_s + num_chunks * self.chunk_s


class Scheduler:
    """`num_slots` slots and a queue a class.

    `max_queue` (of REALTIME and of STANDARD) and `max_batch_queue` requests may wait beyond those that a slot can be
    had for. `frame_s`: seconds of sound in a frame. At most `max_chunks_per_step` chunks of prompts are read between
    two frames, and as many requests get a slot.
    """

    def __init__(
        self, num_slots: int, max_queue: int, *, frame_s: float, max_batch_queue: int = 0, max_chunks_per_step: int = 4
    ):
        self._max_queue = {
            Priority.REALTIME: max_queue,
            Priority.STANDARD: max_queue,
            Priority.BATCH: max_batch_queue,
        }
        self._frame_s = frame_s
        self._max_chunks = max_chunks_per_step
        self._requests: dict[str, _Request] = {}
        self._queues: dict[Priority, OrderedDict[str, None]] = {priority: OrderedDict() for priority in Priority}
        self._slots: list[str | None] = [None] * num_slots
        self._left: set[int] = set()  # slots whose request is gone, to be emptied by the next plan
        self._turns = count(1)
        self._overtakes = 0
        self._chunks_read = 0
        self._hold_s = _FIRST_GUESS_S
        self._step_time = _StepTime()
        self._in_flight: Plan | None = None  # the latest plan, until it is applied
        self._applied_s: float | None = None  # when the step before was, if one step follows another

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, those being prepared and those saved included."""
        return sum(map(len, self._queues.values()))

    @property
    def num_running(self) -> int:
        """Slots with a request."""
        return len(self.running_ids)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Everybody here."""
        return tuple(self._requests)

    @property
    def running_ids(self) -> tuple[str, ...]:
        """Requests with a slot."""
        return tuple(request_id for request_id in self._slots if request_id is not None)

    def add(
        self,
        request_id: str,
        priority: Priority = Priority.STANDARD,
        *,
        deadline_s: float | None = None,
        ready: bool = True,
    ) -> None:
        """Take a place in the queue. With `ready` false it keeps its place, and gets no slot before `make_ready`.

        Raises QueueFull, with a guess of when a place will be free.
        """
        assert request_id not in self._requests, f"{request_id} is here already"
        takeable = sum(holder is None or self._gives_way(holder, priority) for holder in self._slots)
        ahead = sum(len(queue) for other, queue in self._queues.items() if other < priority)
        waiting = len(self._queues[priority])
        if waiting >= self._max_queue[priority] + max(0, takeable - ahead):
            retry_s = self._hold_s / len(self._slots)
            raise QueueFull(
                f"no slot is free and {waiting} {priority.name} requests wait already: try again in {retry_s:.1f} s",
                retry_after_s=retry_s,
            )
        self._requests[request_id] = _Request(priority, deadline_s, ready)
        self._queues[priority][request_id] = None

    def make_ready(self, request_id: str) -> bool:
        """Let a waiting request have a slot; False when it is gone."""
        if (request := self._requests.get(request_id)) is None or request.slot is not None:
            return False
        request.ready = True
        return True

    def cancel(self, request_id: str) -> bool:
        """Forget a request, wherever it is; its slot is free in the next plan. False when it is not here."""
        if (request := self._requests.pop(request_id, None)) is None:
            return False
        if request.slot is None:
            del self._queues[request.priority][request_id]
        else:
            self._slots[request.slot] = None
            self._left.add(request.slot)
        return True

    def wake(self, request_id: str) -> None:
        """An idle request has something to speak again."""
        request = self._requests[request_id]
        request.idle, request.needs_prompt, request.dry_s = False, True, math.inf

    def plan(self, now_s: float, held: Collection[str] = (), chunks_of: Callable[[str], int] = _one_chunk) -> Plan:
        """The next step. Requests in `held` keep their slot and make no frame; saved ones among them keep waiting.

        `chunks_of` is asked once for each request that starts or resumes: how many chunks its next prompt has.
        """
        expired = tuple(name for name, request in self._requests.items() if _passed(request.deadline_s, now_s))
        for request_id in expired:
            self.cancel(request_id)
        free, self._left = tuple(sorted(self._left)), set()
        ahead_s = self._least_ahead_s(now_s, held)
        budget = next((n for n in range(self._max_chunks, 1, -1) if self._step_time.of(n) <= ahead_s), 1)
        batch = ahead_s >= _LITTLE_S
        save, start, restore = self._give_slots(now_s, budget, held, batch=batch)
        seated = {*start, *restore}
        resume = [name for name in self.running_ids if self._requests[name].needs_prompt and name not in seated]
        for request_id in (*start, *resume):
            request = self._requests[request_id]
            request.needs_prompt = False
            request.chunks_left, request.waits_since = chunks_of(request_id), self._chunks_read
        read = self._next_to_read(now_s, budget, batch=batch)
        run = [name for name in self.running_ids if name not in held and self._requests[name].has_prompt]
        placed = self._place
        plan = Plan(
            now_s, expired, save, free, placed(start), placed(restore), placed(resume), placed(read), placed(run)
        )
        self._in_flight = plan if run else None
        if not run:
            self._applied_s = None
        return plan

    def has_little(self, request_id: str, now_s: float) -> bool:
        """Whether a request's listener is about to run dry."""
        return self._requests[request_id].dry_s - now_s < _LITTLE_S

    def is_current(self, placement: Placement) -> bool:
        """Whether the request is still here and has had no new prompt since."""
        request = self._requests.get(placement.request_id)
        return request is not None and request.turn == placement.turn

    def apply(self, plan: Plan, outcomes: Mapping[str, Outcome], now_s: float) -> tuple[Priority, ...]:
        """Take in a step's outcomes, by request id. Stale entries of the plan are passed over.

        Returns the class of each request whose listener had run dry before this step's sound.
        """
        if plan is self._in_flight:
            self._in_flight = None
        if self._applied_s is not None and now_s > self._applied_s:
            self._step_time.learn(now_s - self._applied_s, plan.num_chunks)
        self._applied_s = now_s
        underruns = []
        for placement in plan.run:
            outcome = outcomes.get(placement.request_id)
            if outcome is None or not self.is_current(placement):
                continue
            request = self._requests[placement.request_id]
            if outcome.num_frames:
                begun = math.isfinite(request.dry_s)
                if begun and request.dry_s < now_s:
                    underruns.append(request.priority)
                request.dry_s = (max(request.dry_s, now_s) if begun else now_s) + outcome.num_frames * self._frame_s
            if outcome.request_over:
                if request.started_s is not None and not request.was_saved:
                    self._hold_s += _SMOOTHING * (now_s - request.started_s - self._hold_s)
                self.cancel(placement.request_id)
            elif outcome.segment_over:
                request.turn = next(self._turns)
                request.idle, request.needs_prompt = outcome.waits, not outcome.waits
        return tuple(underruns)

    def _least_ahead_s(self, now_s: float, held: Collection[str]) -> float:
        """Seconds of sound that the listener with the least has ahead when the step in flight is done.

        BATCH does not count, nor whoever lacks text, nor a reader that has let sound pile up.
        """
        running = ((name, self._requests[name]) for name in self.running_ids if name not in held)
        dry_s = (r.dry_s for _, r in running if r.priority is not Priority.BATCH and not r.idle)
        least_s = min(dry_s, default=math.inf) - now_s
        if self._in_flight is None:
            return least_s
        return least_s + self._frame_s - self._step_time.of(self._in_flight.num_chunks)

    def _next_to_read(self, now_s: float, limit: int, *, batch: bool) -> list[str]:
        """Whose chunks are read now, in order; a request may have several."""
        requests = self._requests
        names = [name for name in self.running_ids if requests[name].chunks_left]
        names = [name for name in names if batch or requests[name].priority is not Priority.BATCH]

        def rank(name: str) -> tuple[bool, float, int]:
            request = requests[name]
            hurry_s = request.dry_s if self.has_little(name, now_s) else math.inf
            head_start = _HEAD_START if request.priority is Priority.REALTIME else 0
            return request.priority is Priority.BATCH, hurry_s, request.waits_since - head_start

        read = []
        while names and len(read) < limit:
            request = requests[name := min(names, key=rank)]
            self._chunks_read += 1
            # One more: a newcomer goes before whoever had the latest chunk.
            request.chunks_left, request.waits_since = request.chunks_left - 1, self._chunks_read + 1
            read.append(name)
            if not request.chunks_left:
                names.remove(name)
        return read

    def _give_slots(
        self, now_s: float, limit: int, held: Collection[str], *, batch: bool
    ) -> tuple[tuple[Placement, ...], list[str], list[str]]:
        """Seat up to `limit` requests: what is saved for them, who starts, who is restored."""
        save: list[Placement] = []
        start: list[str] = []
        restore: list[str] = []
        while len(start) + len(restore) < limit and (name := self._next_in_line(held, batch=batch)) is not None:
            request = self._requests[name]
            slot = next((slot for slot, holder in enumerate(self._slots) if holder is None), None)
            if slot is None:
                if (victim := self._next_to_save(request.priority)) is None:
                    break
                save.extend(self._place([victim]))
                slot = self._save(victim)
            del self._queues[request.priority][name]
            self._slots[slot], request.slot = name, slot
            self._count_overtaking(request.priority)
            if request.started_s is None:
                request.started_s, request.turn = now_s, next(self._turns)
                start.append(name)
            else:
                restore.append(name)
        return tuple(save), start, restore

    def _next_in_line(self, held: Collection[str], *, batch: bool) -> str | None:
        def ready(priority: Priority) -> Iterator[str]:
            return (name for name in self._queues[priority] if self._may_sit(name) and name not in held)

        realtime, standard = next(ready(Priority.REALTIME), None), next(ready(Priority.STANDARD), None)
        if standard is not None and (realtime is None or self._overtakes >= _MAX_OVERTAKES):
            return standard
        if realtime is not None:
            return realtime
        if not batch:
            return None
        begun = sum(r.priority is Priority.BATCH and r.started_s is not None for r in self._requests.values())
        may_begin = begun < len(self._slots)  # else a reader that holds a saved one up would let these pile up
        names = (name for name in ready(Priority.BATCH) if may_begin or self._requests[name].started_s is not None)
        return next(names, None)

    def _may_sit(self, request_id: str) -> bool:
        return self._requests[request_id].ready and not self._requests[request_id].idle

    def _count_overtaking(self, seated: Priority) -> None:
        if seated is Priority.STANDARD or not self._queues[Priority.STANDARD]:
            self._overtakes = 0
        elif seated is Priority.REALTIME:
            self._overtakes += 1

    def _next_to_save(self, priority: Priority) -> str | None:
        """Who in a slot gives way to `priority`: an idle request, else one whose listener can wait longest."""
        requests = self._requests
        names = [name for name in self.running_ids if self._gives_way(name, priority)]
        return max(names, key=lambda name: (requests[name].idle, requests[name].dry_s), default=None)

    def _gives_way(self, request_id: str, priority: Priority) -> bool:
        return self._requests[request_id].priority is Priority.BATCH and priority is not Priority.BATCH

    def _save(self, request_id: str) -> int:
        request = self._requests[request_id]
        slot, request.slot = request.slot, None
        assert slot is not None
        request.was_saved = True
        queue = self._queues[request.priority]
        queue[request_id] = None
        queue.move_to_end(request_id, last=False)
        return slot

    def _place(self, request_ids: Collection[str]) -> tuple[Placement, ...]:
        placements = []
        for request_id in request_ids:
            request = self._requests[request_id]
            assert request.slot is not None
            placements.append(Placement(request_id, request.slot, request.turn))
        return tuple(placements)


def _passed(deadline_s: float | None, now_s: float) -> bool:
    return deadline_s is not None and deadline_s <= now_s
