"""Callers who do not keep to the protocol: each gets a status and a sentence, and the next one is served."""

import asyncio
import contextlib
import json
import re
import socket
import ssl

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from fishjax.rpc.v1 import tts_pb2
from serving._testing import PATIENCE_S, FakeEngine

TTS = [f"/fishjax.rpc.v1.Tts/{method.name}" for method in tts_pb2.DESCRIPTOR.services_by_name["Tts"].methods]
HEALTH = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"]
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
NO_MESSAGE = b"\xff\xff\xff"
SPEAK = tts_pb2.SynthesizeRequest(text="one two three").SerializeToString()
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"


async def of(*messages):
    for message in messages:
        yield message


async def send(running, path, messages, **options):
    """Bytes as they are to a method, whatever it takes; its answers. None: the caller is silent."""
    call = running.channel.stream_stream(path)(messages, timeout=PATIENCE_S, **options)
    return [answer async for answer in call]


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = caught.value
    assert not re.search(r"class|Unexpected|Error|Traceback|/", error.details()), error.details()
    return error.code(), error.details()


async def is_well(running):
    assert len(await send(running, TTS[0], of(SPEAK))) >= 3
    async with asyncio.timeout(PATIENCE_S):
        while running.server._loop.desk.load() != (0, 0):
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("path", [*TTS, *HEALTH, REFLECTION])
async def test_bytes_that_are_no_message_are_invalid_whatever_the_method(serve, path, caplog):
    async with serve() as running:
        code, sentence = await refused(send(running, path, of(NO_MESSAGE)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "a message of 3 bytes cannot be read" in sentence
        await is_well(running)
    assert "Traceback" not in caplog.text


async def test_text_that_is_no_utf8_is_invalid(serve):
    async with serve() as running:
        code, sentence = await refused(send(running, TTS[0], of(b"\x0a\x02\xc3\x28")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "must be UTF-8" in sentence


async def test_live_text_that_becomes_unreadable_is_invalid(serve):
    start = tts_pb2.SynthesizeLiveRequest(start=tts_pb2.LiveStart()).SerializeToString()
    async with serve() as running:
        code, _ = await refused(send(running, TTS[1], of(start, NO_MESSAGE)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        await is_well(running)


@pytest.mark.parametrize("path", [*TTS, *HEALTH])
async def test_a_call_that_ends_without_a_request_is_told_so(serve, path):
    async with serve() as running:
        code, sentence = await refused(send(running, path, of()))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "without a request" in sentence or "must be 'start'" in sentence


@pytest.mark.parametrize("path", [*TTS, *HEALTH])
async def test_a_request_that_never_comes_is_not_waited_for(serve, path):
    async with serve(max_silence_s=0.1) as running:
        code, sentence = await refused(send(running, path, None))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED and "0.1 s" in sentence


async def test_callers_who_take_their_time_cannot_fill_the_memory(serve, monkeypatch):
    """What does not come in a moment counts as the largest message there may be; who is quick is served beside it."""
    monkeypatch.setattr("serving.incoming._MOMENT_S", 0.05)
    async with serve(max_message_bytes=100_000, max_incoming_bytes=250_000) as running:
        slow = [running.channel.stream_stream(path)(timeout=PATIENCE_S) for path in (TTS[0], TTS[1])]
        async with asyncio.timeout(PATIENCE_S):
            while running.server._incoming._num_bytes < 200_000:
                await asyncio.sleep(0.001)
        for path in TTS[:2]:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await send(running, path, None)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "200000 bytes of requests on their way" in caught.value.details()
            assert int(dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"]) >= 1000
        monkeypatch.setattr("serving.incoming._MOMENT_S", PATIENCE_S)
        await is_well(running)
        await slow[0].write(SPEAK)
        assert tts_pb2.SynthesizeResponse.FromString(await slow[0].read()).HasField("header")
        for call in slow:
            call.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while running.server._incoming._num_bytes:
                await asyncio.sleep(0.001)


async def test_more_than_one_request_in_a_call_is_one(serve):
    async with serve() as running:
        answers = await send(running, TTS[0], of(SPEAK, SPEAK, NO_MESSAGE))
        summary = tts_pb2.SynthesizeResponse.FromString(answers[-1]).summary
        assert summary.num_frames == 3


async def test_who_has_no_key_is_refused_before_its_request_is_waited_for(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"keys": [{"name": "a", "sha256": "0" * 64}]}))
    async with serve(api_keys=keys) as running:
        for path in TTS:
            code, _ = await refused(send(running, path, None))
            assert code is grpc.StatusCode.UNAUTHENTICATED


async def test_calls_that_need_no_key_do_not_crowd_the_others_out(serve):
    async def open_one(path, question):
        """A call that stays open once it has its first answer."""
        call = running.channel.stream_stream(path)(timeout=PATIENCE_S)
        await call.write(question)
        await call.read()
        return call

    everything = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    async with serve(FakeEngine(num_slots=1), max_queue=0, max_batch_queue=0) as running:
        for path, question, limit in ((HEALTH[1], b"", 32), (REFLECTION, everything, 16)):
            calls = [await open_one(path, question) for _ in range(limit)]
            code, sentence = await refused(open_one(path, question))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert f"{limit} calls of this method are open" in sentence
            await is_well(running)
            calls[0].cancel()
            async with asyncio.timeout(PATIENCE_S):
                while True:  # until its place is free
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        await open_one(path, question)
                        break


async def test_a_method_that_is_not_there(serve):
    async with serve() as running:
        for path in ("/fishjax.rpc.v1.Tts/Shout", "/nothing/Here", "/" + "x" * 4000):
            code, _ = await refused(send(running, path, of(SPEAK)))
            assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_headers_that_are_too_large(serve):
    async with serve() as running:
        code, _ = await refused(send(running, TTS[0], of(SPEAK), metadata=(("x", "y" * 100_000),)))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        await is_well(running)


async def test_a_small_message_that_unpacks_to_a_huge_one_is_refused(serve):
    huge = tts_pb2.SynthesizeRequest(text="a", voice_id="v" * 20_000_000).SerializeToString()
    async with serve(max_message_bytes=100_000) as running:
        code, _ = await refused(send(running, TTS[0], of(huge), compression=grpc.Compression.Gzip))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await send(running, TTS[0], of(SPEAK), compression=grpc.Compression.Gzip)


async def test_reflection_answers_odd_questions_and_goes_on(serve):
    request = reflection_pb2.ServerReflectionRequest
    odd = [
        request(file_by_filename="../../etc/passwd"),
        request(file_containing_symbol="nothing.Here"),
        request(all_extension_numbers_of_type="nothing.Here"),
        request(),
    ]
    async with serve() as running:
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        questions = [*odd, request(file_containing_symbol="fishjax.rpc.v1.Tts")]
        *errors, last = [answer async for answer in stub.ServerReflectionInfo(iter(questions), timeout=PATIENCE_S)]
        assert [answer.error_response.error_code for answer in errors] == [5, 5, 5, 3]  # NOT_FOUND, INVALID_ARGUMENT
        assert last.file_descriptor_response.file_descriptor_proto


def headers_frame(path, *, whole=True):
    """HTTP/2 HEADERS of a call, with literal fields; half of them if not `whole`."""

    def text(value):
        return bytes([len(value)]) + value

    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b"te", b"trailers")]
    fields += [(b":authority", b"x"), (b"content-type", b"application/grpc")]
    block = b"".join(b"\0" + text(name) + text(value) for name, value in fields)
    frame = len(block).to_bytes(3, "big") + b"\x01\x04" + (1).to_bytes(4, "big") + block
    return frame if whole else frame[: len(frame) // 2]


RAW = {
    "nothing": b"",
    "HTTP/1.1": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(256)) * 40,
    "half a preface": PREFACE[:10],
    "a preface and noise": PREFACE + b"\xfe" * 1000,
    "half of the headers": PREFACE + SETTINGS + headers_frame(TTS[0], whole=False),
    "headers and no message": PREFACE + SETTINGS + headers_frame(TTS[0]),
    "a frame of 16 MiB": PREFACE + SETTINGS + b"\xff\xff\xff\0\0\0\0\0\x01" + bytes(100_000),
    "a hello of TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
}


def connect(running):
    host, _, port = running.server.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE_S)


@pytest.mark.parametrize("hang_up", [True, False])
@pytest.mark.parametrize("kind", RAW)
async def test_bytes_that_are_no_call_harm_nobody(serve, kind, hang_up, caplog):
    def shout():
        connections = [connect(running) for _ in range(5)]
        for connection in connections:
            connection.sendall(RAW[kind])
            if hang_up:
                connection.close()
        return connections

    async with serve() as running:
        connections = await asyncio.to_thread(shout)
        await is_well(running)
        for connection in connections:
            connection.close()
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


async def test_tls_to_a_port_without_it_fails_at_the_caller(serve):
    def shake_hands():
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.raises(OSError), context.wrap_socket(connect(running)):
            pass

    async with serve() as running:
        await asyncio.to_thread(shake_hands)
        await is_well(running)


async def test_hundreds_of_connections_that_say_nothing(serve):
    async with serve() as running:
        connections = await asyncio.to_thread(lambda: [connect(running) for _ in range(300)])
        await is_well(running)
        for connection in connections:
            connection.close()


async def test_a_watcher_that_leaves_does_not_make_the_others_deaf(serve):
    engine = FakeEngine()
    engine.warmup_gate.close()
    async with serve(engine, wait_ready=False) as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        leaves, stays = (stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S) for _ in range(2))
        for call in (leaves, stays):
            assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        leaves.cancel()
        await asyncio.sleep(0.05)
        engine.warmup_gate.open()
        assert (await stays.read()).status == health_pb2.HealthCheckResponse.SERVING
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="nothing.Here"), timeout=PATIENCE_S)
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="nothing.Here"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND and caught.value.details()


async def test_who_watches_health_hears_the_end_and_does_not_hold_it_up(serve):
    async with serve() as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
        assert (await call.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with asyncio.timeout(PATIENCE_S):
            await running.server.stop(drain_s=10 * PATIENCE_S)
        assert (await call.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await call.read() is grpc.aio.EOF
