"""The command `step`: options to a suite, figures to files, problems to an exit code."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import typer

from fishjax.errors import InvalidRequest

from .. import frozen
from ..options import BudgetOption, CheckOption, FreezeOption, JsonOption, OutOption, ResumeOption


def step(
    slots: Annotated[
        list[int] | None, typer.Option(help="Slots; may be repeated", show_default="1, 4, 16 and 64")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Precision on top of bf16: slow=fp8,kv=fp8; may be repeated", show_default="three of them"),
    ] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Also print where the time of a step goes, by part")] = False,
    budget: BudgetOption = math.inf,
    out: OutOption = None,
    resume: ResumeOption = False,
    freeze: FreezeOption = False,
    check: CheckOption = False,
    json_output: JsonOption = False,
) -> None:
    """Time the engine's step at S2-Pro's size with random weights, sound included, beside plain XLA."""
    from . import cases
    from .check import problems, row_problems
    from .run import header_of, make_document, make_tasks, start
    from .tables import step_table, trace_tables

    def found_in(document: dict[str, Any]) -> list[str]:
        return problems(document, cases.grid())

    if check:
        frozen.check("step", found_in, out, freeze)
        return
    chosen = cases.select(cases.grid(), slots, policy)
    if freeze and set(chosen) != set(cases.grid()):
        raise InvalidRequest("--freeze takes the whole grid: leave --slots and --policy out")
    run = start(out, budget, resume)
    if not run.on_gpu:
        frozen.say("no GPU was found: a tiny model runs, which measures nothing of note, and nothing is frozen")
        chosen, freeze = cases.select(cases.tiny_grid(), slots, policy), False
    results = run.measure(make_tasks(chosen, trace))
    document = make_document(header_of(run), chosen, results, frozen.BASELINES)
    if out:
        out.write_text(frozen.to_json(document))
    frozen.say(step_table(document))
    if trace:
        frozen.say("\n" + trace_tables(document))
    if json_output:
        print(json.dumps(document))
    if freeze:
        frozen.freeze_if_sound(document, found_in)
    found = [
        f"{row['policy']}, {row['slots']} slots {problem}" for row in document["rows"] for problem in row_problems(row)
    ]
    for problem in found:
        frozen.say(problem)
    if found:
        raise typer.Exit(1)
