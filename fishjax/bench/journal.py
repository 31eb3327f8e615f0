"""What a run has measured so far, a JSON line a result, written at once; a later run may go on with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fishjax.errors import InvalidRequest

from .pool import Task


class Journal:
    """The lines of a run at `path`.

    identity: commit, device, versions: what must be the same for a run to go on with another one's results. Raises
    InvalidRequest where `resume` finds a journal of something else.
    """

    def __init__(self, path: Path, identity: dict[str, Any], resume: bool):
        self._kept: dict[str, dict[str, Any]] = {}
        head, lines = json.dumps({"run": identity}), path.read_text().splitlines() if resume and path.exists() else []
        if lines and lines[0] != head:
            raise InvalidRequest(f"--resume: {path} is of another run: {lines[0]}, this one is {head}")
        self._file = path.open("w")
        self._write(head)
        for line in lines[1:]:
            entry = json.loads(line)
            if not entry["result"].get("failed"):
                self._kept[_key(entry)] = entry["result"]
                self._write(line)

    def kept(self, task: Task) -> dict[str, Any] | None:
        """The result that an earlier run had of a task."""
        return self._kept.get(_key(_entry(task)))

    def add(self, task: Task, result: dict[str, Any], stage_s: dict[str, float] | None) -> None:
        """One more result; `stage_s`: seconds in each stage."""
        self._write(json.dumps({**_entry(task), "result": result, "stage_s": stage_s}))

    def _write(self, line: str) -> None:
        self._file.write(line + "\n")
        self._file.flush()


def _entry(task: Task) -> dict[str, Any]:
    return {"case": task.case.key, "part": task.part, "options": task.options}


def _key(entry: dict[str, Any]) -> str:
    return json.dumps([entry["case"], entry["part"], entry["options"]], sort_keys=True)
