"""examples/demo.py says mistakes in one sentence, before it starts a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--text", " "], "--text is blank"),
        (["--text", b"\xff"], "--text cannot be said: its bytes are not UTF-8"),
        (["--output", "no/such/x.wav"], "the folder no/such does not exist"),
    ],
)
def test_mistakes_are_refused_at_once(arguments, says):
    process = subprocess.run(
        [sys.executable, "examples/demo.py", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert process.returncode == 2
    assert says in process.stderr.splitlines()[-1] and "Traceback" not in process.stderr


def children(pid):
    """Processes that a process has started: id -> command line."""
    shown = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in shown.splitlines()]
    return {int(row[0]): row[2] for row in rows if int(row[1]) == pid}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_loses_patience_leaves_without_noise_and_the_server_ends(number):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it, and so would what we start
    demo = subprocess.Popen(
        [sys.executable, "examples/demo.py"], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        servers = []
        while not servers:
            assert demo.poll() is None
            time.sleep(0.05)
            servers = [pid for pid, command in children(demo.pid).items() if "-m serving" in command]
        os.killpg(demo.pid, number)  # as a terminal does
        _, words = demo.communicate(timeout=200)
        assert demo.returncode == 128 + number
        assert "Traceback" not in words and "Interrupt" not in words
        with pytest.raises(ProcessLookupError):
            os.kill(servers[0], 0)
    finally:
        demo.kill()
        demo.wait()


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
        timeout=200,
    )
    assert process.stdout == f"examples/demo.py|--text|{text}|--output|hello.wav|"
