"""A process of callers: `python -m fishjax.bench.serve.callers`. A plan on stdin; on stdout a line for each call.

Loads nothing of JAX, so that a client takes as little of the machine from the server as it can.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator

from fishjax.rpc.v1 import tts_pb2_grpc

from .call import OK, Call
from .listen import connect, listen, make_request
from .mischief import misbehave
from .plan import LISTENS, CallersPlan

_REFUSED_PAUSE_S = 0.1
"""A caller of a closed loop who was refused comes back after so long, or when the server said."""


async def run(plan: CallersPlan) -> None:
    """Call as planned, until the calls that have begun are over."""
    numbers = itertools.count(plan.first, plan.stride)
    async with connect(plan.address) as channel:
        await channel.channel_ready()
        stub = tts_pb2_grpc.TtsStub(channel)
        await _sleep_until(plan.start_s)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(plan.callers):
                tasks.create_task(_call_on_and_on(plan, stub, numbers))
            for arrival_s in plan.arrivals:
                tasks.create_task(_call_at(plan, stub, numbers, plan.start_s + arrival_s))


async def _call_on_and_on(plan: CallersPlan, stub: tts_pb2_grpc.TtsStub, numbers: Iterator[int]) -> None:
    while time.monotonic() < plan.end_s:
        call = await _call(plan, stub, next(numbers))
        if call.status != OK:
            await asyncio.sleep(_REFUSED_PAUSE_S if call.retry_ms is None else call.retry_ms / 1000)


async def _call_at(plan: CallersPlan, stub: tts_pb2_grpc.TtsStub, numbers: Iterator[int], at_s: float) -> None:
    await _sleep_until(at_s)
    await _call(plan, stub, next(numbers))


async def _call(plan: CallersPlan, stub: tts_pb2_grpc.TtsStub, number: int) -> Call:
    request = make_request(plan.requests, number)
    if plan.mischief:
        call = await misbehave(stub, request, number, plan.lane)
    else:
        call = await listen(stub, request, Call(plan.lane, LISTENS, time.monotonic()))
    print(json.dumps(dataclasses.asdict(call)), flush=True)
    return call


async def _sleep_until(time_s: float) -> None:
    await asyncio.sleep(max(0.0, time_s - time.monotonic()))


if __name__ == "__main__":
    asyncio.run(run(CallersPlan.from_json(sys.stdin.readline())))
