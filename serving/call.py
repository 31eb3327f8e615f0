"""One call's bookkeeping: its id, whose it is, the status that it ends with, and what metrics and log tell of it.

A message that a caller can see is a sentence about the request. What went wrong inside stays in the log, under the
request's id: paths and tracebacks never cross the wire.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from fishjax.errors import (
    DeadlineExceeded,
    Draining,
    EngineFailed,
    FishjaxError,
    InvalidRequest,
    LimitReached,
    NotAllowed,
    NotReady,
    PromptTooLong,
    QueueFull,
    SlowReader,
    Unauthenticated,
    VoiceExists,
    VoiceNotFound,
    VoicesFull,
    WeightsError,
)

from . import logs
from .keys import ANYBODY, ApiKey, KeyRing
from .metrics import Metrics

logger = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]

STATUS: dict[type[FishjaxError], grpc.StatusCode] = {
    FishjaxError: grpc.StatusCode.INTERNAL,
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    PromptTooLong: grpc.StatusCode.INVALID_ARGUMENT,
    VoiceNotFound: grpc.StatusCode.NOT_FOUND,
    VoiceExists: grpc.StatusCode.ALREADY_EXISTS,
    VoicesFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    QueueFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    Draining: grpc.StatusCode.UNAVAILABLE,
    NotReady: grpc.StatusCode.UNAVAILABLE,
    SlowReader: grpc.StatusCode.ABORTED,
    DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    WeightsError: grpc.StatusCode.INTERNAL,
    EngineFailed: grpc.StatusCode.INTERNAL,
}
"""Every error has its own row; a test walks the subclasses."""

GOODBYE_S = 5.0  # seconds that a caller has to read its status
RETRY_METADATA = "grpc-retry-pushback-ms"


@dataclass(slots=True)
class Call:
    """One call: its id, whose it is, when it came and how long it may take (seconds; None: as long as it takes).

    `outcome` is how it ended, and `figures` what else the log tells of it.
    """

    request_id: str
    rpc: str
    arrived_s: float
    remaining_s: float | None
    key: ApiKey = ANYBODY
    outcome: str = "ok"
    figures: dict[str, str | float] = field(default_factory=dict)


class Calls:
    """Opens and closes the books on each call of a server."""

    def __init__(self, keys: KeyRing, metrics: Metrics, clock: Callable[[], float]):
        self._keys = keys
        self._metrics = metrics
        self._clock = clock
        self._here: set[asyncio.Task[Any]] = set()
        self._over = False

    def whose(self, context: Context) -> ApiKey:
        """The key of a call. Raises Unauthenticated."""
        return self._keys.authenticate(_authorization(context))

    @asynccontextmanager
    async def answering(self, context: Context, rpc: str) -> AsyncIterator[Call]:
        """Give a call its request id and find out whose it is; what is raised inside becomes the call's status."""
        call = Call(uuid.uuid4().hex, rpc, self._clock(), context.time_remaining())
        with logs.request(call.request_id):
            try:
                with self._told_of_the_end(context):
                    call.key = self.whose(context)
                    yield call
            except asyncio.CancelledError:
                call.outcome = _how_it_left(context, call.remaining_s)
                raise
            except FishjaxError as error:
                call.outcome = STATUS[type(error)].name.lower()
                await end(context, error)
            except Exception:
                call.outcome = _how_it_left(context, call.remaining_s) if context.cancelled() else "internal"
                if context.cancelled():
                    return  # in the middle of a write, which then fails
                logger.exception("a fault of the server")
                sentence = f"a fault of the server; its log has it as request {call.request_id}"
                await _say_goodbye(context, grpc.StatusCode.INTERNAL, sentence)
            finally:
                self.count(rpc, call.outcome)
                logs.figures(logger, {"rpc": rpc, "key": call.key.name, "outcome": call.outcome, **call.figures})

    @contextmanager
    def here(self, context: Context) -> Iterator[None]:
        """The task that enters is answering a call until it leaves. Raises Draining if `close` ends it."""
        task = asyncio.current_task()
        assert task is not None, "a call is answered by a task"
        self._here.add(task)
        try:
            with self._told_of_the_end(context):
                yield
        finally:
            self._here.discard(task)
            del task  # which holds what is raised, and that this frame

    async def close(self, patience_s: float) -> None:
        """Wait for the calls that are here now; after `patience_s` seconds end those that are left with Draining."""
        if self._here:
            await asyncio.wait(self._here, timeout=patience_s)
        self._over = True
        for task in self._here:
            task.cancel()

    @contextmanager
    def _told_of_the_end(self, context: Context) -> Iterator[None]:
        """A call that the server's own end cancels is told so: gRPC's words would say that its caller left."""
        try:
            yield
        except asyncio.CancelledError:
            if not self._over or context.cancelled() or context.done():
                raise
            raise Draining("the server is shutting down and could not wait for this call: try another server") from None

    def count(self, rpc: str, outcome: str) -> None:
        """A call has ended."""
        self._metrics.requests.labels(rpc, outcome).inc()


async def end(context: Context, error: FishjaxError) -> None:
    """End a call with the status of an error and its sentence; of what went wrong inside the log alone tells."""
    code = STATUS[type(error)]
    metadata = ()
    if code is grpc.StatusCode.INTERNAL:
        logger.error("the request failed", exc_info=error)
        message = "the engine failed and this request is lost: try again"
    else:
        message = str(error)
        logger.info("refused: %s: %s", code.name, message)
    if isinstance(error, QueueFull):
        metadata = ((RETRY_METADATA, str(max(1, round(1000 * error.retry_after_s)))),)
    await _say_goodbye(context, code, message, metadata)


async def _say_goodbye(
    context: Context,
    code: grpc.StatusCode,
    sentence: str,
    metadata: tuple[tuple[str, str], ...] = (),
) -> None:
    """End a call with a status. It queues behind sound that is not read; we wait for a while, then leave it to gRPC."""
    try:
        async with asyncio.timeout(GOODBYE_S):
            await context.abort(code, sentence, trailing_metadata=metadata)
    except TimeoutError:
        logger.warning("the caller does not read its status: let go without waiting")
        raise asyncio.CancelledError from None
    except grpc.aio.InternalError:
        logger.info("the caller went away before it read its status")
        raise asyncio.CancelledError from None


def _how_it_left(context: Context, given_s: float | None) -> str:
    """A caller that is not there any more: its deadline passed, or it went away.

    Its own clock ends a call first: a deadline starts here when the call arrives, and travels rounded up to two or
    three digits (grpc-timeout).
    """
    remaining_s = context.time_remaining()
    if given_s is None or remaining_s is None:
        return "cancelled"
    return "deadline_exceeded" if remaining_s <= 0.1 + 0.01 * given_s else "cancelled"


def _authorization(context: Context) -> str | None:
    for name, value in context.invocation_metadata() or ():
        if name == "authorization" and isinstance(value, str):
            return value
    return None
