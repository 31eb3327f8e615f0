"""Tables and plots from the frozen figures: what pages quote between markers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .cases import MATMULS, OPS, PEERS
from .frozen import BASELINES, path_of
from .gate.tables import gate_table, voice_sentence, voice_table
from .markdown import table
from .serve.tables import serve_tables, soak_table, speed_sentence
from .step.tables import step_table, trace_tables

PUBLISHED = Path(__file__).parent / "published.json"
VOICE_DEVICE = "cpu"
"""The card of the voice quotes what is measured there: everybody can measure it again."""
SPEED_DEVICE = "nvidia-h200"
"""README quotes what a server does there."""


def kernel_tables(document: dict[str, Any]) -> str:
    """One markdown table per op and input, times in microseconds."""
    parts = []
    for op in OPS:
        for kind in ("quantized", "bfloat16"):
            rows = [row for row in document["rows"] if (row["op"], row["input"]) == (op, kind)]
            if rows:
                about = {"quantized": "x already quantised", "bfloat16": "x in bfloat16"}[kind]
                parts.append(f"### `{op}`, {about}\n\n{_table(rows)}")
    reasons = sorted({f"- `{peer}`: {row['peers'][peer]['reason']}" for row in document["rows"] for peer in PEERS
                      if "reason" in row["peers"][peer]})  # fmt: skip
    if reasons:
        parts.append("Peers without a figure (-):\n\n" + "\n".join(reasons))
    return "\n\n".join(parts)


def _table(rows: list[dict[str, Any]]) -> str:
    head = ["shape", "m", "us", "spread", "kernels us", "floor us", "of the floor's rate", "error", *PEERS]
    return table(head, map(_cells, rows))


def _cells(row: dict[str, Any]) -> list[str]:
    peers = [_number(row["peers"][peer].get("host_us")) for peer in PEERS]
    start = [shape_label(row), str(row["m"])]
    if row["host_us"] is None:
        return [*start, f"- ({row['reason']})", "", "", _number(row["floor_us"]), "", "", *peers]
    wrong = "" if row["correct"] else " **wrong**"
    wrong += " **overlapped**" if row["overlapped"] else ""
    return [
        *start,
        _number(row["host_us"]) + wrong,
        f"{row['host_us_spread']:.0%}",
        _number(row["kernel_us"]),
        _number(row["floor_us"]),
        f"{row['floor_us'] / row['host_us']:.0%}",
        f"{row['rel_err']:.1e}",
        *peers,
    ]


def shape_label(row: dict[str, Any]) -> str:
    """ "wqkv 6144x2560", or "slow_1024 float8 mixed"."""
    s = row["shape"]
    if row["op"] == "decode_attention":
        return " ".join([row["name"], s["cache"], *([] if s["lengths"] == "full" else [s["lengths"]])])
    return f"{row['name']} {'x'.join(str(v) for v in s.values())}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def published_table() -> str:
    """Figures that others have published, as they stand: not measured by us, on their set-up."""
    data = json.loads(PUBLISHED.read_text())
    head = ["what", "library", "m", "us"]
    figures = table(head, ([str(row[name]) for name in head] for row in data["rows"]), words=(0, 1))
    return f"Published by {data['source']} ({data['setup']}); not measured by us.\n\n{figures}"


def kernels_markdown(folder: Path = BASELINES) -> str:
    """Frozen kernel times of every device, and those that others have published."""
    parts = []
    for path in sorted(folder.glob("*/kernels.json")):
        document = json.loads(path.read_text())
        parts.append(f"## Kernels on {document['header']['device']}\n\n{_origin(document['header'])}")
        parts.append(kernel_tables(document))
    if not parts:
        parts.append("## Kernels\n\nNo figures are frozen yet.")
    parts.append(f"## Published by others\n\n{published_table()}")
    return "\n\n".join(parts)


def step_markdown(folder: Path = BASELINES) -> str:
    """Frozen step times of every device."""
    documents = [json.loads(path.read_text()) for path in sorted(folder.glob("*/step.json"))]
    parts = [
        f"## Step on {document['header']['device']}\n\n{_origin(document['header'])}\n\n{step_table(document)}"
        + (f"\n\n{trace_tables(document)}" if document["traces"] else "")
        for document in documents
    ]
    return "\n\n".join(parts) or "## Step\n\nNo figures are frozen yet."


def _origin(header: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in header["versions"].items())
    gpu = "".join(f"; {name} {value}" for name, value in (header["gpu"] or {}).items())
    notes = "".join(f" {note}." for note in header["notes"])
    floor = f"\n\nFloor: {header['floor']}." if "floor" in header else ""
    return f"{header['date']}, commit {header['commit']}; {versions}{gpu}.\n\n{header['method']}{notes}{floor}"


def gate_markdown(folder: Path = BASELINES) -> str:
    """Frozen figures of the gate of every device."""
    documents = [json.loads(path.read_text()) for path in sorted(folder.glob("*/gate.json"))]
    parts = [
        f"## Gate on {document['header']['device']}: {document['model']}, {document['rows'][0]['num_texts']} texts\n\n"
        f"{_origin(document['header'])}\n\n{gate_table(document)}"
        for document in documents
    ]
    return "\n\n".join(parts) or "## Gate\n\nNo figures are frozen yet."


def serve_markdown(folder: Path = BASELINES) -> str:
    """Frozen figures of the whole server on every device."""
    parts = []
    for path in sorted(folder.glob("*/serve.json")):
        document = json.loads(path.read_text())
        head = f"## Server on {document['header']['device']}: {document['load']['model']}"
        parts.append(f"{head}\n\n{_origin(document['header'])}\n\n{serve_tables(document)}")
    return "\n\n".join(parts) or "## Server\n\nNo figures are frozen yet."


def soak_markdown(folder: Path = BASELINES) -> str:
    """The frozen soak of every device."""
    documents = [json.loads(path.read_text()) for path in sorted(folder.glob("*/soak.json"))]
    parts = [
        f"## Soak on {document['header']['device']}\n\n{_origin(document['header'])}\n\n{soak_table(document)}"
        for document in documents
    ]
    return "\n\n".join(parts) or "## Soak\n\nNo figures are frozen yet."


def _voice() -> dict[str, Any]:
    return json.loads((BASELINES / VOICE_DEVICE / "gate.json").read_text())


PARTS: dict[str, Callable[[], str]] = {
    "kernels": kernels_markdown,
    "step": step_markdown,
    "gate": gate_markdown,
    "serve": serve_markdown,
    "soak": soak_markdown,
    "voice": lambda: voice_table(_voice()),
    "voice in a sentence": lambda: voice_sentence(_voice()),
    "speed in a sentence": lambda: speed_sentence(json.loads(path_of("serve", SPEED_DEVICE).read_text())),
}
"""What stands between the markers of a page, by their name."""


def rewrite(text: str) -> str:
    """`text` with every part that it marks written anew.

    Raises:
      ValueError: it marks none, or marks the beginning of one and not its end.
    """
    marked = [name for name in PARTS if _begin(name) in text]
    if not marked:
        raise ValueError(f"the page lacks markers such as {_begin('gate')!r}")
    for name in marked:
        before, _, rest = text.partition(_begin(name))
        _, end, after = rest.partition(_end(name))
        if not end:
            raise ValueError(f"the page lacks the marker {_end(name)!r}")
        text = f"{before}{_begin(name)}\n\n{PARTS[name]()}\n\n{_end(name)}{after}"
    return text


def _begin(name: str) -> str:
    return f"<!-- {name}: written by python -m fishjax.bench report -->"


def _end(name: str) -> str:
    return f"<!-- {name}: end -->"


def write_plots(folder: Path, baselines: Path = BASELINES) -> list[Path]:
    """PNGs per device: of each op, time over rows with the floor dashed; of the server, its closed loops.

    Needs matplotlib (ImportError without it).
    """
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    paths = []
    for path in sorted(baselines.glob("*/kernels.json")):
        document = json.loads(path.read_text())
        for op in OPS:
            if not (series := _series(document["rows"], op)):
                continue
            figure, axes = pyplot.subplots(figsize=(8, 5))
            for label, rows in series.items():
                m = [row["m"] for row in rows]
                (line,) = axes.plot(m, [row["host_us"] for row in rows], "o-", label=label)
                axes.plot(m, [row["floor_us"] for row in rows], "--", color=line.get_color())
            axes.set_xscale("log", base=2)
            counts = sorted({row["m"] for rows in series.values() for row in rows})
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.set(yscale="log", xlabel="m (rows; slots)", ylabel="us a call", title=f"{op}; dashed: floor")
            axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
            target = folder / f"{document['header']['device']}-{op}.png"
            figure.savefig(target, dpi=120, bbox_inches="tight")
            pyplot.close(figure)
            paths.append(target)
    from .serve.plot import plot_loads

    for path in sorted(baselines.glob("*/serve.json")):
        document = json.loads(path.read_text())
        paths.append(folder / f"{document['header']['device']}-serve.png")
        plot_loads(document, paths[-1])
    return paths


def _series(rows: Iterable[dict[str, Any]], op: str) -> dict[str, list[dict[str, Any]]]:
    """Measured rows by shape, one kind of input an op: the matmuls alone, as published figures have it."""
    kind = "quantized" if op in MATMULS else "bfloat16"
    series: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["op"] == op and row["input"] == kind and row["host_us"] is not None:
            series.setdefault(shape_label(row), []).append(row)
    return series
