"""The suite `step`: cases to worker processes, what they measured into rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fishjax.engine.engine import CHUNK_COLUMNS, GROUP_FRAMES
from fishjax.engine.sampling_params import SamplingParams

from ..cases import STREAM_BYTES_PER_S
from ..header import make_header
from ..pool import LIMITS_S, Task
from ..run import Result, Run
from .cases import CYCLE, LENGTHS, LENGTHS_SEED, PEER_POLICY, StepCase

WORKERS = max(1, min(6, (os.cpu_count() or 1) // 3))
"""Cases that are compiled side by side."""
STEP_LIMITS_S = {**LIMITS_S, "compile": 300.0, "run": 90.0}
_SAMPLER = "two draws, repetition-aware, nine codes; {0.temperature:g}, {0.top_p:g}, {0.top_k}".format
METHOD = (
    "The engine's own two programs (decode_step with the whole sampler, codec_step) over random weights; every slot "
    "runs. ms_p50, ms_p99: wall clock from one step's result on the host to the next one's, each read one step late as "
    f"the server's loop does, after {CYCLE} steps of warm-up; frames_per_s: slots over the mean. Live lengths spread "
    f"evenly over {LENGTHS[0]}..{LENGTHS[1]} and set back every {CYCLE} steps, so that each slot stays about its own. "
    "decode_ms, codec_ms: each program alone, read in the same way. codec_group_ms: a call of the codec for "
    f"{GROUP_FRAMES} frames of every slot; grouped_ms_mean: a step where such a call follows each {GROUP_FRAMES}th. "
    f"prefill_ms: a chunk of {CHUNK_COLUMNS} columns read into a slot, one after another. "
    "peer_xla_bf16_ms: the same frame, greedy, in plain bfloat16 jnp, the codec as the engine has it, one jitted "
    "program with donated caches. device_bytes: what the process holds on the device in the middle of it; "
    "predicted_bytes: what the engine plans, without rows on their way. floor_ms: weights (the fast transformer's nine "
    "times), live keys and values, codec and its state, over the streaming rate. fused: slow steps through "
    "between_attentions and append_kv, both through fast_frame besides, each by name. XLA is told what an engine tells "
    "it (`fishjax.engine.xla_flags`), for the peers too. "
    "Every case in a process of its own; nothing else uses the GPU while one is timed."
)


def start(out: Path | None, budget_s: float, resume: bool = False) -> Run:
    """A run of this suite."""
    return Run("step", {"step": WORKERS}, out, budget_s, _progress, resume, limits_s=STEP_LIMITS_S, fresh=True)


def make_tasks(cases: Iterable[StepCase], trace: bool) -> list[list[Task]]:
    """A batch (a process) a case, in the order of their worth; XLA's peer of some slots with their bf16 case."""
    cases = list(cases)
    batches = [[Task(case, "engine", "step")] for case in cases]
    for slots in dict.fromkeys(case.slots for case in cases):
        peer = StepCase(cases[0].model, slots, PEER_POLICY)
        home = next((batch for batch in batches if batch[0].case == peer), None)
        if home is None:
            batches.append(home := [])
        home.append(Task(peer, "peer", "step"))
    if trace:
        for batch in batches:
            batch += [
                Task(task.case, "parts", "step")
                for task in batch
                if task.part == "engine" and task.case.fused == "none"
            ]
    return batches


def header_of(run: Run) -> dict[str, Any]:
    """Where the measurements of a run come from."""
    floor = f"bytes that must move / {STREAM_BYTES_PER_S / 1e12} TB/s, the streaming rate measured on one H200"
    return {**make_header("step", run.hello["device"], run.versions, run.gpu, [], METHOD), "floor": floor}


def make_document(
    header: dict[str, Any], cases: Iterable[StepCase], results: Iterable[Result], baselines: Path
) -> dict[str, Any]:
    """Header, rows, and the parts of a step where they were asked for; what was not measured has a reason."""
    cases, found = list(cases), {(task.case.key, task.part): result for task, result in results}
    gate = baselines / header["device"] / "gate.json"
    judged = json.loads(gate.read_text())["rows"] if gate.is_file() else []
    rows = [_row(case, found, judged) for case in cases]
    traces = [
        {"case": case.key, **found[case.key, "parts"]} for case in cases if (case.key, "parts") in found
    ]  # fmt: skip
    return {"header": header, "rows": rows, "traces": traces}


def _row(case: StepCase, found: dict[tuple[str, str], dict[str, Any]], judged: list[dict[str, Any]]) -> dict[str, Any]:
    not_done = {"reason": "not measured in this run", "failed": True}
    result = found.get((case.key, "engine"), not_done)
    precision, codec = case.precision, case.configs[1]
    low, high = LENGTHS
    row = {
        "model": case.model,
        "slots": case.slots,
        "policy": case.policy,
        "fused": case.fused,
        "precision": str(precision),
        "kv": precision.kv,
        "codec": precision.codec,
        "sampler": _SAMPLER(SamplingParams()),
        "lengths": {"low": low, "high": high, "seed": LENGTHS_SEED, "mean": float(case.lengths_B.mean())},
    }
    measured = ("ms_p50", "ms_p99", "ms_mean", "steps", "decode_ms", "codec_ms", "compiles")
    measured += ("grouped_ms_mean", "codec_group_ms", "prefill_ms")
    row |= {name: result.get(name) for name in measured}
    frames_per_s = None if row["ms_mean"] is None else 1e3 * case.slots / row["ms_mean"]
    row["frames_per_s"] = frames_per_s
    row["audio_s_per_s"] = None if frames_per_s is None else frames_per_s / codec.frame_rate_hz
    row |= {name: result.get(name) for name in ("device_bytes", "peak_bytes", "predicted_bytes", "floor_ms", "setup_s")}
    row |= {name: result[name] for name in ("reason", "failed") if name in result}
    verdict = next((one for one in judged if one.get("precision") == str(precision)), None)
    row["gate"] = verdict["verdict"] if verdict else None
    if verdict is None:
        row["gate_reason"] = "no frozen gate of this device has judged this policy on trained weights"
    peer = found.get((StepCase(case.model, case.slots, PEER_POLICY).key, "peer"), not_done)
    row["peer_xla_bf16_ms"] = peer.get("ms_p50")
    if row["peer_xla_bf16_ms"] is None:
        row["peer_reason"] = peer["reason"]
    return row


def _progress(task: Task, result: dict[str, Any]) -> str:
    if task.part == "parts":
        return ", ".join(f"{part['part']} {part['ms']:.2f}" for part in result["parts"])
    floor = f", floor {result['floor_ms']:.2f}, {result['compiles']} late compiles" if task.part == "engine" else ""
    return f"{result['ms_p50']:.2f} ms (p99 {result['ms_p99']:.2f}){floor}"
