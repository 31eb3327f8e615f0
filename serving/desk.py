"""The requests that are here and what is asked of the loop: all that callers' threads and the loop's thread share.

    reserve, submit, extend, taken, cancel, run ─► [ requests, scheduler, texts, work ] ─► the loop

One lock, and none of the engine but what `chunks_of` does. The loop hands out what it takes from here.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from fishjax.errors import DeadlineExceeded, Draining, FishjaxError, NotReady

from .contract import Utterance
from .groups import Waiting
from .plan import Outcome, Placement, Plan, Priority
from .scheduler import Scheduler

MailboxT = TypeVar("MailboxT")
T = TypeVar("T")
Work = tuple[Future[Any], Callable[[], Any]]
Text = tuple[str, Sequence[str], bool]


class LoopState(Enum):
    """A loop's life, in this order; FAILED can follow any but STOPPED."""

    WARMING = "warming up"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(slots=True)
class Request(Generic[MailboxT]):
    """A submitted request. All but `frames_taken` is the loop's."""

    utterance: Utterance
    mailbox: MailboxT
    waiting: Waiting[MailboxT]
    frames_taken: int = 0
    prefix: Any = None  # its next prompt, until that is in its slot
    refusal: FishjaxError | None = None  # why there is none
    saved: Any = None  # what its slot held, while it waits for another
    num_saves: int = 0

    @property
    def num_heard(self) -> int:
        """Frames whose sound is made."""
        return self.utterance.num_frames - len(self.waiting.frames)


