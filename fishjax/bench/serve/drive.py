"""A load on a server: processes of callers, and beside them a look at how many slots are busy."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc.aio

from fishjax.rpc.v1 import tts_pb2, tts_pb2_grpc

from .call import Call
from .failed import MeasurementFailed
from .listen import connect
from .plan import CallersPlan, split

RAMP_SHARE = 0.2
"""The first fifth of a load fills the slots; what begins in it is not measured."""
CALLERS_PER_PROCESS = 16
_CLIENT_START_S = 2.0
"""From starting the callers' processes until they call: importing and connecting take less."""
_LOOK_S = 0.05
_LAST_CALLS_S = 300.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a load, measured in `from_s` to `to_s`. `looks` are (when, busy slots, waiting requests)."""

    calls: list[Call]
    looks: list[tuple[float, int, int]]
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """Plans for `seconds` seconds, whose times are set when it starts."""

    plans: Sequence[CallersPlan]
    seconds: float


def num_processes(callers: int) -> int:
    """So many callers in a process that none waits for another's bytes, and half of the machine for the server."""
    return max(1, min((os.cpu_count() or 2) // 2, -(-callers // CALLERS_PER_PROCESS)))


async def drive(address: str, load: Load, width: int) -> Seen:
    """Put the load on the server, from as many processes as `width` callers at once need. Raises MeasurementFailed."""
    start_s = time.monotonic() + _CLIENT_START_S
    end_s = start_s + load.seconds
    looks: list[tuple[float, int, int]] = []
    looking = asyncio.create_task(_look(address, looks))
    parts = [
        part
        for plan in load.plans
        for part in split(_timed(plan, address, start_s, end_s), num_processes(max(width, plan.callers)))
    ]
    try:
        answers = await asyncio.gather(*(run_callers(part) for part in parts))
    finally:
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking
    calls = [call for answer in answers for call in answer]
    return Seen(calls, looks, start_s + RAMP_SHARE * load.seconds, end_s)


def _timed(plan: CallersPlan, address: str, start_s: float, end_s: float) -> CallersPlan:
    return dataclasses.replace(plan, address=address, start_s=start_s, end_s=end_s)


async def start_callers(plan: CallersPlan) -> asyncio.subprocess.Process:
    """A process that has its plan."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "fishjax.bench.serve.callers",
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=2**26,
    )  # fmt: skip
    assert process.stdin is not None
    process.stdin.write(plan.to_json().encode() + b"\n")
    await process.stdin.drain()
    process.stdin.close()
    return process


async def run_callers(plan: CallersPlan) -> list[Call]:
    """The calls of a process of callers, once it has ended."""
    process = await start_callers(plan)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(plan.end_s - time.monotonic() + _LAST_CALLS_S):
            calls = read_calls(await process.stdout.read())
            code = await process.wait()
    except TimeoutError:
        raise MeasurementFailed(
            f"calls hang: some were not over {_LAST_CALLS_S:g} s after the last one began"
        ) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code:
        raise MeasurementFailed(f"a process of callers ended with exit code {code}")
    return calls


def read_calls(lines: bytes) -> list[Call]:
    """Calls from whole lines; what a killed process left of its last line is dropped."""
    return [Call(**json.loads(line)) for line in lines.splitlines(keepends=True) if line.endswith(b"\n")]


async def _look(address: str, looks: list[tuple[float, int, int]]) -> None:
    async with connect(address) as channel:
        stub = tts_pb2_grpc.TtsStub(channel)
        while True:
            info = await server_info(stub)
            looks.append((time.monotonic(), info.slots_busy, info.queue_length))
            await asyncio.sleep(_LOOK_S)


async def server_info(stub: tts_pb2_grpc.TtsStub) -> tts_pb2.GetServerInfoResponse:
    """The server's limits and load. Raises grpc.aio.AioRpcError."""
    call: grpc.aio.UnaryUnaryCall = stub.GetServerInfo(tts_pb2.GetServerInfoRequest(), timeout=10)  # type: ignore
    return await call
