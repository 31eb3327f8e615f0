"""A picture of closed loops: time to first sound and frames a second over how many call at once. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]


def plot_loads(document: Mapping[str, Any], path: Path) -> None:
    """Write the PNG of a file of figures."""
    rows = sorted(
        (row for row in document["rows"] if row["loop"] == "closed"), key=lambda row: (row["concurrency"], row["slots"])
    )
    figure = Figure(figsize=(8, 5))
    callers = [row["concurrency"] for row in rows]
    latency = figure.subplots()
    for share in (50, 95, 99):
        latency.plot(callers, [row[f"ttfa_ms_p{share}"] for row in rows], "o-", label=f"TTFA p{share}")
    latency.set_xscale("log", base=2)
    latency.set_xticks(callers, [str(count) for count in callers])
    latency.set(xlabel="callers at once", ylabel="ms to the first sound", title=document["load"]["model"])
    rate = latency.twinx()
    rate.plot(callers, [row["frames_per_s"] for row in rows], "s--", color="black", label="frames/s")
    rate.set(ylabel="frames a second", ylim=(0, None))
    latency.set_ylim(0, None)
    figure.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 0.9))
    figure.savefig(path, dpi=120, bbox_inches="tight")
