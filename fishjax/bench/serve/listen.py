"""One call over grpc.aio by a listener, who reads as sound comes and notes when it came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from fishjax.rpc.v1 import tts_pb2, tts_pb2_grpc

from .call import Call
from .clip import unique_clip
from .plan import Requests
from .prompts import prompt

RETRY_METADATA = "grpc-retry-pushback-ms"
_BYTES_PER_SAMPLE = 2
_EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue]
_MAX_MESSAGE_BYTES = 32 * 1024 * 1024


def connect(address: str) -> grpc.aio.Channel:
    """A connection of its own, which shares no socket with others of this process."""
    return grpc.aio.insecure_channel(
        address,
        options=[("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES)],
    )


def make_request(requests: Requests, number: int) -> tts_pb2.SynthesizeRequest:
    """Request `number`: a text, and with a clip a sound, that no other request has."""
    references = []
    if requests.clip:
        references = [tts_pb2.Reference(audio=unique_clip(requests.clip, number), transcript=requests.transcript)]
    return tts_pb2.SynthesizeRequest(
        text=prompt(requests.seed, number),
        voice_id=requests.voice_id,
        references=references,
        priority=requests.priority,
        sampling=tts_pb2.Sampling(seed=number, max_frames=requests.max_frames),
    )


async def listen(
    stub: tts_pb2_grpc.TtsStub,
    request: tts_pb2.SynthesizeRequest,
    call: Call,
    *,
    timeout_s: float | None = None,
    after_message: Callable[[Any], Awaitable[None]] | None = None,
) -> Call:
    """Make the call, and fill `call` with what came of it. `after_message` gets the gRPC call after each message."""
    rpc: Any = stub.Synthesize(request, timeout=timeout_s)
    try:
        await _read(rpc, call, after_message)
    except grpc.aio.AioRpcError:
        pass  # its status is the call's
    except asyncio.CancelledError:
        if not rpc.cancelled() or (task := asyncio.current_task()) is None or task.cancelling():
            raise  # not the call: this task is to end
    await note_end(rpc, call)
    return call


async def note_end(rpc: Any, call: Call) -> None:
    """Wait for the end of a call, and note its status and when to try again."""
    call.status, call.detail = (await rpc.code()).name, await rpc.details() or ""
    for name, value in await rpc.trailing_metadata() or ():
        if name == RETRY_METADATA:
            call.retry_ms = int(value)
    call.ended_s = time.monotonic()


async def _read(rpc: Any, call: Call, after_message: Callable[[Any], Awaitable[None]] | None) -> None:
    header, summary, num_frames = None, None, 0
    while (message := await rpc.read()) is not _EOF:
        now_s = time.monotonic()
        match message.WhichOneof("event"):
            case "header":
                header, call.promised = message.header, True
                call.frame_s = header.samples_per_frame / header.sample_rate_hz
            case "audio" if header is not None:
                audio = message.audio
                call.arrivals.append((now_s, audio.num_frames))
                if audio.first_frame != num_frames:
                    call.problem = f"frame {audio.first_frame} came where {num_frames} was due"
                if len(audio.data) != audio.num_frames * header.samples_per_frame * _BYTES_PER_SAMPLE:
                    call.problem = f"{audio.num_frames} frames came as {len(audio.data)} bytes"
                num_frames += audio.num_frames
            case "summary":
                summary = message.summary
            case other:
                call.problem = f"{other} came before the header"
        if after_message is not None:
            await after_message(rpc)
    if summary is None or summary.num_frames != num_frames:
        said = "no summary" if summary is None else f"a summary of {summary.num_frames} frames"
        call.problem = f"{num_frames} frames came, and {said}"
