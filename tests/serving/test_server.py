"""The whole service over a real connection, with an engine of numbers."""

import asyncio
import contextlib
import io
import math
import re
import struct
import wave

import grpc
import numpy as np
import pytest
import soundfile
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import fishjax
from fishjax.client import Client
from fishjax.errors import EngineFailed, InvalidRequest, NotReady
from fishjax.rpc.v1 import tts_pb2
from serving._testing import PATIENCE_S, FakeEngine, FakeSpeech, frame_level
from serving.config import ServerConfig
from serving.desk import LoopState
from serving.server import build

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def clip(seconds=3.0, rate=16000, channels=1) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, np.zeros((round(seconds * rate), channels), np.float32), rate, format="WAV")
    return buffer.getvalue()


def request(text="one two three", **fields) -> tts_pb2.SynthesizeRequest:
    sampling = tts_pb2.Sampling(**fields.pop("sampling", {"seed": 1}))
    return tts_pb2.SynthesizeRequest(text=text, sampling=sampling, **fields)


def expected_samples(seed, num_frames, samples_per_frame=4):
    levels = np.repeat([frame_level(seed, frame) for frame in range(num_frames)], samples_per_frame)
    return np.rint(levels.astype(np.float32) * 32767).astype(np.int16)


async def speak(running, message, **kwargs):
    """Header, samples' bytes and summary, with the order of messages checked."""
    messages = [answer async for answer in running.tts.Synthesize(message, timeout=PATIENCE_S, **kwargs)]
    kinds = [answer.WhichOneof("event") for answer in messages]
    assert kinds == ["header"] + ["audio"] * (len(kinds) - 2) + ["summary"]
    audio = [answer.audio for answer in messages[1:-1]]
    assert [a.first_frame for a in audio] == [sum(b.num_frames for b in audio[:i]) for i in range(len(audio))]
    assert all(a.num_frames > 0 for a in audio)
    header, summary = messages[0].header, messages[-1].summary
    assert summary.num_frames == sum(a.num_frames for a in audio)
    return header, b"".join(a.data for a in audio), summary


async def rest(call):
    """What a call that has been read from still answers."""
    answers = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        answers.append(answer)
    return answers


async def refused(running, message):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await speak(running, message)
    return caught.value


async def health(running, service=""):
    stub = health_pb2_grpc.HealthStub(running.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


async def until(condition):
    """Wait for another thread's doing, in this thread's time."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


async def idle(running):
    await until(lambda: running.server._loop.desk.load() == (0, 0))


async def test_pcm_messages_in_order(serve):
    async with serve() as running:
        header, data, summary = await speak(running, request("one two three. four."))
        assert (header.sample_rate_hz, header.num_channels, header.format) == (22050, 1, tts_pb2.PCM_S16LE)
        assert (header.model, header.seed, header.samples_per_frame) == ("fake", 1, 4)
        assert len(header.request_id) == 32
        np.testing.assert_array_equal(np.frombuffer(data, "<i2"), expected_samples(1, 4))
        assert summary.finish_reason == tts_pb2.FINISH_REASON_STOP
        assert summary.audio_seconds == pytest.approx(16 / 22050)
        assert 0 <= summary.queue_ms <= summary.first_audio_ms <= summary.total_ms


async def test_wav_opens_with_a_streaming_header(serve):
    async with serve() as running:
        header, data, _ = await speak(running, request(format=tts_pb2.WAV))
        assert header.format == tts_pb2.WAV
        assert struct.unpack("<4sI4s", data[:12]) == (b"RIFF", 0xFFFFFFFF, b"WAVE")
        samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
        assert rate == 22050
        np.testing.assert_array_equal(samples, expected_samples(1, 3))


async def test_sound_comes_while_speech_is_being_made(serve):
    """The first audio message is one frame, and arrives before the second step's frame exists."""
    async with serve() as running:
        running.engine.gate.close()
        call = running.tts.Synthesize(request("w " * 50), timeout=PATIENCE_S)
        assert (await call.read()).HasField("header")
        running.engine.gate.allow(2)
        first = (await call.read()).audio
        assert (first.first_frame, first.num_frames) == (0, 1)
        assert len(running.engine.runs) == 2
        call.cancel()


async def test_limit_and_empty_end_with_their_reason(serve):
    async with serve() as running:
        _, data, summary = await speak(running, request("w " * 9, sampling={"max_frames": 4}))
        assert (summary.finish_reason, summary.num_frames, len(data)) == (tts_pb2.FINISH_REASON_LENGTH, 4, 4 * 4 * 2)
        _, data, summary = await speak(running, request(".", format=tts_pb2.WAV))
        assert (summary.finish_reason, summary.num_frames, data) == (tts_pb2.FINISH_REASON_EMPTY, 0, b"")
        assert not summary.HasField("first_audio_ms")


async def test_sampling_defaults_and_drawn_seed(serve):
    async with serve() as running:
        seeds = set()
        for _ in range(3):
            header, data, _ = await speak(running, request(sampling={}))
            sampling = running.speech.utterances[-1].sampling
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 20)
            assert sampling.seed == header.seed
            np.testing.assert_array_equal(np.frombuffer(data, "<i2"), expected_samples(header.seed, 3))
            seeds.add(header.seed)
        assert len(seeds) == 3
        await speak(running, request(sampling={"temperature": 0.5, "top_p": 1.0, "top_k": 1, "seed": 0}))
        sampling = running.speech.utterances[-1].sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 1.0, 1, 0)


