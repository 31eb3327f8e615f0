"""`python -m fishjax.bench NAME`: measurements. Human text goes to stderr; exit 0 ok, 1 failed, 2 usage."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fishjax.errors import FishjaxError, InvalidRequest

from . import frozen
from .options import BudgetOption, CheckOption, FreezeOption, JsonOption, OutOption, ResumeOption
from .serve.command import serve
from .step.command import step

if TYPE_CHECKING:
    from .cases import Case
    from .run import Run

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Measurements.")


@app.callback()
def _commands() -> None:
    """Measurements of the parts and of the whole."""


@app.command()
def kernels(
    op: Annotated[list[str] | None, typer.Option(help="Only this op; may be repeated")] = None,
    shapes: Annotated[str | None, typer.Option(help="Only these shapes, by name: wqkv,down,slow_1024")] = None,
    m: Annotated[list[int] | None, typer.Option(help="Only this row count (slots for attention); repeatable")] = None,
    n: Annotated[int | None, typer.Option(help="Weight rows of one matmul; with --k, any shape")] = None,
    k: Annotated[int | None, typer.Option(help="Weight columns of one matmul")] = None,
    config: Annotated[str | None, typer.Option(help="Tile choices to change: 'tile_n=128,splits=4'")] = None,
    peers: Annotated[bool, typer.Option(help="Measure XLA and torch on the same work")] = True,
    budget: BudgetOption = math.inf,
    workers: Annotated[
        int | None, typer.Option(help="Compiling processes [default: half the cores, at most 8]")
    ] = None,
    out: OutOption = None,
    resume: ResumeOption = False,
    freeze: FreezeOption = False,
    check: CheckOption = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time every config of the op; write its tuned/<device>.json")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Time the ops at S2-Pro's shapes against the memory floor, XLA and torch."""
    from . import cases as grid_of
    from . import kernels as suite
    from . import ops
    from .check import problems
    from .report import kernel_tables

    def found_in(document: dict[str, Any]) -> list[str]:
        return problems(document, grid_of.grid())

    if check:
        frozen.check("kernels", found_in, out, freeze)
        return
    filters = {"ops": op, "shapes": shapes.split(",") if shapes else None, "rows": m, "n": n, "k": k}
    chosen = grid_of.select(grid_of.grid(), **filters)
    fields = ops.parse_config(config) if config else None
    if fields:
        for case in chosen:
            ops.check_fields(case.op, fields)
    if freeze and {case.key for case in chosen} != {case.key for case in grid_of.grid()}:
        raise InvalidRequest("--freeze takes the whole grid: leave the filters out")
    run = suite.start(out, workers or suite.default_workers(), budget, resume)
    if tune:
        _tune(run, chosen, out)
        return
    backend = "mosaic"
    if not run.on_gpu:
        frozen.say("no GPU was found: the reference runs small cases, whatever was asked for; nothing is frozen")
        chosen, backend, fields, freeze = grid_of.tiny_grid(), "reference", None, False
    results = suite.measure(run, suite.make_tasks(chosen, {"backend": backend, "config": fields}, peers))
    document = suite.make_document(suite.header_of(run), chosen, results, backend)
    if out:
        out.write_text(frozen.to_json(document))
    frozen.say(kernel_tables(document))
    if json_output:
        print(json.dumps(document))
    if freeze:
        frozen.freeze_if_sound(document, found_in)
    if any(row.get("failed") or not row.get("correct", True) or row.get("overlapped") for row in document["rows"]):
        raise typer.Exit(1)


def _tune(run: Run, chosen: list[Case], out: Path | None) -> None:
    from . import kernels as suite
    from . import tune

    if not run.on_gpu:
        raise InvalidRequest("--tune needs a GPU, and none was found")
    results = suite.measure(run, tune.make_tasks(chosen))
    choices = tune.choose(results)
    frozen.say(tune.table(results))
    for path in tune.write(choices, run.hello["device"]):
        frozen.say(f"written: {path}")
    if out:
        out.write_text(json.dumps({"header": suite.header_of(run), "tuned": choices}, indent=1) + "\n")


@app.command()
def gate(
    model: Annotated[Path | None, typer.Option(help="Model folder", show_default="minnow, which ships")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="Precision compared with the baseline; may be repeated", show_default="bf16, fp8, mxfp8 by module"
        ),
    ] = None,
    texts: Annotated[int, typer.Option(help="Held-out prompts to speak, 1 to 160")] = 24,
    out: OutOption = None,
    freeze: FreezeOption = False,
    json_output: JsonOption = False,
) -> None:
    """Is a precision as good as the baseline (fp32 on a CPU, bf16 on a GPU), and the voice as good as it was?"""
    from fishjax.engine.compile_cache import default_folder, keep_compiled
    from fishjax.speech import MINNOW
    from fishjax.status_line import StatusLine

    from .gate.measure import default_policies
    from .gate.run import make_document, run
    from .gate.tables import gate_table
    from .gate.texts import NUM_HELD_OUT
    from .gate.verdict import worse

    if importlib.util.find_spec("pocketsphinx") is None:
        raise InvalidRequest("the gate needs a recogniser: pip install 'fishjax[bench]'")
    if freeze and (model or policy or texts != NUM_HELD_OUT):
        raise InvalidRequest(f"--freeze takes minnow, all policies and --texts {NUM_HELD_OUT}")
    folder = model or MINNOW
    keep_compiled(default_folder())
    with StatusLine() as status:
        rows = run(folder, policy if policy is not None else default_policies(), texts, status)
    document = make_document(folder, rows)
    if out:
        out.write_text(frozen.to_json(document))
    frozen.say(gate_table(document))
    if freeze:
        frozen.freeze(document)
    kept = frozen.path_of("gate", document["header"]["device"])
    before = json.loads(kept.read_text()) if folder.samefile(MINNOW) and kept.exists() else {"rows": []}
    found = worse(document, before)
    for problem in found:
        frozen.say(problem)
    if json_output:
        print(json.dumps(document))
    if found:
        raise typer.Exit(1)


app.command()(serve)
app.command()(step)


@app.command()
def report(
    docs: Annotated[
        list[Path] | None, typer.Option(help="Page whose marked parts are rewritten: docs/benchmarks.md; repeatable")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder for PNGs; needs matplotlib (extra: bench)")] = None,
) -> None:
    """Print the frozen figures as markdown; rewrite pages that quote them; draw time against floor."""
    from . import report as reports

    print("\n\n".join(reports.PARTS[suite]() for suite in ("kernels", "step", "gate", "serve", "soak")))
    for page in docs or ():
        page.write_text(reports.rewrite(page.read_text()))
        frozen.say(f"rewritten: {page}")
    if plots:
        if importlib.util.find_spec("matplotlib") is None:
            raise InvalidRequest("--plots needs matplotlib: pip install 'fishjax[bench]'")
        for path in reports.write_plots(plots):
            frozen.say(f"drawn: {path}")


def main() -> None:
    """Run the command line; errors that fishjax raises on purpose become one sentence and exit code 2."""
    try:
        app()
    except FishjaxError as error:
        frozen.say(f"error: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
