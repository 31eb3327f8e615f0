"""What real callers do to a server: leave, read slowly, send nonsense, run out of time; and what must come of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fishjax.rpc.v1 import tts_pb2, tts_pb2_grpc

from .call import OK, Call
from .listen import listen, note_end
from .plan import LISTENS

DEADLINE_S = 0.4
_PAUSE_S = 0.2

EXPECTED: dict[str, frozenset[str]] = {
    LISTENS: frozenset({OK}),
    "leaves before sound": frozenset({"CANCELLED", OK}),  # OK: all of it was made before it left
    "leaves in the middle": frozenset({"CANCELLED", OK}),  # OK: it was over before the third message
    "reads slowly": frozenset({OK, "ABORTED"}),
    "sends nothing to say": frozenset({"INVALID_ARGUMENT"}),
    "sends no sound as a clip": frozenset({"INVALID_ARGUMENT"}),
    "names no voice": frozenset({"NOT_FOUND"}),
    "asks for the impossible": frozenset({"INVALID_ARGUMENT"}),
    "has little time": frozenset({"DEADLINE_EXCEEDED", OK}),
}
"""What a caller does, and the statuses that may come of it; RESOURCE_EXHAUSTED, with a hint, always may."""
_WEIGHTS = (8, 3, 3, 2, 1, 1, 1, 1, 2)


async def misbehave(stub: tts_pb2_grpc.TtsStub, request: tts_pb2.SynthesizeRequest, number: int, lane: str) -> Call:
    """Request `number`, by a caller whose manners are drawn from it."""
    rng = random.Random(number)
    (does,) = rng.choices(list(EXPECTED), weights=_WEIGHTS)
    _spoil(request, does)
    call = Call(lane, does, time.monotonic())
    if does == "leaves before sound":
        return await _leave_early(stub, request, call, rng.uniform(0.0, 0.05))
    timeout_s = DEADLINE_S * rng.random() + 0.01 if does == "has little time" else None
    return await listen(stub, request, call, timeout_s=timeout_s, after_message=_manners(does, rng))


def _spoil(request: tts_pb2.SynthesizeRequest, does: str) -> None:
    match does:
        case "sends nothing to say":
            request.text = " \n"
        case "sends no sound as a clip":
            request.voice_id = ""
            request.references.add(audio=b"no sound " * 100, transcript="no sound")
        case "names no voice":
            request.voice_id = "nobody-has-this-voice"
        case "asks for the impossible":
            request.sampling.temperature = -1.0


def _manners(does: str, rng: random.Random) -> Callable[[Any], Awaitable[None]] | None:
    messages_left = rng.randint(1, 3)

    async def leave(rpc: Any) -> None:
        nonlocal messages_left
        messages_left -= 1
        if messages_left == 0:
            rpc.cancel()

    async def dawdle(_: Any) -> None:
        await asyncio.sleep(_PAUSE_S)

    return {"leaves in the middle": leave, "reads slowly": dawdle}.get(does)


async def _leave_early(
    stub: tts_pb2_grpc.TtsStub, request: tts_pb2.SynthesizeRequest, call: Call, after_s: float
) -> Call:
    rpc: Any = stub.Synthesize(request)
    await asyncio.sleep(after_s)
    rpc.cancel()
    await note_end(rpc, call)
    return call
