"""Files of figures that are kept: where they lie, how they are written, and the check before one may be."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from fishjax.errors import InvalidRequest

BASELINES = Path(__file__).parent / "baselines"
Problems = Callable[[dict[str, Any]], list[str]]


def say(message: str) -> None:
    """A line for people."""
    print(message, file=sys.stderr, flush=True)


def to_json(document: dict[str, Any]) -> str:
    """The document as text; its rows, if it has any, a row a line."""
    if "rows" not in document:
        return json.dumps(document, indent=1) + "\n"
    rows = ",\n".join(f"  {json.dumps(row)}" for row in document["rows"])
    rest = json.dumps({name: value for name, value in document.items() if name != "rows"}, indent=1)
    return f'{rest[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'


def path_of(suite: str, device: str) -> Path:
    """Where the frozen figures of a suite on a device lie."""
    return BASELINES / device / f"{suite}.json"


def freeze(document: dict[str, Any]) -> None:
    """Keep a document as its suite's figures on its device."""
    path = path_of(document["header"]["suite"], document["header"]["device"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(document))
    say(f"frozen: {path}")


def freeze_if_sound(document: dict[str, Any], problems: Problems) -> None:
    """The same, if nothing is wrong with it; else exit 1."""
    _fail_on_problems({"not frozen": document}, problems)
    freeze(document)


def check(suite: str, problems: Problems, out: Path | None, and_freeze: bool) -> None:
    """Check a file (and freeze it), or all frozen ones of a suite; exit 1: something is wrong."""
    paths = [out] if out else sorted(BASELINES.glob(f"*/{suite}.json"))
    if not paths:
        raise InvalidRequest(f"nothing to check: {BASELINES} holds no {suite}.json; name a file with --out")
    documents = {str(path): json.loads(path.read_text()) for path in paths}
    _fail_on_problems(documents, problems)
    if and_freeze and out:
        freeze(documents[str(out)])


def _fail_on_problems(documents: dict[str, dict[str, Any]], problems: Problems) -> None:
    found = [f"{name}: {problem}" for name, document in documents.items() for problem in problems(document)]
    for problem in found:
        say(problem)
    say(f"{len(documents)} files checked, {len(found)} problems")
    if found:
        raise typer.Exit(1)
