"""The suite `kernels`: hands the cases to worker processes, puts what they measured together into rows."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pallas_kernels._testing import TOLERANCES

from .cases import PEERS, STREAM_BYTES_PER_S, Case, floor_us
from .header import make_header, see_gpu
from .pool import Pool, Task
from .timing import METHOD

SHARED_PEERS = ("xla_bf16", "torch_compile_bf16")
"""They read bfloat16 either way: measured once for a group of cases."""
OVERLAP = 0.9
"""A host time below this part of the kernel time means that calls ran side by side, which no chain allows."""


def make_tasks(cases: Iterable[Case], options: dict[str, Any], peers: bool) -> list[list[Task]]:
    """Batches in the order of their worth: first every kernel, then the peers, those of one shape side by side."""
    cases = list(cases)
    batches = [[Task(case, "kernel", "jax", options)] for case in cases]
    for kind in ("xla", "torch") if peers else ():
        groups: dict[str, dict[tuple[str, str], Task]] = {}
        for case in cases:
            for peer in PEERS:
                if peer.startswith(kind):
                    task = Task(case, peer, "jax" if kind == "xla" else kind)
                    groups.setdefault(case.group, {}).setdefault(_peer_key(case, peer), task)
        batches += [list(tasks.values()) for tasks in groups.values()]
    return batches


def _peer_key(case: Case, part: str) -> tuple[str, str]:
    return (case.group if part in SHARED_PEERS else case.key, part)


def default_workers() -> int:
    """Processes that compile side by side."""
    return max(1, min(8, (os.cpu_count() or 2) // 2))


def make_kernels_header(
    device: str, versions: dict[str, str], gpu: dict[str, str] | None, notes: list[str]
) -> dict[str, Any]:
    """Where figures come from, and what floor_us means."""
    floor = f"bytes that must move / {STREAM_BYTES_PER_S / 1e12} TB/s, the streaming rate measured on one H200"
    return {**make_header("kernels", device, versions, gpu, notes, METHOD), "floor": floor}


class Run:
    """One run of the suite: progress on stderr, every result in a journal at once, rows at the end."""

    def __init__(self, out: Path | None, num_workers: int, budget_s: float):
        self._scratch = tempfile.TemporaryDirectory()
        folder = out.parent if out else Path(self._scratch.name)
        stem = out.stem if out else "kernels"
        self._journal = (folder / f"{stem}.jsonl").open("w")
        self._log = (folder / f"{stem}.log").open("wb")
        self._pools = {kind: Pool(kind, Path(self._scratch.name) / "gpu.lock", self._log) for kind in ("jax", "torch")}
        self._num_workers = num_workers
        self._started = time.monotonic()
        self._deadline = self._started + budget_s
        self._guard = threading.Lock()
        self._results: list[tuple[Task, dict[str, Any]]] = []
        probe = self._pools["jax"].start()
        self.hello = probe.hello
        self._pools["jax"].give_back(probe)
        self._gpu: dict[str, str] | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the workers found a GPU."""
        return self.hello["platform"] == "gpu"

    def header(self) -> dict[str, Any]:
        """Where the measurements of this run come from."""
        versions = {k: v for pool in self._pools.values() for k, v in pool.versions.items()}
        reasons = {result["kernel_us_reason"] for _, result in self._results if "kernel_us_reason" in result}
        notes = [f"kernel_us is null: {reason}" for reason in sorted(reasons)]
        return make_kernels_header(self.hello["device"], versions, self._gpu, notes)

    def measure(self, batches: list[list[Task]]) -> list[tuple[Task, dict[str, Any]]]:
        """Do all tasks; those that could not be done have a result that says why."""
        self._total = sum(map(len, batches))
        todo = {kind: [b for b in batches if b[0].kind == kind] for kind in self._pools}
        if todo["torch"] and (reason := self._why_no_torch()):
            for task in (task for batch in todo.pop("torch") for task in batch):
                self._done(task, {"reason": reason})
        previous = signal.signal(signal.SIGTERM, _interrupt)
        try:
            threads = [
                thread
                for kind, of_kind in todo.items()
                for thread in self._pools[kind].run(
                    of_kind, 1 if kind == "torch" else self._num_workers, self._deadline, self._done
                )
            ]
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.1)
                if self._results and self._gpu is None and self.on_gpu:
                    self._gpu = see_gpu()  # while the workers keep it busy
        except KeyboardInterrupt:
            print("interrupted: what was measured is kept", file=sys.stderr)
        finally:
            signal.signal(signal.SIGTERM, previous)
            for pool in self._pools.values():
                pool.kill()
        with self._guard:
            return list(self._results)

    def _why_no_torch(self) -> str | None:
        if importlib.util.find_spec("torch") is None:
            return "torch is not installed"
        return None if self.on_gpu else "no GPU"

    def _done(self, task: Task, result: dict[str, Any]) -> None:
        with self._guard:
            seconds = result.pop("stage_s", None)
            self._results.append((task, result))
            line = {
                "case": task.case.key,
                "part": task.part,
                "options": task.options,
                "result": result,
                "stage_s": seconds,
            }
            self._journal.write(json.dumps(line) + "\n")
            self._journal.flush()
            print(self._progress(task, result), file=sys.stderr, flush=True)

    def _progress(self, task: Task, result: dict[str, Any]) -> str:
        head = f"[{len(self._results)}/{self._total}] {time.monotonic() - self._started:4.0f} s  {task.case.key}"
        if "reason" in result:
            return f"{head}  {task.part}: {result['reason']}"
        error = f", error {result['rel_err']:.1e}" if "rel_err" in result else ""
        kernel = f", kernels {result['kernel_us']:.2f}" if result.get("kernel_us") else ""
        return f"{head}  {task.part}: {result['host_us']:.2f} us{kernel}, floor {floor_us(task.case):.2f}{error}"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def make_document(
    header: dict[str, Any], cases: Iterable[Case], results: Iterable[tuple[Task, dict[str, Any]]], backend: str
) -> dict[str, Any]:
    """Header and rows; a measurement that is not among the results gets a reason, never a hole."""
    found = {_peer_key(task.case, task.part): result for task, result in results}
    rows = [_row(case, backend, found) for case in cases]
    return {"header": header, "rows": rows}


def _row(case: Case, backend: str, found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    not_done = {"reason": "not measured in this run", "failed": True}
    result = found.get((case.key, "kernel"), not_done)
    host, kernel, error = (result.get(name) for name in ("host_us", "kernel_us", "rel_err"))
    bound = TOLERANCES["matmul" if case.op == "block_scaled_matmul" else case.op, "bfloat16"].bound
    row = {
        "op": case.op,
        "name": case.name,
        "shape": dict(case.shape),
        "m": case.m,
        "input": case.input,
        "backend": backend,
        "config": result.get("config"),
        "kernel_us": kernel,
        "host_us": host,
        "host_us_spread": result.get("host_us_spread"),
        "floor_us": floor_us(case),
        "rel_err": error,
        "tolerance": bound,
    }
    if host is not None:
        row["correct"] = error is not None and error <= bound
        row["overlapped"] = kernel is not None and host < OVERLAP * kernel
    row |= {name: result[name] for name in ("reason", "failed") if name in result}
    row["peers"] = {peer: _peer(case, peer, found) for peer in PEERS}
    return row


def _peer(case: Case, peer: str, found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    result = found.get(_peer_key(case, peer), {"reason": "not measured in this run"})
    return {name: value for name, value in result.items() if name != "kernel_us_reason"}
