"""The table from errors to statuses, the pace of readers, the configuration and the log."""

import asyncio
import json
import logging

import grpc
import pytest

import fishjax.errors
from fishjax.errors import FishjaxError, InvalidRequest, SlowReader
from serving import logs
from serving.call import STATUS
from serving.config import ServerConfig
from serving.session import ReaderPace


def subclasses(cls):
    for child in cls.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_error_has_its_own_row():
    ours = {cls for cls in subclasses(FishjaxError) if cls.__module__ == fishjax.errors.__name__}
    assert len(ours) >= 11
    assert ours | {FishjaxError} == set(STATUS)


def test_statuses():
    names = {cls.__name__: code for cls, code in STATUS.items()}
    assert names["InvalidRequest"] is names["PromptTooLong"] is grpc.StatusCode.INVALID_ARGUMENT
    assert names["VoiceNotFound"] is grpc.StatusCode.NOT_FOUND
    assert names["QueueFull"] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert names["Draining"] is names["NotReady"] is grpc.StatusCode.UNAVAILABLE
    assert names["DeadlineExceeded"] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert names["EngineFailed"] is names["WeightsError"] is grpc.StatusCode.INTERNAL


class Reader:
    """Takes `takes_s` for each message, by a clock of its own."""

    def __init__(self):
        self.now_s = 0.0

    async def take(self, takes_s):
        self.now_s += takes_s


async def test_pace_sums_what_a_reader_falls_behind():
    reader = Reader()
    pace = ReaderPace(1.0, lambda: reader.now_s)
    await pace.write(reader.take(0.5), audio_s=0.1)
    assert pace.lag_s == pytest.approx(0.4)
    await pace.write(reader.take(0.0), audio_s=0.3)
    assert pace.lag_s == pytest.approx(0.1)
    await pace.write(reader.take(0.0), audio_s=5.0)
    assert pace.lag_s == 0.0  # no credit for haste
    await pace.write(reader.take(0.9), audio_s=0.1)
    pace.caught_up()
    await pace.write(reader.take(0.9), audio_s=0.1)
    with pytest.raises(SlowReader, match=r"fell 1 s behind"):
        await pace.write(reader.take(0.5), audio_s=0.1)


async def test_pace_does_not_wait_for_ever():
    pace = ReaderPace(0.05, lambda: 0.0)
    with pytest.raises(SlowReader):
        await pace.write(asyncio.Event().wait(), audio_s=1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("metrics_port", 70_000),
        ("max_silence_s", 0),
        ("max_queue", -1),
        ("slow_reader_s", 0),
        ("max_message_bytes", 10),
        ("max_incoming_bytes", 1_000_000),
    ],
)
def test_config_names_the_wrong_field(field, value):
    with pytest.raises(InvalidRequest, match=field):
        ServerConfig(**{field: value})


def test_it_listens_on_this_machine_only_unless_told():
    assert ServerConfig().host == "127.0.0.1"


@pytest.fixture
def root_logger():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_log_lines_carry_the_request(root_logger, capsys):
    logs.configure(as_json=True)
    with logs.request("abc"):
        logging.getLogger("x").info("hello %d", 1)
    logging.getLogger("x").warning("outside")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [(line["request_id"], line["message"], line["level"]) for line in lines] == [
        ("abc", "hello 1", "INFO"),
        ("-", "outside", "WARNING"),
    ]


def test_figures_are_fields_of_the_line_and_words_for_people(root_logger, capsys):
    logs.configure(as_json=True)
    logs.figures(logging.getLogger("x"), {"rpc": "Synthesize", "total_ms": 12.3456})
    line = json.loads(capsys.readouterr().err)
    assert (line["rpc"], line["total_ms"]) == ("Synthesize", 12.3)
    logs.configure()
    logs.figures(logging.getLogger("x"), {"rpc": "Synthesize", "total_ms": 12.3456})
    assert "call ended: rpc Synthesize, total_ms 12.3" in capsys.readouterr().err


def test_only_logs_configures_handlers():
    import serving.loop
    import serving.server

    for module in (serving.loop, serving.server):
        assert module.logger.handlers == []
