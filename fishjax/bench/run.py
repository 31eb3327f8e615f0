"""One run of a suite: tasks go to worker processes, every result into a journal at once, progress to stderr."""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fishjax.errors import InvalidRequest

from .header import commit, see_gpu
from .journal import Journal
from .pool import Pool, Task

Result = tuple[Task, dict[str, Any]]


class Run:
    """Workers of some kinds, a budget of seconds, and what was measured so far.

    `workers`: kind -> processes side by side; the first kind is asked what it runs on. `describe` puts a result that
    is not a reason into a few words. `out`: the file that the suite will write; the journal (.jsonl) and the workers'
    log lie beside it. `resume`: go on with that journal. Other options as `Pool` takes them.
    """

    def __init__(
        self,
        suite: str,
        workers: Mapping[str, int],
        out: Path | None,
        budget_s: float,
        describe: Callable[[Task, dict[str, Any]], str],
        resume: bool = False,
        **pool_options: Any,
    ):
        if resume and out is None:
            raise InvalidRequest("--resume goes on with the journal of --out, and no --out was given")
        self._scratch = tempfile.TemporaryDirectory()
        folder = out.parent if out else Path(self._scratch.name)
        stem = out.stem if out else suite
        log = (folder / f"{stem}.log").open("wb")
        lock = Path(self._scratch.name) / "gpu.lock"
        self._pools = {kind: Pool(kind, lock, log, **pool_options) for kind in workers}
        self._workers, self._describe = workers, describe
        self._started = time.monotonic()
        self._deadline = self._started + budget_s
        self._guard = threading.Lock()
        self.results: list[Result] = []
        self.gpu: dict[str, str] | None = None
        first = self._pools[next(iter(workers))]
        probe = first.start()
        self.hello = probe.hello
        first.give_back(probe)
        identity = {"suite": suite, "commit": commit(), "device": self.hello["device"], "versions": self.versions}
        try:
            self._journal = Journal(folder / f"{stem}.jsonl", identity, resume)
        except InvalidRequest:
            first.kill()
            raise

    @property
    def on_gpu(self) -> bool:
        """Whether the workers found a GPU."""
        return self.hello["platform"] == "gpu"

    @property
    def versions(self) -> dict[str, str]:
        """Of what the workers use."""
        return {name: version for pool in self._pools.values() for name, version in pool.versions.items()}

    def measure(self, batches: list[list[Task]], refused: Mapping[str, str] | None = None) -> list[Result]:
        """Do all tasks; those that could not be done have a result that says why. `refused`: kind -> why none is."""
        self._total = sum(map(len, batches))
        batches = [rest for batch in batches if (rest := [task for task in batch if not self._has(task)])]
        todo = {kind: [b for b in batches if b[0].kind == kind] for kind in self._pools}
        for kind, reason in (refused or {}).items():
            for task in (task for batch in todo.pop(kind) for task in batch):
                self._done(task, {"reason": reason})
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            threads = [
                thread
                for kind, of_kind in todo.items()
                for thread in self._pools[kind].run(of_kind, self._workers[kind], self._deadline, self._done)
            ]
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.1)
                if self.results and self.gpu is None and self.on_gpu:
                    self.gpu = see_gpu()  # while the workers keep it busy
        except KeyboardInterrupt:
            print("interrupted: what was measured is kept", file=sys.stderr)
        finally:
            signal.signal(signal.SIGTERM, previous)
            for pool in self._pools.values():
                pool.kill()
        with self._guard:
            return list(self.results)

    def _has(self, task: Task) -> bool:
        kept = self._journal.kept(task)
        if kept is not None:
            self.results.append((task, kept))
        return kept is not None

    def _done(self, task: Task, result: dict[str, Any]) -> None:
        with self._guard:
            seconds = result.pop("stage_s", None)
            self.results.append((task, result))
            self._journal.add(task, result, seconds)
            words = result["reason"] if "reason" in result else self._describe(task, result)
            head = f"[{len(self.results)}/{self._total}] {time.monotonic() - self._started:4.0f} s  {task.case.key}"
            print(f"{head}  {task.part}: {words}", file=sys.stderr, flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
