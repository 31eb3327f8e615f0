"""Real processes: callers on a server of numbers, the command and a soak on the small voice."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner

from fishjax.bench import __main__ as command_line
from fishjax.bench.serve import loads, mischief, rows
from fishjax.bench.serve.call import OK, Call
from fishjax.bench.serve.drive import drive
from fishjax.bench.serve.failed import MeasurementFailed
from fishjax.bench.serve.listen import listen
from fishjax.bench.serve.plan import Requests
from fishjax.bench.serve.prompts import prompt
from fishjax.bench.serve.server import ServerProcess
from fishjax.rpc.v1 import tts_pb2, tts_pb2_grpc
from serving._testing import FakeEngine, FakeSpeech
from serving.config import ServerConfig
from serving.server import build

runner = CliRunner()
SEED = 5


class TimedEngine(FakeEngine):
    """A step takes a while, as on a device."""

    step_s = 0.004

    def step(self, run):
        time.sleep(self.step_s)
        return super().step(run)


@pytest.fixture
async def serve():
    """Starts a server of numbers: its address."""
    servers = []

    async def start(**limits):
        server = build(FakeSpeech(TimedEngine()), ServerConfig(port=0, **limits))
        servers.append(server)
        await server.start()
        await server.ready()
        return server.address

    yield start
    for server in servers:
        await server.stop(drain_s=0)


async def test_callers_of_a_closed_loop_keep_their_slots_busy_and_hear_all_of_it(serve):
    load = loads.closed(Requests(SEED), 2, 2.0, 40)
    seen = await drive(await serve(), load.load, load.width)
    row = rows.make_row(seen, load.about, num_slots=2, gpu_price=None)
    assert row["failed"] == row["broken"] == row["rejected"] == 0
    assert row["heard"] == row["calls"] > 3
    assert row["slot_utilisation"] > 0.5
    assert 0 < row["ttfa_ms_p50"] <= row["ttfa_ms_p99"]
    first, *_ = sorted(seen.calls, key=lambda call: call.called_s)
    words = [len(prompt(SEED, number).split()) for number in (40, 41)]
    assert sum(n for _, n in first.arrivals) in words  # of these numbers a word is a frame
    assert len(seen.calls) >= row["calls"] and max(call.called_s for call in seen.calls) < seen.to_s


async def test_an_open_loop_calls_when_it_is_time_whatever_became_of_those_before(serve):
    load = loads.opened(Requests(SEED), 60.0, 1.5, 0, 8, bursty=False, loop="overload")
    times = load.load.plans[0].arrivals
    seen = await drive(await serve(max_queue=0), load.load, load.width)
    assert len(seen.calls) == len(times)
    start_s = min(call.called_s for call in seen.calls) - times[0]
    late_s = [call.called_s - start_s - at_s for call, at_s in zip(_in_order(seen.calls), times, strict=True)]
    assert sorted(late_s)[len(late_s) // 2] < 0.1
    row = rows.make_row(seen, load.about, num_slots=2, gpu_price=None)
    assert row["rejected"] > 0 and row["rejected_with_hint"] == 1.0 and row["heard"] > 0


def _in_order(calls):
    return sorted(calls, key=lambda call: call.called_s)


async def test_fill_requests_take_the_idle_slots_of_the_same_trace(serve):
    address = await serve()
    real = loads.opened(Requests(SEED, priority="REALTIME"), 4.0, 2.0, 0, 2, bursty=True, loop="lane, real alone")
    busy = []
    for load in (real, loads.lane(real, Requests(SEED, priority="BATCH"), 2, 1000)):
        seen = await drive(address, load.load, load.width)
        row = rows.make_row(seen, load.about, num_slots=2, gpu_price=None)
        assert row["failed"] == row["broken"] == 0
        assert sum(call.lane == "real" for call in seen.calls) == len(real.load.plans[0].arrivals)
        busy.append(row["slot_utilisation"])
    assert busy[0] + 0.2 < busy[1] > 0.7


async def test_every_bad_manner_ends_as_it_must(serve):
    address = await serve()
    ended = {}
    async with grpc.aio.insecure_channel(address) as channel:
        stub = tts_pb2_grpc.TtsStub(channel)
        calls = await asyncio.gather(*(_misbehave(stub, number) for number in range(60)))
    for call in calls:
        ended.setdefault(call.does, set()).add(call.status)
        assert not call.problem
    assert set(ended) == set(mischief.EXPECTED)
    for does, statuses in ended.items():
        assert statuses <= mischief.EXPECTED[does], does
    assert "CANCELLED" in ended["leaves in the middle"]


async def _misbehave(stub, number):
    request = tts_pb2.SynthesizeRequest(text=prompt(SEED, number))
    return await mischief.misbehave(stub, request, number, "real")


def _children(pid):
    """Processes that a process has started: id -> command line."""
    shown = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in shown.splitlines()]
    return {int(row[0]): row[2] for row in rows if int(row[1]) == pid}


def test_a_bench_that_is_told_to_end_takes_its_server_along():
    """`timeout` sends SIGTERM; a server that stays would hold the device."""
    command = [sys.executable, "-m", "fishjax.bench", "serve", "--slots", "1", "--concurrency", "1"]
    bench = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        servers = []
        while not servers:
            assert bench.poll() is None
            time.sleep(0.05)
            servers = [pid for pid, command in _children(bench.pid).items() if "-m serving" in command]
        bench.terminate()
        assert bench.wait(60) == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            os.kill(servers[0], 0)
    finally:
        bench.kill()
        bench.wait()


@pytest.mark.parametrize("broken", ["a frame is lost", "the summary is lost", "half a frame"])
async def test_a_listener_notices_what_is_missing(broken):
    def audio(first_frame, size=8):
        return tts_pb2.SynthesizeResponse(audio=tts_pb2.Audio(data=bytes(size), first_frame=first_frame, num_frames=1))

    header = tts_pb2.SynthesizeResponse(header=tts_pb2.Header(sample_rate_hz=100, samples_per_frame=4))
    summary = tts_pb2.SynthesizeResponse(summary=tts_pb2.Summary(num_frames=2))
    answers = {
        "a frame is lost": [header, audio(0), audio(2), summary],
        "the summary is lost": [header, audio(0), audio(1)],
        "half a frame": [header, audio(0), audio(1, 4), summary],
    }

    class Servicer(tts_pb2_grpc.TtsServicer):
        async def Synthesize(self, request, context):
            for answer in answers[broken]:
                yield answer

    server = grpc.aio.server()
    tts_pb2_grpc.add_TtsServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = Call("real", "listens", time.monotonic())
        await listen(tts_pb2_grpc.TtsStub(channel), tts_pb2.SynthesizeRequest(text="a"), call)
    await server.stop(None)
    assert call.status == OK and call.problem


def test_a_server_that_does_not_come_up_is_told_with_its_log():
    with pytest.raises(MeasurementFailed, match="No such option"), ServerProcess(["--no-such-option"]):
        pass


@pytest.mark.parametrize(
    "arguments",
    [
        ["--concurrency", "two"],
        ["--rate", "0"],
        ["--voices", "warm"],
        ["--address", "127.0.0.1:1", "--check"],
        ["--address", "127.0.0.1:1", "--freeze"],
        ["--address", "127.0.0.1:1", "--soak", "20"],
        ["--freeze", "--concurrency", "3"],
        ["--freeze", "--soak", "100"],
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench", "serve", *arguments])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 2
    assert "error: --" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_exit_1_and_a_sentence():
    done = runner.invoke(command_line.app, ["serve", "--address", "127.0.0.1:1"])
    assert done.exit_code == 1
    assert "the server answered UNAVAILABLE" in done.stderr and "Traceback" not in done.output


@pytest.fixture(scope="module")
def small_voice():
    with ServerProcess(["--slots", "2", "--max-len", "512"]) as server:
        assert server.start_s > 0 and server.rss_mb() > 10
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("voices", ["cached", "cold"])
def test_the_command_measures_a_server(small_voice, tmp_path, voices):
    out = tmp_path / "serve.json"
    arguments = ["serve", "--address", small_voice.address, "--concurrency", "1", "--rate", "1", "--voices", voices]
    arguments += ["--seconds", "4", "--gpu-price", "2", "--max-frames", "12", "--out", str(out), "--json"]
    done = runner.invoke(command_line.app, arguments)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout.splitlines()[-1])
    assert document == json.loads(out.read_text())
    assert document["header"]["suite"] == "serve" and document["header"]["device"] == "server-elsewhere"
    assert [row["loop"] for row in document["rows"]] == ["closed", "poisson"]
    for row in document["rows"]:
        assert row["heard"] == row["calls"] > 0 and row["voices"] == voices
        assert row["cost_per_hour_of_audio"] > 0 and row["slots"] == 2
    log = Path(small_voice.log_path).read_text()
    assert "fault" not in log
