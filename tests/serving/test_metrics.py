"""What the server counts, read as Prometheus reads it."""

import asyncio
import json
import logging
import urllib.error
import urllib.request

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fishjax.errors import InvalidRequest
from fishjax.rpc.v1 import tts_pb2
from serving._testing import PATIENCE_S, FakeEngine, FakeSpeech, FakeVoices
from serving.config import ServerConfig
from serving.metrics import Metrics
from serving.server import build


async def scrape(running):
    """Samples by (name, labels in order)."""

    def get():
        with urllib.request.urlopen(f"http://{running.server.metrics_address}/metrics", timeout=PATIENCE_S) as answer:
            return answer.read().decode()

    families = text_string_to_metric_families(await asyncio.to_thread(get))
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


async def scrape_until(running, **wanted):
    """Scrape until as many requests have these outcomes: they are counted just after the caller has its answer."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            samples = await scrape(running)
            counts = {name: samples.get(("fishjax_requests_total", name, "Synthesize"), 0) for name in wanted}
            if counts == wanted:
                return samples
            await asyncio.sleep(0.01)


async def speak(running, text, timeout=PATIENCE_S, **fields):
    request = tts_pb2.SynthesizeRequest(text=text, **fields)
    return [answer async for answer in running.tts.Synthesize(request, timeout=timeout)]


async def finish(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_requests_sound_and_times(serve):
    async with serve(FakeEngine(num_slots=1), metrics_port=0) as running:
        await speak(running, "a b c")
        await speak(running, "a b", priority=tts_pb2.REALTIME)
        await speak(running, "a b c", sampling=tts_pb2.Sampling(max_frames=1))
        with pytest.raises(grpc.aio.AioRpcError):
            await speak(running, " ")
        await running.tts.GetServerInfo(tts_pb2.GetServerInfoRequest())
        samples = await scrape_until(running, stop=2, length=1, invalid_argument=1)
        assert samples["fishjax_requests_total", "ok", "GetServerInfo"] == 1
        assert samples["fishjax_sound_seconds_total",] == pytest.approx(6 * 4 / 22050)
        for name in ("time_to_first_sound_seconds", "queue_wait_seconds"):
            assert samples[f"fishjax_{name}_count", "STANDARD", "Synthesize"] == 2
            assert samples[f"fishjax_{name}_count", "REALTIME", "Synthesize"] == 1
        first = samples["fishjax_time_to_first_sound_seconds_sum", "STANDARD", "Synthesize"]
        assert 0 < samples["fishjax_queue_wait_seconds_sum", "STANDARD", "Synthesize"] <= first < 2 * PATIENCE_S
        assert samples["fishjax_real_time_factor_ratio_count", "STANDARD"] == 2
        # Of each request: its frames, its end and the step in flight, but for the first of them.
        assert samples["fishjax_step_seconds_count",] >= 6
        assert samples["fishjax_step_seconds_sum",] < PATIENCE_S
        assert (samples["fishjax_busy_slots",], samples["fishjax_waiting_requests",]) == (0, 0)


async def test_voices_that_were_copied_and_read(serve):
    async with serve(FakeEngine(voices=FakeVoices(hits=7, misses=2, num_bytes=4096)), metrics_port=0) as running:
        samples = await scrape(running)
        assert samples["fishjax_voice_hits_total",] == 7
        assert samples["fishjax_voice_misses_total",] == 2
        assert samples["fishjax_voice_bytes",] == 4096
        running.engine.voices.hits = 8
        assert (await scrape(running))["fishjax_voice_hits_total",] == 8


async def test_load_preemptions_and_callers_that_leave(serve):
    async with serve(FakeEngine(num_slots=1), metrics_port=0) as running:
        running.engine.gate.close()
        request = tts_pb2.SynthesizeRequest(text="w " * 9, priority=tts_pb2.BATCH)
        batch = running.tts.Synthesize(request, timeout=PATIENCE_S)
        await batch.read()
        while running.server._loop.desk.load() != (1, 0):
            await asyncio.sleep(0.001)
        waiting = running.tts.Synthesize(request, timeout=PATIENCE_S)
        await waiting.read()
        samples = await scrape(running)
        assert (samples["fishjax_busy_slots",], samples["fishjax_waiting_requests",]) == (1, 1)
        waiting.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await speak(running, "w", timeout=1.0)
        await scrape_until(running, cancelled=1, deadline_exceeded=1)
        urgent = running.tts.Synthesize(tts_pb2.SynthesizeRequest(text="a b"), timeout=PATIENCE_S)
        await urgent.read()
        running.engine.gate.open()
        await finish(urgent)
        await finish(batch)
        samples = await scrape_until(running, cancelled=1, deadline_exceeded=1, stop=2)
        assert samples["fishjax_preemptions_total",] == 1


async def test_late_sound_is_an_underrun(serve):
    """46 ms of sound, then nothing for 100 ms, then the end."""
    async with serve(FakeEngine(num_slots=1, samples_per_frame=1024), metrics_port=0) as running:
        running.engine.gate.close()
        call = running.tts.Synthesize(tts_pb2.SynthesizeRequest(text="w " * 2), timeout=PATIENCE_S)
        await call.read()
        running.engine.gate.allow(2)
        assert (await call.read()).audio.num_frames == 1
        await asyncio.sleep(0.1)
        running.engine.gate.open()
        await finish(call)
        samples = await scrape_until(running, stop=1)
        assert samples["fishjax_underruns_total", "STANDARD"] == 1


def test_names_say_what_and_in_which_unit():
    units = {"seconds", "ratio", "slots", "requests", "underruns", "preemptions", "hits", "misses", "bytes"}
    metrics = Metrics()
    metrics.watch(lambda: (0, 0), FakeVoices())
    for family in metrics.registry.collect():
        assert family.name.startswith("fishjax_")
        assert family.name.rpartition("_")[2] in units, family.name
        assert family.documentation


async def test_two_servers_count_apart_and_the_loopback_alone_is_served(serve):
    async with serve(metrics_port=0) as one, serve(metrics_port=0) as other:
        await speak(one, "a")
        await scrape_until(one, stop=1)
        await scrape_until(other, stop=0)
        assert one.server.metrics_address.startswith("127.0.0.1:")
        address = one.server.metrics_address
        port = int(address.rpartition(":")[2])
        second = build(FakeSpeech(), ServerConfig(port=0, metrics_port=port))
        with pytest.raises(InvalidRequest, match=f"cannot listen on 127.0.0.1:{port} for metrics"):
            await second.start()
        await second.stop(0)
    with pytest.raises(urllib.error.URLError):
        await asyncio.to_thread(urllib.request.urlopen, f"http://{address}/metrics", timeout=1)


async def test_without_a_port_nothing_is_served(serve):
    async with serve() as running:
        assert running.server.metrics_address == ""


async def test_each_call_leaves_one_line_of_figures(serve, caplog):
    caplog.set_level(logging.INFO)
    async with serve() as running:
        answers = await speak(running, "a b c")
        with pytest.raises(grpc.aio.AioRpcError):
            await speak(running, " ")
        async with asyncio.timeout(PATIENCE_S):
            while caplog.text.count("call ended") < 2:
                await asyncio.sleep(0.001)
    good, bad = (record for record in caplog.records if "call ended" in record.getMessage())
    assert good.figures["outcome"] == "stop"
    assert (good.figures["num_frames"], good.figures["priority"], good.figures["key"]) == (3, "STANDARD", "-")
    assert 0 <= good.figures["queue_ms"] <= good.figures["first_audio_ms"] <= good.figures["total_ms"]
    assert bad.figures == {"rpc": "Synthesize", "key": "-", "outcome": "invalid_argument"}
    json.dumps([good.figures, bad.figures])
    assert answers[0].header.request_id
