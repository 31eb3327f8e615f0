"""A server process of our own on the loopback: started as users start it, watched from outside, stopped by a signal."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fishjax.client import Client

from .failed import MeasurementFailed

_ADDRESS = re.compile(r"listening on (\S+);")
_START_S = 600.0
_STOP_S = 60.0
_POLL_S = 0.02
_LOG_TAIL = 2000


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM, with which `timeout` ends us, becomes SystemExit(143): whoever started a process then ends it too."""

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class ServerProcess:
    """`with ServerProcess(["--slots", "4"]) as server:` a server that is ready; its log is in `log_path`.

    `start_s`: seconds from the start of the process until its health was SERVING. Raises MeasurementFailed.
    """

    def __init__(self, options: Sequence[str], module: str = "serving"):
        self.address = ""
        self.start_s = 0.0
        self._folder = tempfile.TemporaryDirectory(prefix="fishjax-bench-")
        self.log_path = Path(self._folder.name) / "server.log"
        self._command = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", "0", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        began_s = time.monotonic()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            self.address = self._find_address(began_s + _START_S)
            with Client(self.address) as client:
                client.wait_ready(_START_S)
        except BaseException:
            self.__exit__()
            raise
        self.start_s = time.monotonic() - began_s
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process, once started."""
        assert self._process is not None, "the server was not started"
        return self._process

    def rss_mb(self) -> float:
        """Resident memory of the process on the host, MB."""
        pages = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(self.process.pid)], capture_output=True, text=True, check=True
        )
        return int(pages.stdout) / 1000

    def log_tail(self) -> str:
        """The end of its log."""
        return self.log_path.read_text(errors="replace")[-_LOG_TAIL:]

    def _find_address(self, until_s: float) -> str:
        while time.monotonic() < until_s:
            if found := _ADDRESS.search(self.log_path.read_text(errors="replace")):
                return found.group(1)
            if self.process.poll() is not None:
                raise MeasurementFailed(
                    f"the server ended with exit code {self.process.returncode}:\n{self.log_tail()}"
                )
            time.sleep(_POLL_S)
        raise MeasurementFailed(f"the server did not listen within {_START_S:g} s:\n{self.log_tail()}")


def look_at_device() -> dict[str, Any]:
    """Platform, device, versions and default precision, by a process that is gone before a server needs the device."""
    code = (
        "import json\nfrom fishjax.bench.measure_jax import hello\nfrom fishjax.weights.precision import Precision\n"
        "print(json.dumps(hello() | {'precision': str(Precision.default())}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise MeasurementFailed(f"JAX does not start on this machine:\n{done.stderr[-_LOG_TAIL:]}")
    return json.loads(done.stdout.splitlines()[-1])
