"""What a file of step figures must hold before it may be frozen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..check import MEMORY_SLACK, document_problems
from .cases import StepCase

MIN_STEPS = 200
PLAN_SLACK = 1.05
"""Compiled programs and their constants are not in the engine's plan; more than a twentieth of it would be a leak."""
ROW_FIELDS = (
    *(
        "model",
        "slots",
        "policy",
        "fused",
        "precision",
        "kv",
        "codec",
        "sampler",
        "lengths",
        "ms_p50",
        "ms_p99",
        "ms_mean",
    ),
    *("steps", "decode_ms", "codec_ms", "compiles", "frames_per_s", "audio_s_per_s", "device_bytes", "peak_bytes"),
    *("predicted_bytes", "floor_ms", "gate", "peer_xla_bf16_ms", "grouped_ms_mean", "codec_group_ms", "prefill_ms"),
)


def problems(document: dict[str, Any], expected: Iterable[StepCase]) -> list[str]:
    """One sentence for each thing that is missing or wrong; an empty list when all is well."""
    return document_problems(document, (case.key for case in expected), _key, row_problems)


def _key(row: dict[str, Any]) -> str:
    return StepCase(row["model"], row["slots"], row["policy"], row["fused"]).key


def row_problems(row: dict[str, Any]) -> Iterable[str]:
    """What is wrong with one row."""
    if missing := [name for name in ROW_FIELDS if name not in row]:
        yield f"lacks {', '.join(missing)}"
        return
    if row.get("failed"):
        yield f"failed: {row.get('reason')}"
    elif row["ms_p50"] is None:
        if not row.get("reason"):
            yield "has neither a time nor a reason"
    else:
        if row["compiles"]:
            yield f"compiled {row['compiles']} programs after its warm-up"
        if row["steps"] < MIN_STEPS:
            yield f"ran {row['steps']} steps, fewer than {MIN_STEPS}"
        if row["ms_p50"] < MEMORY_SLACK * row["floor_ms"]:
            yield f"took {row['ms_p50']:.2f} ms, less than memory allows ({row['floor_ms']:.2f} ms)"
        if row["device_bytes"] > PLAN_SLACK * row["predicted_bytes"]:
            yield f"holds {row['device_bytes']:,} bytes on the device, and the engine plans {row['predicted_bytes']:,}"
    if row["peer_xla_bf16_ms"] is None and not row.get("peer_reason"):
        yield "has neither a time of XLA's nor a reason"
