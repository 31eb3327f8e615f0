"""Step figures as markdown."""

from __future__ import annotations

from typing import Any

from ..markdown import table

_HEAD = (
    *("policy", "slots", "ms", "p99", "frames/s", "audio-s/s", "decode ms", "codec ms", "floor ms"),
    *("codec ms, 4 frames", "ms, sound by 4", "chunk ms"),
    *("XLA bf16 ms", "times XLA", "GB", "planned GB", "late compiles", "gate"),
)


def step_table(document: dict[str, Any]) -> str:
    """One row a policy and number of slots, times in milliseconds."""
    rows = sorted(document["rows"], key=lambda row: (row["policy"], row["fused"], row["slots"]))
    return table(_HEAD, map(_cells, rows))


def _cells(row: dict[str, Any]) -> list[str]:
    ms, peer, policy = row["ms_p50"], row["peer_xla_bf16_ms"], f"{row['policy']}, fused {row['fused']}"
    if ms is None:
        return [policy, str(row["slots"]), f"- ({row['reason']})", *[""] * (len(_HEAD) - 3)]
    return [
        policy,
        str(row["slots"]),
        *(f"{row[name]:.2f}" for name in ("ms_p50", "ms_p99")),
        *(f"{row[name]:,.0f}" for name in ("frames_per_s", "audio_s_per_s")),
        *(f"{row[name]:.2f}" for name in ("decode_ms", "codec_ms", "floor_ms")),
        *(f"{row[name]:.2f}" for name in ("codec_group_ms", "grouped_ms_mean", "prefill_ms")),
        "-" if peer is None else f"{peer:.2f}",
        "-" if peer is None else f"{peer / ms:.2f}",
        *(f"{row[name] / 1e9:.1f}" for name in ("device_bytes", "predicted_bytes")),
        str(row["compiles"]),
        row["gate"] or "-",
    ]


def trace_tables(document: dict[str, Any]) -> str:
    """Where a step's time goes, one table a case that was traced."""
    return "\n\n".join(_trace_table(trace) for trace in document["traces"])


def _trace_table(trace: dict[str, Any]) -> str:
    if "parts" not in trace:
        return f"### {trace['case']}\n\nNot traced: {trace['reason']}"
    total = trace["step_ms"]
    rows = [*trace["parts"], {"part": "sum", "ms": sum(part["ms"] for part in trace["parts"])}]
    shares = ([row["part"], f"{row['ms']:.3f}", f"{row['ms'] / total:.0%}"] for row in rows)
    parts = [f"### {trace['case']}: {total:.2f} ms", f"By {trace['clock']}.", table(["part", "ms", "share"], shares)]
    if trace["kernels"]:
        longest = ([f"`{row['kernel'][:80]}`", str(row["calls"]), f"{row['ms']:.3f}"] for row in trace["kernels"])
        parts.append(table(["longest kernels", "calls", "ms"], longest))
    return "\n\n".join(parts)
