"""Step figures as markdown."""

from __future__ import annotations

from typing import Any

_HEAD = (
    *("policy", "slots", "ms", "p99", "frames/s", "audio-s/s", "decode ms", "codec ms", "floor ms"),
    *("codec ms, 4 frames", "ms, sound by 4", "chunk ms"),
    *("XLA bf16 ms", "times XLA", "GB", "planned GB", "late compiles", "gate"),
)


def step_table(document: dict[str, Any]) -> str:
    """One row a policy and number of slots, times in milliseconds."""
    rows = sorted(document["rows"], key=lambda row: (row["policy"], row["fused"], row["slots"]))
    lines = ["| " + " | ".join(_HEAD) + " |", "|---|" + "---:|" * (len(_HEAD) - 1)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    ms, peer, policy = row["ms_p50"], row["peer_xla_bf16_ms"], row["policy"] + ", fused" * row["fused"]
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
    lines = [f"### {trace['case']}: {total:.2f} ms", "", f"By {trace['clock']}.", "", "| part | ms | share |"]
    lines += ["|---|---:|---:|"]
    rows = [*trace["parts"], {"part": "sum", "ms": sum(part["ms"] for part in trace["parts"])}]
    lines += [f"| {row['part']} | {row['ms']:.3f} | {row['ms'] / total:.0%} |" for row in rows]
    if trace["kernels"]:
        lines += ["", "| longest kernels | calls | ms |", "|---|---:|---:|"]
        lines += [f"| `{row['kernel'][:80]}` | {row['calls']} | {row['ms']:.3f} |" for row in trace["kernels"]]
    return "\n".join(lines)
