"""The process: signals, exit codes, the command line."""

import asyncio
import logging
import os
import re
import signal
import socket
import subprocess
import sys

import grpc
import pytest
from typer.testing import CliRunner

import fishjax.speech
import serving.__main__ as command_line
from fishjax.errors import InvalidRequest
from fishjax.rpc.v1 import tts_pb2, tts_pb2_grpc
from serving.__main__ import run
from serving._testing import PATIENCE_S, FakeEngine, FakeSpeech
from serving.config import ServerConfig


async def address_of(caplog):
    """The address that the server logged."""
    async with asyncio.timeout(PATIENCE_S):
        while not (found := re.search(r"listening on (\S+);", caplog.text)):
            await asyncio.sleep(0.001)
    return found.group(1)


@pytest.fixture
def process(caplog):
    caplog.set_level("INFO")
    engine = FakeEngine()
    config = ServerConfig(port=0, drain_s=10 * PATIENCE_S, failure_linger_s=0.1)
    yield lambda: asyncio.create_task(run(FakeSpeech(engine), config)), engine
    engine.gate.open()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def times_stopped(caplog):
    """How many lines of the log say so."""
    return sum("stopped" in record.getMessage() for record in caplog.records)


async def start_speaking(address):
    channel = grpc.aio.insecure_channel(address)
    request = tts_pb2.SynthesizeRequest(text="w " * 20)
    call = tts_pb2_grpc.TtsStub(channel).Synthesize(request, timeout=PATIENCE_S, wait_for_ready=True)
    assert (await call.read()).HasField("header")
    return channel, call


async def test_a_signal_drains_and_exits_0(process, caplog):
    start, engine = process
    engine.gate.close()
    running = start()
    channel, call = await start_speaking(await address_of(caplog))
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_S):
        while "stopping; running requests have" not in caplog.text:
            await asyncio.sleep(0.001)
    engine.gate.open()
    answer = None
    while (message := await call.read()) is not grpc.aio.EOF:
        answer = message
    assert answer.summary.num_frames == 20
    assert await asyncio.wait_for(running, PATIENCE_S) == 0
    assert times_stopped(caplog) == 1
    await channel.close()


async def test_a_second_signal_does_not_wait(process, caplog):
    start, engine = process
    engine.gate.close()
    running = start()
    channel, call = await start_speaking(await address_of(caplog))
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(PATIENCE_S):
        while "stopping; running requests have" not in caplog.text:
            await asyncio.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    engine.gate.open()  # the step at the gate is the one the loop still ends
    assert await asyncio.wait_for(running, PATIENCE_S) == 0
    assert times_stopped(caplog) == 1
    await channel.close()


async def test_a_failed_engine_ends_the_process_with_1(process, caplog):
    start, engine = process
    engine.fault = RuntimeError("device lost")
    running = start()
    channel, call = await start_speaking(await address_of(caplog))
    with pytest.raises(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    assert await asyncio.wait_for(running, PATIENCE_S) == 1
    assert "because the engine failed" in caplog.text
    await channel.close()


def serving(*arguments):
    return subprocess.run([sys.executable, "-m", "serving", *arguments], capture_output=True, text=True, timeout=120)


def test_help_names_units_and_defaults():
    result = serving("--help")
    assert result.returncode == 0
    for option in (
        "--max-batch-queue",
        "--voices",
        "--api-keys",
        "--tls-cert",
        "--tls-client-ca",
        "--metrics-port",
        "--compile-cache",
    ):
        assert option in result.stdout
    for option in ("--model", "--slots", "--max-len", "--host", "--port", "--precision", "127.0.0.1", "50051"):
        assert option in result.stdout
    assert "Seconds" in result.stdout


def test_usage_errors_exit_2():
    assert serving("--slots", "0").returncode == 2
    assert serving("--port", "70000").returncode == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--api-keys {folder}/none", "the file of API keys cannot be read: No such file or directory"),
        ("--tls-cert {folder}/none", "tls_cert and tls_key belong together: give both or neither"),
        ("--voices {folder}/file", "the folder of voices cannot be had: a file is in its place"),
        ("--voices {folder}/file/x", "the folder of voices cannot be had: a file is in its place"),
        ("--voices /proc/x", "the folder of voices cannot be had: No such file or directory"),
        ("--port {taken}", "cannot listen on 127.0.0.1:{taken}: the port is taken"),
        ("--port 0 --metrics-port {taken}", "cannot listen on 127.0.0.1:{taken} for metrics: the port is taken"),
        ("--host bogus.invalid --port 5", "'bogus.invalid' is no address, and no name that resolves to one"),
        ("--host 192.0.2.1 --port 0", "cannot listen on 192.0.2.1:0: the address is not this machine's"),
        ("--host 2001:db8::1 --port 0", "cannot listen on [2001:db8::1]:0: the address is not this machine's"),
    ],
)
def test_mistakes_that_need_no_model_are_one_sentence_before_it_is_loaded(tmp_path, options, sentence):
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        values = {"folder": tmp_path, "taken": somebody.getsockname()[1]}
        result = serving(*options.format(**values).split())
        assert result.returncode == 2
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        assert sentence.format(**values) in result.stderr and str(tmp_path) not in result.stderr


