"""The command `step`: options to a suite, figures to files, problems to an exit code."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fishjax.errors import InvalidRequest

BASELINES = Path(__file__).parents[1] / "baselines"


def step(
    slots: Annotated[
        list[int] | None, typer.Option(help="Slots; may be repeated", show_default="1, 4, 16 and 64")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Precision on top of bf16: slow=fp8,kv=fp8; may be repeated", show_default="four of them"),
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Also print where the time of a step goes, by part")] = False,
    budget: Annotated[float, typer.Option(help="Start no new case after so many seconds")] = math.inf,
    out: Annotated[Path | None, typer.Option(help="JSON file to write, beside a .jsonl journal and a .log")] = None,
    freeze: Annotated[
        bool, typer.Option("--freeze", help="Write fishjax/bench/baselines/<device>/step.json if all is well")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Measure nothing: check --out (and --freeze it), else the frozen files")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout")] = False,
) -> None:
    """Time the engine's step at S2-Pro's size with random weights, sound included, beside plain XLA."""
    from . import cases
    from .check import row_problems
    from .run import header_of, make_document, make_tasks, start
    from .tables import step_table, trace_tables

    if check:
        _check(out, freeze)
        return
    chosen = cases.select(cases.grid(), slots, policy)
    if freeze and set(chosen) != set(cases.grid()):
        raise InvalidRequest("--freeze takes the whole grid: leave --slots and --policy out")
    run = start(out, budget)
    if not run.on_gpu:
        _say("no GPU was found: a tiny model runs, which measures nothing of note, and nothing is frozen")
        chosen, freeze = cases.select(cases.tiny_grid(), slots, policy), False
    results = run.measure(make_tasks(chosen, trace))
    document = make_document(header_of(run), chosen, results, BASELINES)
    if out:
        out.write_text(json.dumps(document, indent=1) + "\n")
    _say(step_table(document))
    if trace:
        _say("\n" + trace_tables(document))
    if json_output:
        print(json.dumps(document))
    if freeze:
        _freeze(document)
    found = [
        f"{row['policy']}, {row['slots']} slots {problem}" for row in document["rows"] for problem in row_problems(row)
    ]
    for problem in found:
        _say(problem)
    if found:
        raise typer.Exit(1)


def _freeze(document: dict[str, Any]) -> None:
    """Write the baseline of the document's device, if it passes the check; else exit 1."""
    _fail_on_problems({"not frozen": document})
    path = BASELINES / document["header"]["device"] / "step.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    _say(f"frozen: {path}")


def _check(out: Path | None, freeze: bool) -> None:
    paths = [out] if out else sorted(BASELINES.glob("*/step.json"))
    if not paths:
        raise InvalidRequest(f"nothing to check: {BASELINES} holds no step.json; name a file with --out")
    documents = {str(path): json.loads(path.read_text()) for path in paths}
    _fail_on_problems(documents)
    if freeze and out:
        _freeze(documents[str(out)])


def _fail_on_problems(documents: dict[str, dict[str, Any]]) -> None:
    from .cases import grid
    from .check import problems

    found = [f"{name}: {problem}" for name, document in documents.items() for problem in problems(document, grid())]
    for problem in found:
        _say(problem)
    _say(f"{len(documents)} files checked, {len(found)} problems")
    if found:
        raise typer.Exit(1)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
