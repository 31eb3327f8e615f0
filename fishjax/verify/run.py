"""Verify a whole folder: every file below it must be claimed by one room, and every entry compared.

Each room looks at one folder at a time and returns reports on the files it knows. A file that no room claims, a
folder with nothing in it and a room that cannot finish are failures.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax

from fishjax.config import read_json
from fishjax.errors import FishjaxError, WeightsError
from fishjax.verify import codec, dualar, e2e, prompt
from fishjax.verify.report import Check, FileReport

_log = logging.getLogger(__name__)

_IGNORED = ("README.md",)
_NOT_REPLAYED = "not replayed: HTTP contract of the original"


def verify_folder(root: Path | str, progress: Callable[[str], None] | None = None) -> list[FileReport]:
    """Replay everything recorded below `root`, matmuls at full precision; one report per file, in order of names.

    `progress` hears which folder is next.
    """
    root = Path(root)
    if not root.is_dir():
        return [_failure(str(root), "no such folder")]
    files = sorted(path for path in root.rglob("*") if path.is_file() and path.name not in _IGNORED)
    if not files:
        return [_failure(str(root), "the folder holds nothing to verify")]
    reports: list[FileReport] = []
    with jax.default_matmul_precision("highest"):
        for folder in [root, *sorted(path for path in root.rglob("*") if path.is_dir())]:
            if progress:
                progress(f"replaying {folder.relative_to(root)}" if folder != root else f"reading {root}")
            for room in (dualar.verify, codec.verify, prompt.verify, e2e.verify, _verify_server_contract):
                reports += _run_room(room, folder, root)
    claimed = {report.file for report in reports}
    unclaimed = [str(path.relative_to(root)) for path in files if str(path.relative_to(root)) not in claimed]
    reports += [_failure(name, "unknown file: nothing here knows how to verify it") for name in unclaimed]
    return sorted(reports, key=lambda report: report.file)


def print_reports(reports: Sequence[FileReport], file: TextIO | None = None) -> None:
    """Per file the entries present, read as inputs and compared, then its checks; to stderr by default."""
    file = file or sys.stderr
    for report in reports:
        counts = f"{report.present} present, {report.inputs} inputs, {report.compared} compared"
        print(f"{'ok  ' if report.ok else 'FAIL'} {report.file}: {counts}", file=file)
        for check in report.checks:
            note = f"  ({check.note})" if check.note else ""
            mark = "    " if check.ok else "OUT "
            print(f"       {mark}{check.name:<44} {check.error:9.3g} <= {check.tolerance:g}{note}", file=file)
        for name in report.untouched:
            print(f"       OUT {name}: not compared", file=file)
    failed = sum(not report.ok for report in reports)
    num_checks = sum(len(report.checks) for report in reports)
    verdict = "all within tolerance" if not failed else f"{failed} files FAILED"
    print(f"{len(reports)} files, {num_checks} checks: {verdict}", file=file)


def to_json(reports: Sequence[FileReport]) -> dict[str, Any]:
    """All reports as one JSON document; an infinite or undefined error is null."""
    return {
        "ok": bool(reports) and all(report.ok for report in reports),
        "files": [
            {
                "file": report.file,
                "ok": report.ok,
                "present": report.present,
                "inputs": report.inputs,
                "compared": report.compared,
                "untouched": list(report.untouched),
                "checks": [
                    {
                        "name": check.name,
                        "ok": check.ok,
                        "error": check.error if math.isfinite(check.error) else None,
                        "tolerance": check.tolerance,
                        "note": check.note,
                    }
                    for check in report.checks
                ],
            }
            for report in reports
        ],
    }


def _run_room(room: Callable[[Path, Path], list[FileReport]], folder: Path, root: Path) -> list[FileReport]:
    """A room's reports; whatever it stumbles over is a failure of the folder, with the reason."""
    name = str(folder.relative_to(root))
    try:
        return room(folder, root)
    except FishjaxError as error:
        return [_failure(name, str(error))]
    except Exception as error:
        # A damaged file can break a replay anywhere; the other files must still be reported.
        _log.exception("cannot verify %s", folder)
        return [_failure(name, f"{type(error).__name__}: {error}")]


def _verify_server_contract(folder: Path, root: Path) -> list[FileReport]:
    """Recorded requests and replies of the original's HTTP server, known by their fields: listed, not replayed."""
    path = folder / "cases.json"
    if not path.is_file():
        return []
    try:
        raw = read_json(path)
    except WeightsError:
        return []  # no room claims it, so it is reported as unknown
    cases = raw.get("cases")
    is_contract = (
        isinstance(cases, list) and cases and all({"method", "path", "status"} <= case.keys() for case in cases)
    )
    if not is_contract:
        return []
    name = str(path.relative_to(root))
    return [FileReport(file=name, present=len(raw), checks=[Check(name, _NOT_REPLAYED, 0.0, 0.0)])]


def _failure(file: str, reason: str) -> FileReport:
    return FileReport(file=file, checks=[Check(file, reason, float("inf"), 0.0)])
