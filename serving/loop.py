"""The one thread that drives the engine: plan, dispatch a step, hand out the step before.

    plan -> save, free, insert -> read chunks -> step (dispatched) -> read the step before -> frames to their requests

A step's results are read after the next one is dispatched, so that the device never waits for Python; what the next
one then made of a request that was over is dropped as stale. A fault of the device ends the loop: everybody is told,
the state turns FAILED, and only a new process helps. Knows nothing of gRPC, asyncio or sample formats.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

from fishjax.errors import DeadlineExceeded, Draining, EngineFailed, FishjaxError, NotReady

from .contract import Engine, PendingStep, Utterance
from .groups import FrameGroups, Waiting
from .metrics import Metrics
from .plan import Outcome, Placement, Plan, Priority
from .request import Event, Failed, Finished, Frame, Started
from .scheduler import Scheduler

logger = logging.getLogger(__name__)
MailboxT = TypeVar("MailboxT")
T = TypeVar("T")


class LoopState(Enum):
    """A loop's life, in this order; FAILED can follow any but STOPPED."""

    WARMING = "warming up"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"
    STOPPED = "stopped"


class _StoppedEarly(Exception):
    """`stop` came before the end of the warm-up."""


@dataclass(slots=True)
class _Request(Generic[MailboxT]):
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


