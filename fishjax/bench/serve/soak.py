"""A long bad day of a server: callers with bad manners, killed processes, at the end a broken device, then a restart.

Nothing that was promised may be lost, memory stays flat, no slot is stuck, health tells the truth.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fishjax.bench.header import busy_note, make_header, see_gpu
from fishjax.rpc.v1 import tts_pb2_grpc

from .call import OK, Call
from .drive import read_calls, run_callers, server_info, start_callers
from .listen import connect, listen, make_request
from .plan import LISTENS, CallersPlan, Requests
from .server import ServerProcess
from .soak_verdict import judge_calls, judge_fault, judge_memory
from .voice import VOICE_ID, first_requests

METHOD = (
    "A server, and twice as many callers as slots and two more, each call of a kind that is drawn: "
    "listeners, callers who leave before sound or in the middle, read slowly, send nonsense or have too little time; "
    "beside them processes of two listeners that are killed one after the other. Then the device breaks under load, "
    "and the server is started again. after_fault: how the calls ended that the fault met. rss_mb: resident memory of "
    "the server's process, at even times."
)
_LOOK_S = 0.25
_IDLE_S = 15.0
_CLIENT_START_S = 2.0
_FAULT_AFTER_S = 2.0
_FAULT_SECONDS = 4.0
_EXIT_S = 30.0
_NUM_VICTIMS = 2
_REQUESTS_PER_VICTIM = 1_000
"""More than one can make before it is killed. They have odd numbers, the callers who live even ones."""


@dataclass
class Findings:
    """What was seen, and in `problems` a sentence for each promise that was broken."""

    note: str
    calls: list[Call] = field(default_factory=list)
    rss_mb: list[tuple[float, float]] = field(default_factory=list)
    killed: int = 0
    after_fault: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


async def soak(
    options: Sequence[str], num_slots: int, seconds: float, limits: dict[str, float], say: Callable[[str], None]
) -> Findings:
    """Run it for `seconds` seconds, and about half a minute for the broken device and the restart."""
    found = Findings(busy_note())
    with tempfile.TemporaryDirectory(prefix="fishjax-soak-") as folder:
        arguments = [*options, "--voices", str(Path(folder) / "voices")]
        say("soak: starting the server")
        with ServerProcess(arguments, "fishjax.bench.serve.faulty") as server:
            await asyncio.to_thread(first_requests, server.address, Path(folder) / "clip.wav")
            say(f"soak: callers with bad manners for {seconds:g} s")
            await _bad_day(server, num_slots, seconds, limits, found)
            say("soak: the device breaks")
            await _fault(server, num_slots, found)
        say("soak: restarting")
        with ServerProcess(arguments) as server:
            await _after_restart(server, found)
    found.problems += judge_calls(found.calls)
    found.problems += judge_memory(found.rss_mb, limits)
    return found


async def _bad_day(
    server: ServerProcess, num_slots: int, seconds: float, limits: dict[str, float], found: Findings
) -> None:
    start_s = time.monotonic() + _CLIENT_START_S
    plan = CallersPlan(
        server.address, "real", start_s, start_s + seconds, Requests(1, voice_id=VOICE_ID),
        callers=2 * num_slots + 2, stride=2, mischief=True,
    )  # fmt: skip
    watching = asyncio.create_task(_watch(server, start_s, found))
    killing = asyncio.create_task(_kill(plan, limits["kill_every_seconds"], found))
    found.calls += await run_callers(plan)
    await killing
    watching.cancel()
    await asyncio.wait([watching])
    if not watching.cancelled() and (error := watching.exception()) is not None:
        found.problems.append(f"the server could not be looked at: {error}")
    await _wait_until_idle(server, found)


async def _watch(server: ServerProcess, start_s: float, found: Findings) -> None:
    """Its memory, and its health, which must be SERVING throughout."""
    async with connect(server.address) as channel:
        while True:
            found.rss_mb.append((time.monotonic() - start_s, await asyncio.to_thread(server.rss_mb)))
            if (status := await _health(channel)) != "SERVING":
                found.problems.append(f"health said {status} while the server was well")
            await asyncio.sleep(_LOOK_S)


async def _kill(plan: CallersPlan, every_s: float, found: Findings) -> None:
    """Processes of callers, ended without a word in the middle of their calls."""
    first = 1
    while time.monotonic() + every_s < plan.end_s:
        victim = CallersPlan(
            plan.address, "killed", time.monotonic(), plan.end_s, plan.requests, callers=_NUM_VICTIMS,
            first=first, stride=2,
        )  # fmt: skip
        process = await start_callers(victim)
        assert process.stdout is not None
        reading = asyncio.create_task(process.stdout.read())
        await asyncio.sleep(every_s)
        process.kill()
        found.calls += read_calls(await reading)
        await process.wait()
        found.killed += 1
        first += 2 * _REQUESTS_PER_VICTIM


async def _wait_until_idle(server: ServerProcess, found: Findings) -> None:
    until_s = time.monotonic() + _IDLE_S
    async with connect(server.address) as channel:
        stub = tts_pb2_grpc.TtsStub(channel)
        while (info := await server_info(stub)).slots_busy or info.queue_length:
            if time.monotonic() > until_s:
                found.problems.append(
                    f"{info.slots_busy} slots and {info.queue_length} places are still taken {_IDLE_S:g} s after the "
                    "last caller"
                )
                return
            await asyncio.sleep(_LOOK_S)


async def _fault(server: ServerProcess, num_slots: int, found: Findings) -> None:
    """Break the device under load: a clear status for everybody, NOT_SERVING, exit code 1."""
    start_s = time.monotonic() + _CLIENT_START_S
    plan = CallersPlan(
        server.address, "fault", start_s, start_s + _FAULT_SECONDS, Requests(2, voice_id=VOICE_ID),
        callers=2 * num_slots,
    )  # fmt: skip
    calling = asyncio.create_task(run_callers(plan))
    async with connect(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())  # type: ignore[attr-defined]
        await health.read()
        await asyncio.sleep(start_s + _FAULT_AFTER_S - time.monotonic())
        broken_s = time.monotonic()
        server.process.send_signal(signal.SIGUSR1)
        if not await _says_not_serving(health):
            found.problems.append("health never said NOT_SERVING after the device broke")
    try:
        code = await asyncio.to_thread(server.process.wait, _EXIT_S)
    except subprocess.TimeoutExpired:
        code = None
    if code != 1:
        found.problems.append(f"the process of a broken device ended with {code}, not with exit code 1")
    calls = await calling
    found.after_fault = Counter(call.status for call in calls if call.ended_s > broken_s)
    found.problems += judge_fault(calls, broken_s)


async def _says_not_serving(health: Any) -> bool:
    """Whether a watch of the server's health says so before it ends."""
    try:
        while (answer := await health.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                return True
    except grpc.aio.AioRpcError as error:  # the server's process ended
        assert error.code() is grpc.StatusCode.UNAVAILABLE, error
    return False


async def _after_restart(server: ServerProcess, found: Findings) -> None:
    """What was stored is there, and the next request works."""
    async with connect(server.address) as channel:
        stub = tts_pb2_grpc.TtsStub(channel)
        call = Call("restart", LISTENS, time.monotonic())
        await listen(stub, make_request(Requests(3, voice_id=VOICE_ID), 0), call, timeout_s=60)
    if call.status != OK or call.problem:
        found.problems.append(f"after the restart: {call.status}: {call.detail or call.problem}")


async def _health(channel: Any) -> str:
    stub = health_pb2_grpc.HealthStub(channel)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=10)  # type: ignore[attr-defined]
    except Exception as error:
        return f"nothing ({type(error).__name__})"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def to_document(found: Findings, seen: dict[str, Any], seconds: float, num_slots: int) -> dict[str, Any]:
    """A header and what was found."""
    gpu = see_gpu() if seen["platform"] == "gpu" else None
    outcomes: dict[str, Counter[str]] = {}
    for call in found.calls:
        outcomes.setdefault(call.does, Counter())[call.status] += 1
    return {
        "header": make_header("soak", seen["device"], seen["versions"], gpu, [found.note], METHOD),
        "soak": {
            "slots": num_slots,
            "seconds": seconds,
            "calls": len(found.calls),
            "outcomes": {does: dict(statuses) for does, statuses in sorted(outcomes.items())},
            "killed_processes": found.killed,
            "rss_mb": [round(mb) for _, mb in found.rss_mb[:: max(1, len(found.rss_mb) // 20)]],
            "after_fault": dict(found.after_fault),
            "problems": found.problems,
        },
    }
