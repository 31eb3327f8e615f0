"""The standard health service (grpc.health.v1): SERVING or NOT_SERVING, asked for or watched.

Written here because the servicer of grpcio-health-checking forgets all watchers of a service when one of them leaves,
and those that stay never hear of a change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Answer = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """The health of a server whose services fare alike; "" is the server as a whole. NOT_SERVING until told."""

    def __init__(self, services: Collection[str]):
        self._services = {"", *services}
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()  # of the state as it is: each change sets it, and makes another

    def set(self, *, serving: bool) -> None:
        """Tell everybody who watches; nothing, once it is closed."""
        self._serving = serving and not self._closed
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """NOT_SERVING from now on. Who watches is told and let go: an open watch would hold the server's end up."""
        self._closed = True
        self.set(serving=False)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> _Answer:
        """How a service is now."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no service of this name")
        return _Answer(status=self._status(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """How a service is now, and at each change, until the caller leaves or the server ends."""
        told = None
        while True:
            changed, status = self._changed, self._status(request.service)
            if status != told:
                await context.write(_Answer(status=status))
                told = status
            elif self._closed:
                return
            else:
                await changed.wait()

    def _status(self, service: str) -> _Answer.ServingStatus:
        if service not in self._services:
            return _Answer.SERVICE_UNKNOWN
        return _Answer.SERVING if self._serving else _Answer.NOT_SERVING