class Desk(Generic[MailboxT]):
    """Every method may be called from any thread; behind `drain` they are the loop's. `on_state` gets each state."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        on_state: Callable[[LoopState], None],
        max_unread_frames: int,
        clock: Callable[[], float],
    ):
        self.max_unread_frames = max_unread_frames
        self._on_state = on_state
        self._clock = clock
        self._changed = threading.Condition()  # guards everything below
        self._scheduler = scheduler
        self._state = LoopState.WARMING
        self._requests: dict[str, Request[MailboxT]] = {}
        self._work: deque[Work] = deque()
        self._texts: deque[Text] = deque()

    @property
    def state(self) -> LoopState:
        """Where the loop is in its life."""
        return self._state

    def reserve(
        self, request_id: str, priority: Priority = Priority.STANDARD, *, deadline_s: float | None = None
    ) -> None:
        """Take a place in the queue of a class for a request that is still being prepared.

        Raises QueueFull, Draining, or NotReady before the end of the warm-up and after a failure.
        """
        with self._changed:
            self._refuse_unless_serving()
            self._scheduler.add(request_id, priority, deadline_s=deadline_s, ready=False)

    def submit(self, request_id: str, utterance: Utterance, mailbox: MailboxT) -> None:
        """Let a reserved request, with its first prompt at hand, have a slot; its events go to `mailbox`.

        Raises NotReady, Draining, DeadlineExceeded.
        """
        with self._changed:
            if self._state is not LoopState.DRAINING:
                self._refuse_unless_serving()
            if not self._scheduler.make_ready(request_id):
                raise DeadlineExceeded("the deadline passed before the request was ready for a slot")
            self._requests[request_id] = Request(utterance, mailbox, Waiting(request_id, mailbox))
            self._changed.notify()

    def extend(self, request_id: str, segments: Sequence[str], *, last: bool) -> None:
        """More text for a submitted request whose text arrives in pieces; with `last` no more follows."""
        with self._changed:
            self._texts.append((request_id, segments, last))
            self._changed.notify()

    def taken(self, request_id: str, num_frames: int) -> None:
        """The reader has taken so many frames more."""
        with self._changed:
            if (request := self._requests.get(request_id)) is not None:
                request.frames_taken += num_frames
                self._changed.notify()

    def cancel(self, request_id: str) -> Request[MailboxT] | None:
        """Forget a request; its slot is free for the next step. Returns it, if it was here and submitted."""
        with self._changed:
            request = self._requests.pop(request_id, None)
            if self._scheduler.cancel(request_id):
                self._changed.notify()
            return request

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Do `work`, which needs the engine, in the loop's thread: at most one piece between two steps."""
        future: Future[T] = Future()
        with self._changed:
            if self._state is not LoopState.DRAINING:
                self._refuse_unless_serving()
            self._work.append((future, work))
            self._changed.notify()
        return future

    def load(self) -> tuple[int, int]:
        """How many requests have a slot, and how many wait."""
        with self._changed:
            return self._scheduler.num_running, self._scheduler.num_waiting

    def drain(self) -> None:
        """Take no new request; those that are here go on."""
        self._turn(LoopState.DRAINING, LoopState.WARMING, LoopState.SERVING)

    def open(self) -> None:
        """The engine is warm: take requests, unless told otherwise meanwhile."""
        self._turn(LoopState.SERVING, LoopState.WARMING)

    def stop(self) -> None:
        """No more plans. Says nothing to `on_state`: whoever stops a loop knows."""
        with self._changed:
            if self._state is not LoopState.FAILED:
                self._state = LoopState.STOPPED
            self._changed.notify()

    def fail(self) -> set[str]:
        """Take no more requests, ever; returns those that had a slot."""
        with self._changed:
            self._state = LoopState.FAILED
            running = set(self._scheduler.running_ids)
        self._on_state(LoopState.FAILED)
        return running

    def next_plan(self, chunks_of: Callable[[Request[MailboxT]], int], *, wait: bool) -> Plan | None:
        """The next plan; with `wait`, not before it, a text or a piece of work has something to do. None: the end.

        `chunks_of` is asked how many chunks a request's next prompt has.
        """
        with self._changed:
            while self._state is not LoopState.STOPPED:
                plan = self._scheduler.plan(
                    self._clock(), self._held(), lambda request_id: chunks_of(self._requests[request_id])
                )
                if plan or self._work or self._texts or not wait:
                    return plan
                self._changed.wait()
        return None

    def current(self, placements: Sequence[Placement]) -> list[tuple[Placement, Request[MailboxT]]]:
        """Placements with their requests, but for those that are over or have had a new prompt since."""
        with self._changed:
            return [(p, self._requests[p.request_id]) for p in placements if self._scheduler.is_current(p)]

    def get(self, request_id: str) -> Request[MailboxT] | None:
        """A submitted request, if it is still here."""
        with self._changed:
            return self._requests.get(request_id)

    def apply(self, plan: Plan, outcomes: Mapping[str, Outcome], now_s: float) -> tuple[Priority, ...]:
        """Take in what came of a step; returns the class of each listener who had run dry before it."""
        with self._changed:
            underruns = self._scheduler.apply(plan, outcomes, now_s)
            for request_id, outcome in outcomes.items():
                if outcome.request_over:
                    self._requests.pop(request_id, None)
            return underruns

    def has_little(self, request_id: str, now_s: float) -> bool:
        """Whether a request is here whose listener is about to run dry."""
        with self._changed:
            return request_id in self._requests and self._scheduler.has_little(request_id, now_s)

    def wake(self, request_id: str) -> None:
        """A request that waited for text has something to speak again."""
        with self._changed:
            if request_id in self._requests:
                self._scheduler.wake(request_id)

    def take_work(self) -> Work | None:
        """The next piece of work."""
        with self._changed:
            return self._work.popleft() if self._work else None

    def take_texts(self) -> Sequence[Text]:
        """All texts that have arrived: whose, what, and whether it is the last."""
        with self._changed:
            texts, self._texts = self._texts, deque()
            return texts

    def clear(self) -> tuple[dict[str, Request[MailboxT]], Sequence[Work]]:
        """Forget everybody; returns the submitted requests, and the work that is not done."""
        with self._changed:
            requests, self._requests = self._requests, {}
            work, self._work = self._work, deque()
            self._texts.clear()
            for request_id in self._scheduler.request_ids:
                self._scheduler.cancel(request_id)
            return requests, work

    def _turn(self, state: LoopState, *before: LoopState) -> None:
        with self._changed:
            if self._state not in before:
                return
            self._state = state
        self._on_state(state)

    def _held(self) -> set[str]:
        """Requests whose reader has let too much sound pile up: their slot pauses until it reads on."""
        return {
            request_id
            for request_id, request in self._requests.items()
            if request.num_heard - request.frames_taken >= self.max_unread_frames
        }

    def _refuse_unless_serving(self) -> None:
        match self._state:
            case LoopState.WARMING:
                raise NotReady("the server is still warming up: try again once its health is SERVING")
            case LoopState.FAILED:
                raise NotReady("the engine of this server has failed: try another server")
            case LoopState.DRAINING | LoopState.STOPPED:
                raise Draining("the server is shutting down and takes no new requests: try another server")
