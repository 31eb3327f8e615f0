"""docs/serving.md names every option with its default, every limit and every status as the code has them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from fishjax.engine.references import PIECE_FRAMES
from serving.__main__ import app
from serving.call import STATUS
from serving.config import ServerConfig

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
OPTIONS = [option for option in typer.main.get_command(app).params if option.name != "help"]


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without its first two lines."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_is_there_with_its_default(option):
    cells = {name: row for row in rows("Options") for name in re.findall(r"--[a-z-]+", row[0])}
    name = option.opts[0]
    assert name in cells, f"{name} is not in docs/serving.md"
    if isinstance(option.default, int | float | str) and not isinstance(option.default, bool):
        default = getattr(option.default, "name", option.default)
        assert cells[name][2] == (f"{default:g}" if isinstance(default, float) else str(default))


def test_no_option_is_there_that_the_server_has_not():
    named = {name for row in rows("Options") for name in re.findall(r"--[a-z-]+", row[0])}
    assert named == {option.opts[0] for option in OPTIONS}


def test_every_error_is_there_with_its_status():
    told = {name: row[1] for row in rows("Statuses") for name in re.findall(r"`(\w+)`", row[0])}
    assert told == {error.__name__: status.name for error, status in STATUS.items()}


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("max_text_bytes", "{:,} bytes of UTF-8"),
        ("max_references", "{}, each 0.2 s to 60 s"),
        ("max_silence_s", "`SynthesizeLive` caller | {:g} s"),
        ("max_unread_s", "{:g} s of it"),
        ("max_voices", "stored voices | {:,}"),
    ],
)
def test_limits_are_those_of_the_code(field, words):
    assert words.format(getattr(ServerConfig(), field)) in PAGE


def test_the_largest_message_is_that_of_the_code():
    assert f"request message, unpacked | {ServerConfig().max_message_bytes // 2**20} MiB" in PAGE


def test_the_bytes_on_their_way_are_those_of_the_code():
    config = ServerConfig()
    assert f"| {config.max_incoming_bytes // 2**20} MiB; what has not come within half a second" in PAGE
    assert f"counts as {config.max_message_bytes // 2**20} MiB" in PAGE


def test_the_size_of_a_piece_of_a_clip_is_that_of_the_code():
    assert f"in pieces of {PIECE_FRAMES} frames" in PAGE
