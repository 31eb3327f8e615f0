"""Worker processes and the queue they share: a hang or a crash costs one measurement, not the run."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

LIMITS_S = {"start": 120.0, "compile": 180.0, "wait": 600.0, "run": 40.0}
"""How long a worker may stay in a stage. "run" is the one that holds the GPU."""


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement of one case (a dataclass of plain data with a `key`). kind: which sort of worker takes it."""

    case: Any
    part: str
    kind: str
    options: dict[str, Any] = field(default_factory=dict)


class WorkerDied(Exception):
    """The process ended or was ended; the message says why."""


class Worker:
    """One worker process in a process group of its own."""

    def __init__(self, command: list[str], log: IO[bytes], limits_s: dict[str, float]):
        env = {
            **os.environ,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "2",
        }
        self._limits_s = limits_s
        self._buffer = b""
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stdout, selectors.EVENT_READ)
        self.stage_s: dict[str, float] = {}
        """Seconds that the last task spent in each stage."""
        self.hello: dict[str, Any] = self._read("hello")

    def measure(self, task: Task) -> dict[str, Any]:
        """The result of a task. Raises WorkerDied when the process hung or fell."""
        message = {"case": asdict(task.case), "part": task.part, "options": task.options}
        try:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise WorkerDied("the worker had ended before this case") from None
        return self._read("result")

    def _read(self, wanted: str) -> dict[str, Any]:
        stage, since = ("start" if wanted == "hello" else "compile"), time.monotonic()
        self.stage_s = {}
        while True:
            line = self._line(since + self._limits_s[stage])
            if line is None:
                self.kill()
                raise WorkerDied(f"timed out after {self._limits_s[stage]:g} s in stage {stage!r}")
            message, now = json.loads(line), time.monotonic()
            self.stage_s[stage] = round(self.stage_s.get(stage, 0.0) + now - since, 3)
            if wanted in message:
                return message[wanted]
            stage, since = message["stage"], now

    def _line(self, deadline: float) -> bytes | None:
        while b"\n" not in self._buffer:
            if not self._selector.select(max(0.0, deadline - time.monotonic())):
                return None
            chunk = os.read(self._stdout.fileno(), 65536)
            if not chunk:
                self.kill()
                raise WorkerDied(f"the worker ended with exit code {self._process.returncode}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def kill(self) -> None:
        """End the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may take its time to end a hung kernel
            self._process.wait(timeout=20)


class Pool:
    """Some workers of one kind, started when there is work, one thread each.

    `fresh`: every batch has a process of its own, which finds the device's memory empty and leaves it so.
    """

    def __init__(
        self,
        kind: str,
        lock_path: Path,
        log: IO[bytes],
        command: list[str] | None = None,
        limits_s: dict[str, float] = LIMITS_S,
        fresh: bool = False,
    ):
        self._command = command or [sys.executable, "-m", "fishjax.bench.worker", kind, str(lock_path)]
        self._log, self._limits_s, self._fresh = log, limits_s, fresh
        self._alive: set[Worker] = set()
        self._idle: list[Worker] = []
        self._guard = threading.Lock()
        self.versions: dict[str, str] = {}

    def start(self) -> Worker:
        """A worker that has said hello: an idle one, else a fresh one."""
        with self._guard:
            if self._idle:
                return self._idle.pop()
        worker = Worker(self._command, self._log, self._limits_s)
        self.versions = worker.hello.get("versions", {})
        with self._guard:
            self._alive.add(worker)
        return worker

    def run(
        self, batches: Iterable[list[Task]], num_workers: int, deadline: float, done: Callable[[Task, dict], None]
    ) -> list[threading.Thread]:
        """Start threads that work the batches off (a batch stays with one worker while it lives) and call `done`."""
        queue = deque(batches)
        count = min(num_workers, len(queue))
        threads = [threading.Thread(target=self._work, args=(queue, deadline, done), daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads

    def _work(self, queue: deque[list[Task]], deadline: float, done: Callable[[Task, dict], None]) -> None:
        worker = None
        while queue:
            try:
                batch = queue.popleft()
            except IndexError:
                break
            for task in batch:
                if time.monotonic() > deadline:
                    done(task, {"reason": "the time budget ran out before this case", "failed": True})
                    continue
                try:
                    worker = worker or self.start()
                    result = worker.measure(task) | {"stage_s": worker.stage_s}
                except WorkerDied as error:
                    worker, result = None, {"reason": str(error), "failed": True}
                done(task, result)
            if self._fresh and worker:
                worker.kill()
                worker = None
        if worker:
            self.give_back(worker)

    def give_back(self, worker: Worker) -> None:
        """Keep a worker for who comes next."""
        with self._guard:
            self._idle.append(worker)

    def kill(self) -> None:
        """End every worker."""
        with self._guard:
            for worker in self._alive:
                worker.kill()
