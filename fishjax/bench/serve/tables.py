"""What people read: a table of loads, what many callers at once gain, what the batch lane fills, how a soak went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..markdown import table

_HEAD = (
    *("load", "slots", "policy", "voices", "calls", "TTFA ms p50", "p95", "p99", "frames/s", "audio s/s"),
    *("underrun ms p95", "continuous", "rejected", "slots busy", "cost of an hour of audio"),
)


def serve_tables(document: Mapping[str, Any]) -> str:
    """A markdown table with a row a load, and sentences that compare rows."""
    rows = table(_HEAD, map(_cells, document["rows"]), words=(0, 2, 3))
    told = [ratio(document), lane(document), *(f"{s['slots']} slots: ready {s['start_s']:g} s after the start."
                                              for s in document["starts"])]  # fmt: skip
    return rows + "\n\n" + "\n\n".join(sentence for sentence in told if sentence)


def row_name(row: Mapping[str, Any]) -> str:
    """ "closed, 4 callers", or "poisson, 2 calls/s"."""
    if row["rate"] is not None:
        return f"{row['loop']}, {row['rate']:g} calls/s"
    return f"{row['loop']}, {row['concurrency']} caller{'s' if row['concurrency'] != 1 else ''}"


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [
        row_name(row),
        str(row["slots"]),
        f"`{short_policy(row['policy'])}`",
        row["voices"],
        str(row["calls"]),
        *(_number(row[f"ttfa_ms_p{share}"]) for share in (50, 95, 99)),
        _number(row["frames_per_s"]),
        _number(row["audio_s_per_s"]),
        _number(row["underrun_ms_p95"]),
        _percent(row["continuity"]),
        str(row["rejected"]) + (f", **{row['failed']} failed**" if row["failed"] else ""),
        _percent(row["slot_utilisation"]),
        "-" if row["cost_per_hour_of_audio"] is None else f"{row['cost_per_hour_of_audio']:.4g}",
    ]


def ratio(document: Mapping[str, Any]) -> str:
    """Frames a second of the most callers over those of one, in closed loops; empty without both."""
    closed = {row["concurrency"]: row for row in document["rows"] if row["loop"] == "closed"}
    if 1 not in closed or len(closed) < 2:
        return ""
    one, many = closed[1], closed[max(closed)]
    times = many["frames_per_s"] / one["frames_per_s"] if one["frames_per_s"] else float("nan")
    return f"1 -> {many['concurrency']} callers: {times:.1f} times the frames/s."


def speed_sentence(document: Mapping[str, Any]) -> str:
    """What the fewest and the most callers of the closed loops had, in a sentence."""
    closed = sorted((row for row in document["rows"] if row["loop"] == "closed"), key=lambda row: row["concurrency"])
    one, most = closed[0], closed[-1]
    return (
        f"On one {document['header']['device']} with {document['load']['model']}, sound included, one caller hears the "
        f"first sound after {one['ttfa_ms_p50']:.0f} ms (median) and gets {one['frames_per_s']:.0f} frames a second; "
        f"of {most['concurrency']} callers at once the median waits {most['ttfa_ms_p50']:.0f} ms, and they get "
        f"{most['frames_per_s']:,.0f} frames, {most['audio_s_per_s']:.0f} s of sound, a second."
    )


def lane(document: Mapping[str, Any]) -> str:
    """What fill requests did to slots and real traffic; empty without the lane."""
    rows = {row["loop"]: row for row in document["rows"]}
    if "lane, filled" not in rows:
        return ""
    alone, filled = rows["lane, real alone"], rows["lane, filled"]
    return (
        f"Fill requests: slots busy {_percent(alone['slot_utilisation'])} -> {_percent(filled['slot_utilisation'])}; "
        f"TTFA of the real traffic p50 {_number(alone['ttfa_ms_p50'])} -> {_number(filled['ttfa_ms_p50'])} ms, "
        f"p95 {_number(alone['ttfa_ms_p95'])} -> {_number(filled['ttfa_ms_p95'])} ms."
    )


def soak_table(document: Mapping[str, Any]) -> str:
    """A row for each thing that callers did, with how it ended; sentences about memory, the fault and the problems."""
    soak = document["soak"]
    ends = ([does, str(sum(statuses.values())), _counts(statuses)] for does, statuses in soak["outcomes"].items())
    rows = table(["what a caller does", "calls", "how they ended"], ends, words=(0, 2))
    rss_mb = soak["rss_mb"]
    told = [
        f"{soak['seconds']:g} s, {soak['slots']} slots, {soak['calls']} calls, {soak['killed_processes']} processes of "
        f"callers killed. Resident memory: {min(rss_mb)} to {max(rss_mb)} MB, at the end {rss_mb[-1]} MB.",
        f"When the device broke, calls ended with: {_counts(soak['after_fault'])}.",
        "\n".join(f"- **{problem}**" for problem in soak["problems"]) or "Nothing that was promised was lost.",
    ]
    return rows + "\n\n" + "\n\n".join(told)


def _counts(statuses: Mapping[str, int]) -> str:
    return ", ".join(f"{status} {count}" for status, count in statuses.items())


def short_policy(policy: str) -> str:
    """One word for a precision that is the same in every module."""
    formats = {part.partition("=")[2] or part for part in policy.split(",")}
    return formats.pop() if len(formats) == 1 and policy.count("=") > 1 else policy


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