class SynthesisLoop(Generic[MailboxT]):
    """Owns the engine. All methods but `start` may be called from any thread.

    `deliver` gets, in the loop's thread, each step's events with the mailboxes of `submit`; `on_state` each new state.
    """

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        *,
        deliver: Callable[[Sequence[tuple[MailboxT, Event]]], None],
        on_state: Callable[[LoopState], None],
        max_unread_frames: int,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._engine = engine
        self._deliver = deliver
        self._on_state = on_state
        self.max_unread_frames = max_unread_frames
        self._metrics = metrics
        self._groups = FrameGroups[MailboxT](engine)
        self._settled_s: float | None = None  # when the step before was read, if one was
        self._clock = clock
        self._changed = threading.Condition()  # guards everything below
        self._scheduler = scheduler
        self._state = LoopState.WARMING
        self._requests: dict[str, _Request[MailboxT]] = {}
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._texts: deque[tuple[str, Sequence[str], bool]] = deque()
        self._thread = threading.Thread(target=self._main, name="synthesis-loop", daemon=True)

    def start(self) -> None:
        """Start the thread: warm up, then serve."""
        self._thread.start()

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
            if self._state not in (LoopState.SERVING, LoopState.DRAINING):
                self._refuse_unless_serving()
            if not self._scheduler.make_ready(request_id):
                raise DeadlineExceeded("the deadline passed before the request was ready for a slot")
            self._requests[request_id] = _Request(utterance, mailbox, Waiting(request_id, mailbox))
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

    def cancel(self, request_id: str) -> None:
        """Forget a request, if it is here; its slot is free for the next step."""
        with self._changed:
            self._requests.pop(request_id, None)
            if self._scheduler.cancel(request_id):
                self._changed.notify()

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Do `work`, which needs the engine, in the loop's thread: at most one piece between two steps."""
        future: Future[T] = Future()
        with self._changed:
            if self._state not in (LoopState.SERVING, LoopState.DRAINING):
                self._refuse_unless_serving()
            self._work.append((future, work))
            self._changed.notify()
        return future

    def load(self) -> tuple[int, int]:
        """How many requests have a slot, and how many wait."""
        with self._changed:
            return self._scheduler.num_running, self._scheduler.num_waiting

    @property
    def state(self) -> LoopState:
        """Where the loop is in its life."""
        return self._state

    def drain(self) -> None:
        """Take no new request; those that are here go on."""
        with self._changed:
            if self._state not in (LoopState.WARMING, LoopState.SERVING):
                return
            self._state = LoopState.DRAINING
        self._on_state(LoopState.DRAINING)

    def stop(self) -> None:
        """End the thread after the step it is in; requests that are still here get Draining."""
        with self._changed:
            if self._state is not LoopState.FAILED:
                self._state = LoopState.STOPPED
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()
        self._dismiss(lambda _: Draining("the server has stopped"))

    def _main(self) -> None:
        try:
            self._engine.warmup(self._warming)
            with self._changed:
                warm = self._state is LoopState.WARMING
                if warm:
                    self._state = LoopState.SERVING
            if warm:
                self._on_state(LoopState.SERVING)
            self._serve()
        except _StoppedEarly:
            logger.info("the warm-up was given up")
        except Exception as error:
            self._fail(error)

    def _warming(self, what: str) -> None:
        if self._state is LoopState.STOPPED:
            raise _StoppedEarly
        logger.info("warming up: %s", what)

    def _serve(self) -> None:
        previous: tuple[Plan, PendingStep] | None = None
        while (plan := self._next_plan(wait=previous is None)) is not None:
            if plan.save and previous is not None:
                # Whoever is saved then has no frame of which it is not known whether a segment ended with it.
                self._settle(*previous)
                previous = None
            pending = self._dispatch(plan)
            if previous is not None:
                self._settle(*previous)
            previous = (plan, pending) if pending is not None else None
            if previous is None:
                self._settled_s = None
                self._hand_out(self._groups.arrived()[0])
            # Last, while the device makes the step: nobody's finished frame waits for it.
            self._read_texts()
            self._do_one_piece_of_work()

    def _next_plan(self, *, wait: bool) -> Plan | None:
        """The next plan; with `wait`, not before it, a text or a piece of work has something to do. None: the end."""
        with self._changed:
            while self._state is not LoopState.STOPPED:
                plan = self._scheduler.plan(self._clock(), self._held(), self._prepare)
                if plan or self._work or self._texts or not wait:
                    return plan
                self._changed.wait()
        return None

    def _do_one_piece_of_work(self) -> None:
        with self._changed:
            if not self._work:
                return
            future, work = self._work.popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except Exception as error:
            future.set_exception(error)  # it belongs to whoever waits for the result
        else:
            future.set_result(result)

    def _read_texts(self) -> None:
        with self._changed:
            texts, self._texts = self._texts, deque()
        for request_id, segments, last in texts:
            with self._changed:
                request = self._requests.get(request_id)
            if request is not None:
                self._extend(request_id, request, segments, last)

    def _extend(self, request_id: str, request: _Request[MailboxT], segments: Sequence[str], last: bool) -> None:
        utterance = request.utterance
        waited = utterance.waits
        try:
            utterance.extend(segments, last=last)
        except Exception as error:
            self._end_by_its_own_fault(request_id, error)
        if not waited or utterance.waits:
            return
        with self._changed:
            if request_id not in self._requests:
                return
            if utterance.finish_reason is None:
                self._scheduler.wake(request_id)
                return
            self._scheduler.cancel(request_id)
            del self._requests[request_id]
        self._deliver([(request.mailbox, _finished(request))])

    def _end_by_its_own_fault(self, request_id: str, error: Exception) -> None:
        """An error of a request's text logic ends that request: the device and everybody else are well."""
        if not isinstance(error, FishjaxError):
            logger.error("request %s: its next segment could not be prepared", request_id, exc_info=error)
            error = EngineFailed("the next part of the text could not be prepared")
        self._end(request_id, error)

    def _held(self) -> set[str]:
        """Requests whose reader has let too much sound pile up: their slot pauses until it reads on."""
        return {
            request_id
            for request_id, request in self._requests.items()
            if request.num_heard - request.frames_taken >= self.max_unread_frames
        }

    def _dispatch(self, plan: Plan) -> PendingStep | None:
        for request_id in plan.expired:
            self._end(request_id, DeadlineExceeded("the deadline passed before the speech was done"))
        for placement in plan.save:
            with self._changed:
                request = self._requests.get(placement.request_id)
            if request is not None:
                request.saved = self._engine.extract(placement.slot)
                request.num_saves += 1
                self._metrics.preemptions.inc()
        for slot in plan.free:
            self._engine.free(slot)
        for placement, request in self._current(plan.start):
            self._enter(placement, request)
        for placement, request in self._current(plan.restore):
            self._engine.insert(request.saved, placement.slot)
            request.saved = None
        for placement, request in self._current(plan.resume):
            self._enter(placement, request)
        started = [(request.mailbox, Started(plan.now_s)) for _, request in self._current(plan.start)]
        if started:
            self._deliver(started)
        for placement, _ in self._current(plan.read):
            self._engine.read(placement.slot)
        run = [placement.slot for placement, _ in self._current(plan.run)]
        return self._engine.step(run) if run else None

    def _prepare(self, request_id: str) -> int:
        """Cut a request's next prompt into chunks; how many they are. Nothing is read yet."""
        request = self._requests[request_id]
        prompt = request.utterance.next_prompt()
        assert prompt is not None, "an utterance that is not over has a next prompt"
        try:
            request.prefix = self._engine.prefill(
                prompt.columns_CT,
                request.utterance.sampling,
                prefix_length=prompt.prefix_length,
                voice_length=prompt.voice_length,
                first_frame=prompt.first_frame,
            )
        except EngineFailed:
            raise
        except FishjaxError as error:
            request.refusal = error
            return 1
        return request.prefix.num_chunks

    def _enter(self, placement: Placement, request: _Request[MailboxT]) -> None:
        """Put a request's next prompt into its slot. A prompt that the engine refuses ends this request only."""
        if request.refusal is not None:
            self._end(placement.request_id, request.refusal)
            return
        self._engine.insert(request.prefix, placement.slot)
        request.prefix = None

    def _settle(self, plan: Plan, pending: PendingStep) -> None:
        """Wait for a step's frames and give each to its request."""
        result = pending.result()
        is_end, has_sound = result.is_end_B.tolist(), result.has_sound_B.tolist()
        deliveries, num_frames = self._groups.arrived()
        outcomes: dict[str, Outcome] = {}
        for placement, request in self._current(plan.run):
            request_id, slot, utterance = placement.request_id, placement.slot, request.utterance
            index = utterance.num_frames
            try:
                accepted = utterance.accept(result.codes_BK[slot], is_end[slot])
            except Exception as error:
                self._end_by_its_own_fault(request_id, error)
                continue
            if accepted.keep and has_sound[slot]:
                # A copy: a row would keep the whole step alive while it waits for its reader.
                deliveries.append((request.mailbox, Frame(index, result.audio_Bs[slot].copy())))
                num_frames[request_id] += 1
            elif accepted.keep:
                request.waiting.frames.append(index)
            if accepted.segment_done:
                rest = self._groups.rest(slot, request.waiting)
                deliveries += rest
                num_frames[request_id] += len(rest)
            over = accepted.finish_reason is not None
            if over:
                deliveries.append((request.mailbox, _finished(request)))
            outcomes[request_id] = Outcome(
                num_frames[request_id], segment_over=accepted.segment_done, waits=utterance.waits, request_over=over
            )
        now_s = self._clock()
        with self._changed:
            underruns = self._scheduler.apply(plan, outcomes, now_s)
            for request_id, outcome in outcomes.items():
                if outcome.request_over:
                    self._requests.pop(request_id, None)
            speaking = [(placement.slot, request.waiting) for placement, request in self._current(plan.run)]
            self._groups.ask(speaking, lambda request_id: self._scheduler.has_little(request_id, now_s))
        self._hand_out(deliveries)
        self._count(now_s, underruns)

    def _hand_out(self, deliveries: Sequence[tuple[MailboxT, Event]]) -> None:
        if deliveries:
            self._deliver(deliveries)
        num_frames = sum(isinstance(event, Frame) for _, event in deliveries)
        self._metrics.sound.inc(num_frames * self._engine.samples_per_frame / self._engine.sample_rate_hz)

    def _count(self, now_s: float, underruns: Sequence[Priority]) -> None:
        if self._settled_s is not None:
            self._metrics.step.observe(now_s - self._settled_s)
        self._settled_s = now_s
        for priority in underruns:
            self._metrics.underruns.labels(priority.name).inc()

    def _current(self, placements: Sequence[Placement]) -> list[tuple[Placement, _Request[MailboxT]]]:
        """Placements with their requests, but for those that are over or have had a new prompt since."""
        with self._changed:
            return [(p, self._requests[p.request_id]) for p in placements if self._scheduler.is_current(p)]

    def _end(self, request_id: str, error: FishjaxError) -> None:
        with self._changed:
            request = self._requests.pop(request_id, None)
            self._scheduler.cancel(request_id)
        if request is not None:
            self._deliver([(request.mailbox, Failed(error))])

    def _fail(self, error: Exception) -> None:
        logger.critical("the engine failed; this server takes no more work", exc_info=error)
        with self._changed:
            self._state = LoopState.FAILED
            running = set(self._scheduler.running_ids)
        self._on_state(LoopState.FAILED)

        def verdict(request_id: str) -> FishjaxError:
            if request_id in running:
                return EngineFailed("a step of the engine failed; the requests in it are lost")
            return NotReady("the engine failed before this request had a slot: try another server")

        self._dismiss(verdict)

    def _dismiss(self, verdict: Callable[[str], FishjaxError]) -> None:
        """Tell everybody that it is over."""
        with self._changed:
            requests, self._requests = self._requests, {}
            work, self._work = self._work, deque()
            self._texts.clear()
            for request_id in self._scheduler.request_ids:
                self._scheduler.cancel(request_id)
        for future, _ in work:
            if future.set_running_or_notify_cancel():
                future.set_exception(verdict(""))
        if requests:
            self._deliver([(request.mailbox, Failed(verdict(name))) for name, request in requests.items()])

    def _refuse_unless_serving(self) -> None:
        match self._state:
            case LoopState.WARMING:
                raise NotReady("the server is still warming up: try again once its health is SERVING")
            case LoopState.FAILED:
                raise NotReady("the engine of this server has failed: try another server")
            case LoopState.DRAINING | LoopState.STOPPED:
                raise Draining("the server is shutting down and takes no new requests: try another server")


def _finished(request: _Request[Any]) -> Finished:
    reason = request.utterance.finish_reason
    assert reason is not None
    return Finished(str(getattr(reason, "value", reason)), request.utterance.num_frames, request.num_saves)
