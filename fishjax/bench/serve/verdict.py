"""What the figures mean: each timed promise held or not, and a run against the frozen one. Rows in, words out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tables import row_name

Row = Mapping[str, Any]
_PAGE = Path(__file__).parent / "thresholds.json"
_SAME = ("loop", "concurrency", "rate", "slots", "policy", "voices")
"""Two rows with the same of these are of the same load."""


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What `thresholds.json` holds. Times are seconds, memory MB; the maps are by platform, "cpu" or "gpu".

    A line is part of a `row` of docs/behaviours.md. It asks of `figure` in all `rows` (that have one of the values
    named) to be at most, at least or below a number, which counts `times` the figure of another row of the same server,
    if it names one.
    """

    slots: Mapping[str, Sequence[int]]
    concurrency: Mapping[str, Sequence[int]]
    seconds: Mapping[str, float]
    crowd_seconds: float
    frozen: Mapping[str, Any]
    soak: Mapping[str, float]
    lines: Sequence[Mapping[str, Any]]

    @classmethod
    def read(cls, page: Path = _PAGE) -> Thresholds:
        """The file's."""
        return cls(**json.loads(page.read_text()))


def verdicts(rows: Sequence[Row], thresholds: Thresholds, platform: str) -> Iterator[tuple[str, bool]]:
    """A sentence for each promise that this platform can show, and whether it holds; a missing figure does not."""
    for line in thresholds.lines:
        if platform not in line["on"]:
            continue
        found = [row for row in rows if _is(row, line["rows"])]
        if not found:
            yield f"{line['line']}: not measured", False
        for row in found:
            limit, unit = _limit(line, row, rows)
            value = row[line["figure"]]
            told = f"{line['line']} ({row_name(row)}, {row['slots']} slots): {line['figure']} {value}, {unit}"
            yield told, value is not None and limit is not None and _holds(line, value, limit)


def _limit(line: Mapping[str, Any], row: Row, rows: Sequence[Row]) -> tuple[float | None, str]:
    """The number to hold, and how to tell it."""
    kind = next(kind for kind in ("at_most", "at_least", "below") if kind in line)
    words, number = kind.replace("_", " "), line[kind]
    if "times" not in line:
        return number, f"{words} {number:g}"
    other = [other[line["figure"]] for other in rows if _is(other, line["times"]) and other["server"] == row["server"]]
    base = other[0] if other else None
    limit = None if base is None else number * base
    return limit, f"{words} {number:g} x {base} ({line['times']['loop']})"


def _holds(line: Mapping[str, Any], value: float, limit: float) -> bool:
    if "at_least" in line:
        return value >= limit
    return value < limit if "below" in line else value <= limit


def _is(row: Row, wanted: Mapping[str, Any]) -> bool:
    return all(row[name] in (value if isinstance(value, list) else [value]) for name, value in wanted.items())


def slower(rows: Iterable[Row], frozen: Iterable[Row], thresholds: Thresholds, platform: str) -> list[str]:
    """A sentence for each figure that is worse than the frozen one of the same load by more than the slack.

    Only on platforms that have nothing else to do: the cores of a CPU are everybody's.
    """
    limits = thresholds.frozen
    if platform not in limits["on"]:
        return []
    before = {_key(row): row for row in frozen if _is(row, limits["rows"])}
    found = []
    for row in rows:
        if (old := before.get(_key(row))) is None:
            continue
        for name in (*limits["more"], *limits["less"]):
            if None in (row[name], old[name]):
                found.append(f"{row_name(row)}: {name} is {row[name]}; it was {old[name]} when it was frozen")
                continue
            factor = old[name] / row[name] if name in limits["more"] else row[name] / old[name]
            if factor > limits["slack"]:
                found.append(f"{row_name(row)}: {name} is {row[name]:g}; it was {old[name]:g} when it was frozen")
    return found


def unsound(rows: Iterable[Row]) -> list[str]:
    """A sentence for each load whose figures count for nothing: calls failed, frames are missing, nobody was heard."""
    found = []
    for row in rows:
        if row["failed"]:
            found.append(f"{row_name(row)}: {row['failed']} of {row['calls']} calls failed")
        if row["broken"]:
            found.append(f"{row_name(row)}: {row['broken']} streams lack frames")
        if not row["heard"]:
            found.append(f"{row_name(row)}: no call that began in the measured time was heard")
    return found


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _SAME)
