"""The tuner: times every config that an op offers and writes the fastest correct one to pallas_kernels/<op>/tuned/."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pallas_kernels
from pallas_kernels import _tuned

from . import ops
from .cases import Case, tolerance, tuned_key
from .pool import Task
from .run import Result


def tunable(cases: Iterable[Case]) -> list[Case]:
    """The cases under whose keys a choice is filed: whole buckets of rows, quantised x, full caches."""
    return [case for case in cases if _names_a_choice(case)]


def _names_a_choice(case: Case) -> bool:
    if case.op == "decode_attention":
        return case.shape["lengths"] == "full"
    one_input = case.op in ("swiglu_mlp", "between_attentions")
    return _tuned.bucket(case.m) == case.m and (one_input or case.input == "quantized")


def make_tasks(cases: Iterable[Case]) -> list[list[Task]]:
    """One batch a case, so that one worker keeps its operands and its float64 answer."""
    batches = [
        [Task(case, "kernel", "jax", {"backend": "mosaic", "config": fields}) for fields in ops.configs_to_try(case)]
        for case in tunable(cases)
    ]
    return [batch for batch in batches if batch]


def choose(results: Iterable[Result]) -> dict[str, dict[str, dict[str, Any]]]:
    """{op: {tuned key: fields of the fastest config that is within tolerance}}."""
    best: dict[tuple[str, str], tuple[float, dict[str, Any]]] = {}
    for task, result in results:
        case = task.case
        if result.get("host_us") is None or not result["rel_err"] <= tolerance(case):
            continue
        key = (case.op, tuned_key(case))
        if key not in best or result["host_us"] < best[key][0]:
            best[key] = (result["host_us"], result["config"])
    chosen: dict[str, dict[str, dict[str, Any]]] = {}
    for (op, key), (_, fields) in best.items():
        chosen.setdefault(op, {})[key] = fields
    return chosen


def table(results: Iterable[Result]) -> str:
    """One line a config, the fastest of each case first."""
    lines = []
    for task, result in sorted(results, key=lambda r: (r[0].case.key, r[1].get("host_us") or float("inf"))):
        fields = " ".join(f"{name}={value}" for name, value in task.options["config"].items())
        took = result.get("reason") or f"{result['host_us']:.2f} us, error {result['rel_err']:.1e}"
        lines.append(f"{task.case.key}  {fields}: {took}")
    return "\n".join(lines)


def write(chosen: dict[str, dict[str, dict[str, Any]]], device: str) -> list[Path]:
    """Update each op's tuned/<device>.json; keys that were not tuned in this run stay."""
    paths = []
    for op, choices in chosen.items():
        path = Path(pallas_kernels.__file__).parent / op / "tuned" / f"{device}.json"
        path.parent.mkdir(exist_ok=True)
        before = json.loads(path.read_text()) if path.is_file() else {}
        lines = (f"  {json.dumps(key)}: {json.dumps(fields)}" for key, fields in sorted((before | choices).items()))
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        paths.append(path)
    return paths