def test_slots_too_short_to_speak_are_refused_at_start():
    result = serving("--slots", "1", "--max-len", "106", "--port", "0")  # minnow: 66 columns ask for a letter, 41 speak
    assert result.returncode == 2
    assert "error: --max-len must be at least 107 for this model, not 106" in result.stderr
    assert "listening" not in result.stderr


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Runs the command line up to where it would serve: (result, arguments of `load`, configuration)."""
    seen = {}

    def load(model, **options):
        seen["options"] = options
        return FakeSpeech()

    async def run(speech, config):
        seen["config"] = config
        return 0

    monkeypatch.setattr(fishjax.speech, "load", load)
    monkeypatch.setattr(command_line, "run", run)
    monkeypatch.setattr(command_line, "check", lambda config: None)  # of this machine's ports and folders
    monkeypatch.setattr(FakeEngine, "memory", "none", raising=False)

    def start(*arguments, file=None, environment=None):
        seen.clear()
        if file is not None:
            (tmp_path / "server.toml").write_text(file)
            arguments = (*arguments, "--config", str(tmp_path / "server.toml"))
        cache = ("--compile-cache", str(tmp_path / "cache"))
        result = CliRunner().invoke(command_line.app, [*cache, *arguments], env=environment)
        return result, seen.get("options"), seen.get("config")

    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield start
    root.handlers[:] = handlers  # those of the command line write to what the runner has closed
    root.setLevel(level)


def test_memory_for_voices_is_given_in_mebibytes(started):
    assert started("--voice-memory", "3")[1]["voice_bytes"] == 3 * 2**20
    assert started()[1]["voice_bytes"] == 512 * 2**20


def test_the_fused_step_is_left_to_the_chip_unless_one_is_named(started):
    assert started()[1]["fused"] is None
    assert started("--fused", "both")[1]["fused"] == "both"
    assert started(environment={"FISHJAX_FUSED": "slow"})[1]["fused"] == "slow"
    assert started(file='fused = "none"')[1]["fused"] == "none"


def test_a_fused_step_of_a_model_that_the_kernels_do_not_know_is_a_usage_error():
    result = serving("--fused", "slow", "--port", "0")
    assert result.returncode == 2
    assert "fused kernels do not know this model: the slow transformer's weights are not FP8" in result.stderr


FILE = 'slots = 8\nmax-queue = 5\ndrain = 1\nhost = "::1"\nlog-json = true\nvoices = "some/folder"\n'


def test_options_come_from_the_command_line_else_the_environment_else_the_file(started):
    result, options, config = started(file=FILE)
    assert result.exit_code == 0
    assert (options["num_slots"], config.max_queue, config.drain_s, config.host) == (8, 5, 1.0, "::1")
    assert "device memory for 8 slots of 1024 positions: none" in result.output
    assert str(config.voices) == "some/folder" and config.port == ServerConfig().port
    environment = {"FISHJAX_MAX_QUEUE": "6", "FISHJAX_SLOTS": "2"}
    _, options, config = started("--slots", "3", file=FILE, environment=environment)
    assert (options["num_slots"], config.max_queue, config.drain_s) == (3, 6, 1.0)


def test_the_environment_may_name_the_file(started, tmp_path):
    (tmp_path / "other.toml").write_text("slots = 9")
    _, options, _ = started(environment={"FISHJAX_CONFIG": str(tmp_path / "other.toml")})
    assert options["num_slots"] == 9


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ("slotz = 8", "sets 'slotz', which is no option of the server"),
        ("max_queue = 8", "sets 'max_queue'"),
        ("help = true", "sets 'help'"),
        ('config = "x"', "sets 'config'"),
        ("slots = [1, 2]", "slots more than one value"),
        ("[server]\nslots = 1", "sets 'server'"),
        ("slots: 8", "is not TOML"),
    ],
)
def test_a_file_of_options_that_is_not_in_order(started, file, sentence):
    result, options, _ = started(file=file)
    assert options is None
    assert isinstance(result.exception, InvalidRequest) and sentence in str(result.exception)


def test_a_file_of_options_that_is_not_there(started, tmp_path):
    result, _, _ = started("--config", str(tmp_path / "none"))
    assert isinstance(result.exception, InvalidRequest)
    assert "cannot be read: No such file" in str(result.exception) and str(tmp_path) not in str(result.exception)


@pytest.mark.parametrize("source", [{"file": "slots = 0"}, {"environment": {"FISHJAX_SLOTS": "many"}}])
def test_a_value_out_of_range_is_told_wherever_it_stands(started, source):
    result, options, _ = started(**source)
    assert result.exit_code == 2 and options is None and "--slots" in result.output
