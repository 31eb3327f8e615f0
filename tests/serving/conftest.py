"""A real gRPC server on a free loopback port, with a model of numbers behind it."""

from contextlib import asynccontextmanager

import grpc
import pytest

from fishjax.rpc.v1 import tts_pb2_grpc
from serving._testing import FakeEngine, FakeSpeech
from serving.config import ServerConfig
from serving.server import build


class Running:
    """A server and a channel to it."""

    def __init__(self, server, speech, channel):
        self.server, self.speech, self.channel = server, speech, channel
        self.engine = speech.engine
        self.tts = tts_pb2_grpc.TtsStub(channel)


@pytest.fixture
def serve():
    """`async with serve(engine, max_queue=...) as running`: started, warm unless told otherwise, and stopped after."""

    @asynccontextmanager
    async def serve(engine=None, *, wait_ready=True, channel_options=(), **config):
        speech = FakeSpeech(engine or FakeEngine())
        server = build(speech, ServerConfig(port=0, drain_s=0.0, **config))
        await server.start()
        try:
            if wait_ready:
                await server.ready()
            async with grpc.aio.insecure_channel(server.address, options=list(channel_options)) as channel:
                yield Running(server, speech, channel)
        finally:
            speech.engine.gate.open()
            speech.engine.warmup_gate.open()
            await server.stop()

    return serve
