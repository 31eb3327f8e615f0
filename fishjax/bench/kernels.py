"""The suite `kernels`: hands the cases to worker processes, puts what they measured together into rows."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .cases import PEERS, STREAM_BYTES_PER_S, Case, floor_us, tolerance
from .header import make_header
from .pool import Task
from .run import Result, Run
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


def start(out: Path | None, num_workers: int, budget_s: float, resume: bool = False) -> Run:
    """A run of this suite."""
    workers = {"jax": num_workers, "torch": max(1, num_workers // 4)}
    return Run("kernels", workers, out, budget_s, _progress, resume)


def measure(run: Run, batches: list[list[Task]]) -> list[Result]:
    """Do all tasks; those that could not be done have a result that says why."""
    if importlib.util.find_spec("torch") is None:
        return run.measure(batches, {"torch": "torch is not installed"})
    return run.measure(batches, None if run.on_gpu else {"torch": "no GPU"})


def header_of(run: Run) -> dict[str, Any]:
    """Where the measurements of a run come from."""
    reasons = {result["kernel_us_reason"] for _, result in run.results if "kernel_us_reason" in result}
    notes = [f"kernel_us is null: {reason}" for reason in sorted(reasons)]
    return make_kernels_header(run.hello["device"], run.versions, run.gpu, notes)


def _progress(task: Task, result: dict[str, Any]) -> str:
    error = f", error {result['rel_err']:.1e}" if "rel_err" in result else ""
    kernel = f", kernels {result['kernel_us']:.2f}" if result.get("kernel_us") else ""
    return f"{result['host_us']:.2f} us{kernel}, floor {floor_us(task.case):.2f}{error}"


def make_document(
    header: dict[str, Any], cases: Iterable[Case], results: Iterable[Result], backend: str
) -> dict[str, Any]:
    """Header and rows; a measurement that is not among the results gets a reason, never a hole."""
    found = {_peer_key(task.case, task.part): result for task, result in results}
    rows = [_row(case, backend, found) for case in cases]
    return {"header": header, "rows": rows}


def _row(case: Case, backend: str, found: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    not_done = {"reason": "not measured in this run", "failed": True}
    result = found.get((case.key, "kernel"), not_done)
    host, kernel, error = (result.get(name) for name in ("host_us", "kernel_us", "rel_err"))
    bound = tolerance(case)
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
