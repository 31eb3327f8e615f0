"""What `verify` compared, of what was there.

A golden file is opened as `GoldenFile`; each of its entries must be taken as an input (`read`) or compared
(`compare`). Whatever is left untouched fails the run, so a case can never be skipped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from fishjax.errors import WeightsError

FLOAT_TOLERANCE = 2e-4
"""Of a float32 replay, scaled by max(1, largest magnitude)."""


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: its worst error beside its tolerance (0 for things that must be identical)."""

    file: str
    name: str
    error: float
    tolerance: float
    note: str = ""

    @property
    def ok(self) -> bool:
        """True when the error is within tolerance; NaN is out."""
        return bool(self.error <= self.tolerance)


@dataclass(slots=True)
class FileReport:
    """Per file: how many entries are present, read as inputs, compared; and the checks made."""

    file: str
    present: int = 0
    inputs: int = 0
    compared: int = 0
    untouched: tuple[str, ...] = ()
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True when every check passed and nothing was left untouched."""
        return not self.untouched and all(check.ok for check in self.checks)


class GoldenFile:
    """The entries of one golden file (`.safetensors` tensors or the cases of a `.json`), with book-keeping."""

    def __init__(self, path: Path, entries: Mapping[str, Any], root: Path):
        self.name = str(path.relative_to(root))
        self._entries = dict(entries)
        self._touched: set[str] = set()
        self._compared: set[str] = set()
        self.checks: list[Check] = []

    @classmethod
    def open(cls, path: Path, root: Path) -> GoldenFile:
        """Open a file below `root`; JSON files offer their top-level keys as entries."""
        try:
            if path.suffix == ".safetensors":
                return cls(path, load_file(path), root)
            return cls(path, json.loads(path.read_text(encoding="utf-8")), root)
        except (OSError, ValueError) as error:
            raise WeightsError(f"cannot read {path}: {error}") from error
        except Exception as error:  # safetensors raises its own class, which is not public
            raise WeightsError(f"cannot read {path}: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self, prefix: str = "") -> list[str]:
        """Names of entries that start with `prefix`."""
        return [name for name in self._entries if name.startswith(prefix)]

    def read(self, name: str) -> Any:
        """Take an entry as an input of a replay."""
        if name not in self._entries:
            raise WeightsError(f"{self.name} has no entry '{name}'")
        self._touched.add(name)
        return self._entries[name]

    def compare(self, name: str, actual: Any, tolerance: float, *, note: str = "") -> None:
        """Compare an entry with what fishjax computed.

        `tolerance` is absolute, scaled by max(1, max |expected|); 0 means identical (integers, texts).
        """
        expected = self.read(name)
        self._compared.add(name)
        self.checks.append(Check(self.name, name, difference(expected, actual, exact=tolerance == 0), tolerance, note))

    def check(self, name: str, error: float, tolerance: float, *, entries: Iterable[str] = (), note: str = "") -> None:
        """Record a comparison made elsewhere; `entries` are the file's entries that it covered."""
        for entry in entries:
            self.read(entry)
            self._compared.add(entry)
        self.checks.append(Check(self.name, name, float(error), tolerance, note))

    def report(self) -> FileReport:
        """Close the books on this file."""
        untouched = tuple(sorted(set(self._entries) - self._touched))
        return FileReport(
            file=self.name,
            present=len(self._entries),
            inputs=len(self._touched - self._compared),
            compared=len(self._compared),
            untouched=untouched,
            checks=self.checks,
        )


def difference(expected: Any, actual: Any, *, exact: bool) -> float:
    """Worst difference: 0 or inf when `exact`, else max |a - b| / max(1, max |b|). Other shapes give inf."""
    if not isinstance(expected, np.ndarray):
        return 0.0 if expected == actual else float("inf")
    actual = np.asarray(actual)
    if actual.shape != expected.shape:
        return float("inf")
    if exact:
        return 0.0 if np.array_equal(expected, actual) else float("inf")
    wanted = expected.astype(np.float64)
    if not wanted.size:
        return 0.0
    worst = np.max(np.abs(wanted - actual.astype(np.float64)))
    return float(worst / max(1.0, np.max(np.abs(wanted))))