async def test_references_are_read_at_the_engines_rate(serve):
    async with serve() as running:
        references = [
            tts_pb2.Reference(audio=clip(3.0), transcript="first"),
            tts_pb2.Reference(audio=clip(0.5, 44100, 2), transcript="second"),
        ]
        await speak(running, request(references=references))
        first, second = running.speech.utterances[-1].references
        assert (first.text, first.codes_KT[0, 0]) == ("first", 3 * 22050)
        assert (second.text, second.codes_KT[0, 0]) == ("second", 22050 // 2)


BAD = {
    "empty text": (request(""), "'text' is empty"),
    "blank text": (request(" \t\n\u3000"), "'text' is empty or blank"),
    "long text": (request("w" * 70_000), "70000 bytes"),
    "refused by the model": (request("unpronounceable"), "cannot be spoken"),
    "temperature 0": (request(sampling={"temperature": 0.0}), "temperature must be above 0 and below 2"),
    "temperature 2": (request(sampling={"temperature": 2.0}), "temperature"),
    "temperature NaN": (request(sampling={"temperature": math.nan}), "temperature"),
    "temperature inf": (request(sampling={"temperature": math.inf}), "temperature"),
    "top_p 0": (request(sampling={"top_p": 0.0}), "top_p must be above 0"),
    "top_p NaN": (request(sampling={"top_p": math.nan}), "top_p"),
    "top_p 1.5": (request(sampling={"top_p": 1.5}), "top_p"),
    "top_k 0": (request(sampling={"top_k": 0}), "top_k must be a whole number in 1"),
    "top_k huge": (request(sampling={"top_k": 2**32 - 1}), "top_k"),
    "max_frames 0": (request(sampling={"max_frames": 0}), "max_frames"),
    "unknown format": (request(format=7), "format 7 cannot be streamed: ask for PCM_S16LE or WAV"),
    "unknown priority": (request(priority=9), "priority 9"),
    "reference without audio": (request(references=[tts_pb2.Reference(transcript="x")]), "reference 1 has no audio"),
    "reference without words": (request(references=[tts_pb2.Reference(audio=clip())]), "reference 1 has no transcript"),
    "undecodable reference": (
        request(references=[tts_pb2.Reference(audio=b"noise", transcript="x")]),
        "reference 1: the reference audio .5 bytes. cannot be decoded",
    ),
    "short second reference": (
        request(
            references=[
                tts_pb2.Reference(audio=clip(), transcript="x"),
                tts_pb2.Reference(audio=clip(0.1), transcript="x"),
            ]
        ),
        r"reference 2: .* lasts 0\.10 s",
    ),
    "long reference": (request(references=[tts_pb2.Reference(audio=clip(61, 8000), transcript="x")]), "longer than 60"),
    "many references": (request(references=[tts_pb2.Reference(audio=clip(), transcript="x")] * 9), "9 references"),
    "voice and references": (
        request(voice_id="anna", references=[tts_pb2.Reference(audio=clip(), transcript="x")]),
        "voice_id and references",
    ),
}


async def test_bad_input_is_refused_with_a_sentence_and_costs_nothing(serve):
    async with serve() as running:
        for name, (message, sentence) in BAD.items():
            error = await refused(running, message)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, name
            assert re.search(sentence, error.details()), f"{name}: {error.details()}"
            assert "/" not in error.details(), name
        assert running.engine.runs == []
        await idle(running)
        await speak(running, request())


async def test_unknown_voice(serve):
    async with serve() as running:
        error = await refused(running, request(voice_id="anna"))
        assert error.code() is grpc.StatusCode.NOT_FOUND


async def test_more_callers_than_slots_each_hear_their_own(serve):
    async with serve(FakeEngine(num_slots=3)) as running:

        async def one(seed):
            length = 1 + seed % 5
            _, data, _ = await speak(running, request("w " * length, sampling={"seed": seed}))
            np.testing.assert_array_equal(np.frombuffer(data, "<i2"), expected_samples(seed, length))

        await asyncio.gather(*(one(seed) for seed in range(40)))
        await idle(running)


async def test_full_queue_is_refused_at_once_with_a_retry_hint(serve):
    async with serve(FakeEngine(num_slots=1), max_queue=1) as running:
        running.engine.gate.close()
        calls = [running.tts.Synthesize(request("w " * 9), timeout=PATIENCE_S) for _ in range(2)]
        for call in calls:
            assert (await call.read()).HasField("header")
        error = await refused(running, request())
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"]) >= 1
        assert "try again in" in error.details()
        running.engine.gate.open()
        for call in calls:
            assert (await rest(call))[-1].summary.num_frames == 9
        await speak(running, request())


async def test_each_class_is_refused_by_its_own_queue(serve):
    async with serve(FakeEngine(num_slots=1), max_queue=1, max_batch_queue=1) as running:
        running.engine.gate.close()
        calls = []
        for priority in (tts_pb2.PRIORITY_UNSPECIFIED, tts_pb2.BATCH, tts_pb2.REALTIME, tts_pb2.STANDARD):
            calls.append(running.tts.Synthesize(request("w " * 9, priority=priority), timeout=PATIENCE_S))
            assert (await calls[-1].read()).HasField("header")
            await until(lambda: running.server._loop.desk.load()[0] == 1)
        for priority in (tts_pb2.BATCH, tts_pb2.REALTIME, tts_pb2.STANDARD):
            error = await refused(running, request(priority=priority))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert tts_pb2.Priority.Name(priority) in error.details()
            assert "grpc-retry-pushback-ms" in dict(error.trailing_metadata())
        running.engine.gate.open()
        for call in calls:
            assert (await rest(call))[-1].summary.num_frames == 9


async def test_batch_is_preempted_and_says_so(serve):
    async with serve(FakeEngine(num_slots=1)) as running:
        running.engine.gate.close()
        batch = running.tts.Synthesize(request("w " * 9, priority=tts_pb2.BATCH), timeout=PATIENCE_S)
        assert (await batch.read()).HasField("header")
        await until(lambda: running.server._loop.desk.load() == (1, 0))
        urgent = running.tts.Synthesize(request("w w", priority=tts_pb2.REALTIME), timeout=PATIENCE_S)
        assert (await urgent.read()).HasField("header")
        running.engine.gate.open()
        assert (await rest(urgent))[-1].summary.num_preemptions == 0
        answers = await rest(batch)
        assert answers[-1].summary.num_preemptions == 1
        data = b"".join(answer.audio.data for answer in answers)
        np.testing.assert_array_equal(np.frombuffer(data, "<i2"), expected_samples(1, 9))


async def test_who_cannot_start_in_time_costs_no_step(serve):
    async with serve(FakeEngine(num_slots=1)) as running:
        running.engine.gate.close()
        ahead = running.tts.Synthesize(request("w " * 9), timeout=PATIENCE_S)
        assert (await ahead.read()).HasField("header")
        late = running.tts.Synthesize(request("w " * 500), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(late)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: running.server._loop.desk.load() == (1, 0))
        running.engine.gate.open()
        assert (await rest(ahead))[-1].summary.num_frames == 9
        assert [entry[0] for entry in running.engine.trace].count("prefill") == 1


@pytest.mark.parametrize("when", ["before the first chunk", "in the middle", "at the end", "while waiting"])
async def test_a_caller_that_goes_away_frees_its_slot_within_two_steps(serve, when):
    async with serve(FakeEngine(num_slots=1)) as running:
        engine = running.engine
        engine.gate.close()
        if when == "while waiting":
            ahead = running.tts.Synthesize(request("w " * 50), timeout=PATIENCE_S)
            await ahead.read()
            await until(lambda: running.server._loop.desk.load() == (1, 0))
        call = running.tts.Synthesize(request("w " * 5), timeout=PATIENCE_S)
        assert (await call.read()).HasField("header")
        await until(lambda: running.server._loop.desk.load() == ((1, 1) if when == "while waiting" else (1, 0)))
        steps = {"before the first chunk": 0, "in the middle": 3, "at the end": 5, "while waiting": 0}[when]
        for step in range(steps):
            engine.gate.allow(1)
            if step > 0:
                assert (await call.read()).audio.num_frames == 1
        call.cancel()
        if when == "while waiting":
            await until(lambda: running.server._loop.desk.load() == (1, 0))
            ahead.cancel()
        await idle(running)  # freed though the gate is closed: no step is needed to give the slot up
        before = len(engine.runs)
        engine.gate.open()
        _, data, _ = await speak(running, request("x", sampling={"seed": 8}))
        np.testing.assert_array_equal(np.frombuffer(data, "<i2"), expected_samples(8, 1))
        freed = [i for i, entry in enumerate(engine.trace) if entry == ("free", 0)]
        steps_seen = [i for i, entry in enumerate(engine.trace) if entry[0] == "step"]
        assert sum(before_free < freed[0] for before_free in steps_seen) <= before + 1


async def test_many_that_go_away_leave_nothing_behind(serve, caplog):
    async with serve(FakeEngine(num_slots=2)) as running:

        async def leave(number):
            call = running.tts.Synthesize(request("w " * 200), timeout=PATIENCE_S)
            for _ in range(number % 4):
                await call.read()
            call.cancel()

        for start in range(0, 200, 20):
            await asyncio.gather(*(leave(start + i) for i in range(20)))
        await idle(running)
        assert running.server._loop.desk._requests == {}
        await speak(running, request())
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


async def test_a_deadline_ends_the_work(serve):
    async with serve(FakeEngine(num_slots=1)) as running:
        running.engine.gate.close()
        call = running.tts.Synthesize(request("w " * 500), timeout=0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await idle(running)
        running.engine.gate.open()
        await speak(running, request())
        assert len(running.engine.runs) < 10


async def test_a_fault_in_a_step_is_a_clear_status_and_not_serving(serve, caplog):
    async with serve(FakeEngine(num_slots=1)) as running:
        running.engine.gate.close()
        calls = [running.tts.Synthesize(request("w " * 50), timeout=PATIENCE_S)]
        assert (await calls[0].read()).HasField("header")
        await until(lambda: running.server._loop.desk.load()[0] == 1)
        calls.append(running.tts.Synthesize(request("w " * 50), timeout=PATIENCE_S))
        assert (await calls[1].read()).HasField("header")
        running.engine.fault = RuntimeError("device lost at /secret/path")
        running.engine.gate.open()
        codes = {}
        for number, call in enumerate(calls):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rest(call)
            codes[number] = caught.value.code()
            assert "secret" not in caught.value.details()
            assert "engine failed" in caught.value.details()
        assert codes == {0: grpc.StatusCode.INTERNAL, 1: grpc.StatusCode.UNAVAILABLE}
        assert await health(running) == NOT_SERVING
        assert (await refused(running, request())).code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(running.server.failed(), PATIENCE_S)
        assert "device lost" in caplog.text


async def test_a_fault_of_the_encoder_loses_that_request_only(serve, caplog):
    async with serve() as running:
        running.engine.references.fault = RuntimeError("/secret/path")
        message = request(references=[tts_pb2.Reference(audio=clip(), transcript="x")])
        error = await refused(running, message)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in error.details()
        running.engine.references.fault = EngineFailed("/secret/path")
        error = await refused(running, message)
        assert error.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in error.details()
        assert caplog.text.count("/secret/path") >= 2
        await idle(running)
        await speak(running, request())


async def test_health_follows_the_warm_up(serve):
    engine = FakeEngine()
    engine.warmup_gate.close()
    async with serve(engine, wait_ready=False) as running:
        assert await health(running) == NOT_SERVING
        assert await health(running, "fishjax.rpc.v1.Tts") == NOT_SERVING
        error = await refused(running, request())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "warming up" in error.details()
        engine.warmup_gate.open()
        await asyncio.wait_for(running.server.ready(), PATIENCE_S)
        assert await health(running) == SERVING
        assert await health(running, "fishjax.rpc.v1.Tts") == SERVING
        await speak(running, request())


async def test_a_failed_warm_up_is_told(serve):
    engine = FakeEngine(warmup_fault=MemoryError("no room"))
    async with serve(engine, wait_ready=False) as running:
        with pytest.raises(NotReady):
            await asyncio.wait_for(running.server.ready(), PATIENCE_S)
        assert await health(running) == NOT_SERVING


async def test_stopping_while_warming_up(serve):
    engine = FakeEngine()
    engine.warmup_gate.close()
    async with serve(engine, wait_ready=False) as running:
        pass
    assert running.server._loop.desk.state is LoopState.STOPPED
    assert not running.server._loop._thread.is_alive()


@contextlib.asynccontextmanager
async def draining(serve):
    """A server that has been told to stop while it speaks; what it says is whole, and then it has stopped."""
    async with serve() as running:
        running.engine.gate.close()
        call = running.tts.Synthesize(request("w " * 5), timeout=PATIENCE_S)
        assert (await call.read()).HasField("header")
        stopping = asyncio.create_task(running.server.stop(drain_s=PATIENCE_S))
        await until(lambda: running.server._loop.desk.state is LoopState.DRAINING)
        yield running
        running.engine.gate.open()
        assert (await rest(call))[-1].summary.num_frames == 5
        await stopping


async def test_draining_lets_running_speech_end(serve):
    async with draining(serve):
        pass


async def test_reflection_lists_the_services(serve):
    async with serve() as running:
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert names >= {"fishjax.rpc.v1.Tts", "grpc.health.v1.Health"}


async def test_server_info(serve):
    async with serve(FakeEngine(num_slots=1), max_queue=5) as running:
        running.engine.gate.close()
        calls = [running.tts.Synthesize(request("w " * 9), timeout=PATIENCE_S) for _ in range(3)]
        for call in calls:
            await call.read()
        await until(lambda: running.server._loop.desk.load() == (1, 2))
        info = await running.tts.GetServerInfo(tts_pb2.GetServerInfoRequest())
        assert info.version == fishjax.__version__
        assert (info.model, info.sample_rate_hz, info.samples_per_frame, info.num_codebooks) == ("fake", 22050, 4, 3)
        assert (info.num_slots, info.max_len, info.max_queue, info.max_batch_queue) == (1, 64, 5, 256)
        assert (info.slots_busy, info.queue_length) == (1, 2)
        assert list(info.formats) == [tts_pb2.PCM_S16LE, tts_pb2.WAV]
        assert info.default_sampling.temperature == pytest.approx(0.7)
        assert not info.default_sampling.HasField("seed")
        assert not info.default_sampling.HasField("max_frames")
        assert info.max_message_bytes == 32 * 1024 * 1024
        for call in calls:
            call.cancel()


async def test_oversized_message(serve):
    async with serve(max_message_bytes=100_000) as running:
        message = request(references=[tts_pb2.Reference(audio=bytes(200_000), transcript="x")])
        error = await refused(running, message)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await speak(running, request())


SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


async def test_a_slow_reader_is_cut_off_and_holds_nobody_up(serve):
    engine = FakeEngine(num_slots=1, samples_per_frame=2048)
    async with serve(engine, slow_reader_s=0.3, max_unread_s=1.0, channel_options=SMALL_WINDOW) as running:
        slow = running.tts.Synthesize(request("w " * 3000), timeout=PATIENCE_S)
        await slow.read()
        # It reads no more. The slot goes to the next caller once it is cut off.
        _, data, _ = await speak(running, request("w " * 5, sampling={"seed": 2}))
        np.testing.assert_array_equal(np.frombuffer(data, "<i2"), expected_samples(2, 5, 2048))
        await idle(running)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(slow)
        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "fell 0.3 s behind" in caught.value.details()
        assert len(engine.runs) < 1000  # the slot paused long before the text's end


async def test_a_reader_that_never_reads_is_let_go_altogether(serve, monkeypatch, caplog):
    """The status waits behind the unread sound, perhaps for ever; the server does not wait with it."""
    monkeypatch.setattr("serving.call.GOODBYE_S", 0.1)
    engine = FakeEngine(num_slots=1, samples_per_frame=2048)
    async with serve(engine, slow_reader_s=0.1, max_unread_s=1.0, channel_options=SMALL_WINDOW) as running:
        call = running.tts.Synthesize(request("w " * 3000), timeout=PATIENCE_S)
        await call.read()
        await until(lambda: "let go without waiting" in caplog.text)
        await idle(running)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_a_reader_at_playing_speed_is_not_cut_off(serve):
    """64 frames of 46 ms, of which 0.2 s may wait unread: patience of 1 s is enough for one who keeps pace."""
    engine = FakeEngine(num_slots=1, samples_per_frame=1024)
    async with serve(engine, slow_reader_s=1.0, max_unread_s=0.2, channel_options=SMALL_WINDOW) as running:
        call = running.tts.Synthesize(request("w " * 64), timeout=PATIENCE_S)
        num_frames = 0
        async for answer in call:
            if answer.HasField("audio"):
                num_frames += answer.audio.num_frames
                await asyncio.sleep(answer.audio.num_frames * 1024 / 22050)
        assert num_frames == 64


async def test_the_port_can_be_had_once(serve):
    async with serve() as running:
        port = int(running.server.address.rpartition(":")[2])
        second = build(FakeSpeech(), ServerConfig(port=port))
        with pytest.raises(InvalidRequest, match=f"cannot listen on 127.0.0.1:{port}"):
            await second.start()
        await second.stop(0)


@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_an_address_of_ipv6_may_come_without_brackets(serve, host):
    async with serve(host=host) as running:
        assert running.server.address.startswith("[::1]:")
        await speak(running, request())


async def test_the_client_speaks_to_it(serve, tmp_path):
    async with serve() as running:
        (tmp_path / "voice.wav").write_bytes(clip())

        def talk():
            with Client(running.server.address) as client:
                client.wait_ready(PATIENCE_S)
                assert client.server_info().num_slots == 2
                assert list(client.synthesize("a", priority=tts_pb2.BATCH))
                speech = client.synthesize("a b c", seed=3, references=[(tmp_path / "voice.wav", "hello")])
                assert speech.header.seed == 3
                samples = np.concatenate([chunk.samples for chunk in speech])
                wav = b"".join(chunk.data for chunk in client.synthesize("a b", seed=4, audio_format=tts_pb2.WAV))
                assert list(client.synthesize("a", references=None, voice_id=None, audio_format=None, priority=None))
                for broken in ({"text": "a\udcff"}, {"text": "a", "voice_id": "b\ud800"}):
                    with pytest.raises(InvalidRequest, match="is a lone surrogate"):
                        client.synthesize(**broken)
                with pytest.raises(TypeError, match="no option 'sede'"):
                    client.synthesize("a", sede=3)  # pyright: ignore
                with pytest.raises(grpc.RpcError) as caught:
                    list(client.synthesize(" "))
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                return samples, speech.summary, wav

        samples, summary, wav = await asyncio.to_thread(talk)
        np.testing.assert_array_equal(samples, expected_samples(3, 3))
        assert summary.num_frames == 3
        with wave.open(io.BytesIO(wav)) as sound:
            assert sound.getframerate() == 22050


async def test_the_client_waits_for_ready(serve):
    engine = FakeEngine()
    engine.warmup_gate.close()
    async with serve(engine, wait_ready=False) as running:

        def wait(timeout_s):
            with Client(running.server.address) as client:
                client.wait_ready(timeout_s)

        with pytest.raises(TimeoutError, match="NOT_SERVING"):
            await asyncio.to_thread(wait, 0.2)
        waiting = asyncio.create_task(asyncio.to_thread(wait, PATIENCE_S))
        engine.warmup_gate.open()
        await waiting


async def test_who_is_left_at_the_end_of_the_drain_is_told_so(serve):
    """Running, waiting for a slot, waiting for text, or not even asked yet: none of them has left by itself."""
    async with serve(FakeEngine(num_slots=1)) as running:
        running.engine.gate.close()
        calls = [running.tts.Synthesize(request("w " * 50), timeout=PATIENCE_S) for _ in range(3)]
        calls.append(running.tts.SynthesizeLive(timeout=PATIENCE_S))
        await calls[-1].write(tts_pb2.SynthesizeLiveRequest(start=tts_pb2.LiveStart()))
        for call in calls:
            assert (await call.read()).HasField("header")
        calls.append(running.channel.stream_stream("/fishjax.rpc.v1.Tts/Synthesize")(timeout=PATIENCE_S))
        await until(lambda: len(running.server._calls._here) == 5)
        stopping = asyncio.create_task(running.server.stop(drain_s=0.1))
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rest(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "shutting down and could not wait for this call" in caught.value.details()
        running.engine.gate.open()
        await asyncio.wait_for(stopping, PATIENCE_S)
        outcome = running.server.metrics.registry.get_sample_value
        for rpc, number in (("Synthesize", 4.0), ("SynthesizeLive", 1.0)):
            assert outcome("fishjax_requests_total", {"rpc": rpc, "outcome": "unavailable"}) == number
            assert outcome("fishjax_requests_total", {"rpc": rpc, "outcome": "cancelled"}) is None


async def test_new_calls_are_told_of_the_drain_and_health_of_the_end(serve):
    async with draining(serve) as running:
        error = await refused(running, request())
        assert error.code() is grpc.StatusCode.UNAVAILABLE and "shutting down" in error.details()
        assert await health(running) == NOT_SERVING
