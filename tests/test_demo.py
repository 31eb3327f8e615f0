"""examples/demo.py says mistakes in one sentence, before it starts a server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["--text", " "], "--text is blank"), (["--output", "no/such/x.wav"], "the folder no/such does not exist")],
)
def test_mistakes_are_refused_at_once(arguments, says):
    process = subprocess.run(
        [sys.executable, "examples/demo.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 2
    assert says in process.stderr.splitlines()[-1] and "Traceback" not in process.stderr


def test_text_reaches_the_demo_as_it_was_typed(tmp_path):
    """Quotes and semicolons in TEXT are not for the shell: make passes the text through the environment."""
    command = (tmp_path / "python").absolute()
    command.write_text('#!/bin/sh\nprintf "%s|" "$@"\n')
    command.chmod(0o755)
    (tmp_path / ".ready").touch()
    text = """say "hi"; it's `x`"""
    variables = [f"VENV={tmp_path}", f"BIN={tmp_path}", f"TEXT={text}"]
    outer = {"MAKELEVEL", "MAKEFLAGS", "MFLAGS"}  # set where `make test` runs this
    process = subprocess.run(
        ["make", "-o", f"{tmp_path}/.ready", "demo", *variables],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in outer},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.stdout == f"examples/demo.py|--text|{text}|--output|hello.wav|"
