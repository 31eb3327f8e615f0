"""The one thread that drives the engine: plan, dispatch a step, hand out the step before.

    plan -> save, free, insert -> read chunks -> step (dispatched) -> read the step before -> frames to their requests

A step's results are read after the next one is dispatched, so that the device never waits for Python; what the next
one then made of a request that was over is dropped as stale. A fault of the device ends the loop: everybody is told,
the state turns FAILED, and only a new process helps. Knows nothing of gRPC, asyncio or sample formats; what others
ask of it lies on its desk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic

from fishjax.errors import DeadlineExceeded, Draining, EngineFailed, FishjaxError, NotReady

from .contract import Engine, PendingStep
from .desk import Desk, LoopState, MailboxT, Request
from .groups import FrameGroups
from .metrics import Metrics
from .plan import Outcome, Placement, Plan, Priority
from .request import Event, Failed, Finished, Frame, Started
from .scheduler import Scheduler

logger = logging.getLogger(__name__)


class _StoppedEarly(Exception):
    """`stop` came before the end of the warm-up."""


class SynthesisLoop(Generic[MailboxT]):
    """Owns the engine. What callers want of it they ask of its `desk`.

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
        self.desk = Desk[MailboxT](scheduler, on_state=on_state, max_unread_frames=max_unread_frames, clock=clock)
        self._engine = engine
        self._deliver = deliver
        self._metrics = metrics
        self._groups = FrameGroups[MailboxT](engine)
        self._settled_s: float | None = None  # when the step before was read, if one was
        self._clock = clock
        self._thread = threading.Thread(target=self._main, name="synthesis-loop", daemon=True)

    def start(self) -> None:
        """Start the thread: warm up, then serve."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step it is in; requests that are still here get Draining. From another thread."""
        self.desk.stop()
        if self._thread.ident is not None:
            self._thread.join()
        self._dismiss(lambda _: Draining("the server has stopped"))

    def _main(self) -> None:
        try:
            self._engine.warmup(self._warming)
            self.desk.open()
            self._serve()
        except _StoppedEarly:
            logger.info("the warm-up was given up")
        except Exception as error:
            self._fail(error)

    def _warming(self, what: str) -> None:
        if self.desk.state is LoopState.STOPPED:
            raise _StoppedEarly
        logger.info("warming up: %s", what)

    def _serve(self) -> None:
        previous: tuple[Plan, PendingStep] | None = None
        while (plan := self.desk.next_plan(self._prepare, wait=previous is None)) is not None:
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

    def _do_one_piece_of_work(self) -> None:
        if (taken := self.desk.take_work()) is None:
            return
        future, work = taken
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except Exception as error:
            future.set_exception(error)  # it belongs to whoever waits for the result
        else:
            future.set_result(result)

    def _read_texts(self) -> None:
        for request_id, segments, last in self.desk.take_texts():
            if (request := self.desk.get(request_id)) is not None:
                self._extend(request_id, request, segments, last)

    def _extend(self, request_id: str, request: Request[MailboxT], segments: Sequence[str], last: bool) -> None:
        utterance = request.utterance
        waited = utterance.waits
        try:
            utterance.extend(segments, last=last)
        except Exception as error:
            self._end_by_its_own_fault(request_id, error)
        if not waited or utterance.waits:
            return
        if utterance.finish_reason is None:
            self.desk.wake(request_id)
        elif self.desk.cancel(request_id) is not None:
            self._deliver([(request.mailbox, _finished(request))])

    def _end_by_its_own_fault(self, request_id: str, error: Exception) -> None:
        """An error of a request's text logic ends that request: the device and everybody else are well."""
        if not isinstance(error, FishjaxError):
            logger.error("request %s: its next segment could not be prepared", request_id, exc_info=error)
            error = EngineFailed("the next part of the text could not be prepared")
        self._end(request_id, error)

    def _dispatch(self, plan: Plan) -> PendingStep | None:
        current = self.desk.current
        for request_id in plan.expired:
            self._end(request_id, DeadlineExceeded("the deadline passed before the speech was done"))
        for placement in plan.save:
            if (request := self.desk.get(placement.request_id)) is not None:
                request.saved = self._engine.extract(placement.slot)
                request.num_saves += 1
                self._metrics.preemptions.inc()
        for slot in plan.free:
            self._engine.free(slot)
        for placement, request in current(plan.start):
            self._enter(placement, request)
        for placement, request in current(plan.restore):
            self._engine.insert(request.saved, placement.slot)
            request.saved = None
        for placement, request in current(plan.resume):
            self._enter(placement, request)
        started = [(request.mailbox, Started(plan.now_s)) for _, request in current(plan.start)]
        if started:
            self._deliver(started)
        for placement, _ in current(plan.read):
            self._engine.read(placement.slot)
        run = [placement.slot for placement, _ in current(plan.run)]
        return self._engine.step(run) if run else None

    def _prepare(self, request: Request[MailboxT]) -> int:
        """Cut a request's next prompt into chunks; how many they are. Nothing is read yet."""
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

    def _enter(self, placement: Placement, request: Request[MailboxT]) -> None:
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
        for placement, request in self.desk.current(plan.run):
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
        underruns = self.desk.apply(plan, outcomes, now_s)
        speaking = [(placement.slot, request.waiting) for placement, request in self.desk.current(plan.run)]
        self._groups.ask(speaking, lambda request_id: self.desk.has_little(request_id, now_s))
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

    def _end(self, request_id: str, error: FishjaxError) -> None:
        if (request := self.desk.cancel(request_id)) is not None:
            self._deliver([(request.mailbox, Failed(error))])

    def _fail(self, error: Exception) -> None:
        logger.critical("the engine failed; this server takes no more work", exc_info=error)
        running = self.desk.fail()

        def verdict(request_id: str) -> FishjaxError:
            if request_id in running:
                return EngineFailed("a step of the engine failed; the requests in it are lost")
            return NotReady("the engine failed before this request had a slot: try another server")

        self._dismiss(verdict)

    def _dismiss(self, verdict: Callable[[str], FishjaxError]) -> None:
        """Tell everybody that it is over."""
        requests, work = self.desk.clear()
        for future, _ in work:
            if future.set_running_or_notify_cancel():
                future.set_exception(verdict(""))
        if requests:
            self._deliver([(request.mailbox, Failed(verdict(name))) for name, request in requests.items()])


def _finished(request: Request[Any]) -> Finished:
    reason = request.utterance.finish_reason
    assert reason is not None
    return Finished(str(getattr(reason, "value", reason)), request.utterance.num_frames, request.num_saves)
