"""What stands before every method of the port: a request that does not come, or cannot be read, ends with a sentence.

gRPC reads the one message of a unary request before its handler runs. It answers UNKNOWN with the name of a Python
class when the bytes are no message, nothing at all when the caller ends the call without one, and waits for ever for
one that never comes. On the wire a unary request is a stream of one message, so here it is read as one.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from fishjax.errors import DeadlineExceeded, FishjaxError, InvalidRequest, QueueFull

from .call import STATUS, Calls, Context, end
from .incoming import Incoming

_RETRY_S = 5.0  # when too many hold a place: nobody knows when one of them leaves
_EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
Answer = Callable[[AsyncIterator[Any], Context], Awaitable[None]]


class Guard(grpc.aio.ServerInterceptor):
    """Gives a request `patience_s` seconds to come, while `incoming` has room.

    `places`: the path of a method that needs no key -> how many may be in it at once; they cannot crowd out the others.
    """

    def __init__(self, calls: Calls, incoming: Incoming, patience_s: float, places: Mapping[str, int]):
        self._calls = calls
        self._incoming = incoming
        self._patience_s = patience_s
        self._places = places
        self._taken: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The method's handler, guarded; None where there is no such method."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        path: str = handler_call_details.method  # type: ignore[attr-defined]
        return grpc.stream_stream_rpc_method_handler(
            self._guarded(path, handler), reader(handler.request_deserializer), handler.response_serializer
        )

    def _guarded(self, path: str, handler: Any) -> Answer:
        answer = _streamed(handler) if handler.request_streaming else self._unary(path, handler)

        async def guarded(requests: AsyncIterator[Any], context: Context) -> None:
            try:
                with self._calls.here(context), self._place(path):
                    await answer(requests, context)
            except FishjaxError as error:
                self._calls.count(path.rpartition("/")[2], STATUS[type(error)].name.lower())
                await end(context, error)

        async def and_forgotten(requests: AsyncIterator[Any], context: Context) -> None:
            try:
                await guarded(requests, context)
            except grpc.aio.AbortError as error:
                # The context keeps it, and with its traceback it would keep all that the call has read.
                error.__context__ = None
                raise error.with_traceback(None)  # noqa: B904

        return and_forgotten

    def _unary(self, path: str, handler: Any) -> Answer:
        async def answer(_: AsyncIterator[Any], context: Context) -> None:
            if path not in self._places:
                self._calls.whose(context)  # before its request is waited for
            # Not kept here: the handler lets go of a request that it has read.
            if handler.response_streaming:
                await handler.unary_stream(await self._only(context), context)
            else:
                await context.write(await handler.unary_unary(await self._only(context), context))

        return answer

    async def _only(self, context: Context) -> Any:
        """The request. Read from the context: the iterator of requests keeps the last one that it gave."""
        try:
            request = await self._incoming.read(context.read(), self._patience_s)
        except TimeoutError:
            raise DeadlineExceeded(f"the request did not come within {self._patience_s:g} s") from None
        if request is _EOF:
            raise InvalidRequest("the call ended without a request: send one message")
        return request

    @contextmanager
    def _place(self, path: str) -> Iterator[None]:
        limit = self._places.get(path)
        if limit is not None and self._taken[path] >= limit:
            raise QueueFull(f"{limit} calls of this method are open, which is the limit: close some", _RETRY_S)
        self._taken[path] += 1
        try:
            yield
        finally:
            self._taken[path] -= 1


def reader(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """The same, raising InvalidRequest for bytes that are no message."""

    def read(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            raise InvalidRequest(
                f"a message of {len(data)} bytes cannot be read: reflection tells the method's own type, "
                "and its texts must be UTF-8"
            ) from None

    return read


def _streamed(handler: Any) -> Answer:
    """A handler of streams that writes, whether it writes or yields."""
    behaviour = handler.stream_stream
    if not inspect.isasyncgenfunction(behaviour):
        return behaviour

    async def answer(requests: AsyncIterator[Any], context: Context) -> None:
        async for response in behaviour(requests, context):
            await context.write(response)

    return answer
