"""What a file of figures must hold before it may be frozen: every combination, measured or with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .cases import PEERS, Case, case_key
from .header import SCHEMA

MEMORY_SLACK = 0.9
"""The datasheet's rate is 7 % over the measured one that floor_us takes."""
HEADER_FIELDS = ("schema", "suite", "device", "versions", "commit", "method", "floor", "gpu", "date", "notes")
ROW_FIELDS = (
    *("op", "name", "shape", "m", "input", "backend", "config", "kernel_us", "host_us", "host_us_spread", "floor_us"),
    *("rel_err", "tolerance", "peers"),
)


def problems(document: dict[str, Any], expected: Iterable[Case]) -> list[str]:
    """One sentence for each thing that is missing or wrong; an empty list when all is well."""
    return document_problems(document, (case.key for case in expected), _key, _row_problems)


def document_problems(
    document: dict[str, Any],
    expected: Iterable[str],
    key_of: Callable[[dict[str, Any]], str],
    row_problems: Callable[[dict[str, Any]], Iterable[str]],
) -> list[str]:
    """The same of any suite: its header, the rows of the keys that are expected, and each row."""
    header = document.get("header", {})
    found = [f"the header lacks {name!r}" for name in HEADER_FIELDS if name not in header]
    if header.get("schema") != SCHEMA:
        found.append(f"schema {header.get('schema')} is not {SCHEMA}")
    rows = {key_of(row): row for row in document.get("rows", ())}
    found += [f"{key}: no row" for key in expected if key not in rows]
    return found + [f"{key}: {problem}" for key, row in rows.items() for problem in row_problems(row)]


def _key(row: dict[str, Any]) -> str:
    return case_key(row["op"], row["shape"], row["m"], row["input"])


def _row_problems(row: dict[str, Any]) -> Iterable[str]:
    if missing := [name for name in ROW_FIELDS if name not in row]:
        yield f"lacks {', '.join(missing)}"
        return
    if row.get("failed"):
        yield f"failed: {row.get('reason')}"
    elif row["host_us"] is None:
        if not row.get("reason"):
            yield "has neither a time nor a reason"
    else:
        if not row["correct"]:
            yield f"is wrong: relative error {row['rel_err']} is over {row['tolerance']}"
        if row["host_us"] < MEMORY_SLACK * row["floor_us"]:
            yield f"took {row['host_us']:.2f} us, less than memory allows ({row['floor_us']:.2f} us): it was not cold"
        if row["overlapped"]:
            yield f"overlapped: host {row['host_us']:.2f} us is less than its kernels' {row['kernel_us']:.2f} us"
    for peer in PEERS:
        entry = row["peers"].get(peer, {})
        if entry.get("host_us") is None and not entry.get("reason"):
            yield f"peer {peer} has neither a time nor a reason"
