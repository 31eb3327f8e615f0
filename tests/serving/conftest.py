"""A real gRPC server on a free loopback port, with a model of numbers or the voice that ships behind it."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest

from fishjax.rpc.v1 import tts_pb2_grpc
from fishjax.speech import load
from serving._testing import PATIENCE_S, FakeEngine, FakeSpeech
from serving.config import ServerConfig
from serving.server import build


class Running:
    """A server and a channel to it."""

    def __init__(self, server, speech, channel):
        self.server, self.speech, self.channel = server, speech, channel
        self.engine = speech.engine
        self.tts = tts_pb2_grpc.TtsStub(channel)

    async def say_live(self, *messages, timeout_s=PATIENCE_S, metadata=()):
        """All answers to a live call that sends its messages at once; raises grpc.RpcError.

        Through gRPC's blocking client, in a thread: its asyncio client says INTERNAL in place of the server's status
        when a call is refused while a message is on its way (github.com/grpc/grpc/issues/36066).
        """

        def say():
            with grpc.insecure_channel(self.server.address) as channel:
                call = tts_pb2_grpc.TtsStub(channel).SynthesizeLive(
                    iter(messages), timeout=timeout_s, metadata=metadata
                )
                return list(call)

        return await asyncio.to_thread(say)


@asynccontextmanager
async def serving(speech, *, wait_ready=True, channel_options=(), **config):
    """Started, warm unless told otherwise, and stopped after."""
    server = build(speech, ServerConfig(port=0, drain_s=0.0, **config))
    await server.start()
    try:
        if wait_ready:
            await server.ready()
        async with grpc.aio.insecure_channel(server.address, options=list(channel_options)) as channel:
            yield Running(server, speech, channel)
    finally:
        if isinstance(speech, FakeSpeech):
            speech.engine.gate.open()
            speech.engine.warmup_gate.open()
        await server.stop()


@pytest.fixture
def serve():
    """`async with serve(engine, max_queue=...) as running`: a model of numbers."""
    return lambda engine=None, **config: serving(FakeSpeech(engine or FakeEngine()), **config)


@pytest.fixture(scope="session")
def minnow():
    """The voice that ships, with two slots, compiled once."""
    return load(num_slots=2, max_len=256, voice_bytes=8 * 2**20)


@pytest.fixture
def serve_minnow(minnow):
    """`async with serve_minnow(max_queue=...) as running`: real speech."""
    return lambda **config: serving(minnow, **config)
