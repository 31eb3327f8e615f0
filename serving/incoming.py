"""How many bytes of requests the server holds before they are speech: on their way, or clips that are not read yet.

A caller can send megabytes in one message, and gRPC says how large one is when all of it is here. So whatever has not
come within a moment counts as the largest there may be; what a moment brings, the network bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from fishjax.errors import QueueFull

T = TypeVar("T")
_MOMENT_S = 0.5  # small requests come with their call, also when many come at once
_RETRY_S = 5.0  # nobody knows when others have sent theirs


class Incoming:
    """At most `max_bytes` at once; a message has `max_message_bytes` at most. Belongs to one asyncio loop."""

    def __init__(self, max_bytes: int, max_message_bytes: int):
        self._max_bytes = max_bytes
        self._max_message_bytes = max_message_bytes
        self._num_bytes = 0

    @contextmanager
    def hold(self, num_bytes: int) -> Iterator[None]:
        """So many bytes are here until it is left. Raises QueueFull when they would be too many."""
        if self._num_bytes + num_bytes > self._max_bytes:
            raise QueueFull(
                f"the server has {self._num_bytes} bytes of requests on their way and clips to read, of "
                f"{self._max_bytes} at most: try again in {_RETRY_S:g} s, or store the voice with CreateVoice",
                _RETRY_S,
            )
        self._num_bytes += num_bytes
        try:
            yield
        finally:
            self._num_bytes -= num_bytes

    async def read(self, message: Awaitable[T], patience_s: float) -> T:
        """What `message` brings. Raises TimeoutError after `patience_s` seconds, and QueueFull."""
        reading = asyncio.ensure_future(message)
        try:
            async with asyncio.timeout(patience_s):
                await asyncio.wait([reading], timeout=_MOMENT_S)
                if reading.done():
                    return reading.result()
                with self.hold(self._max_message_bytes):
                    return await reading
        finally:
            reading.cancel()
