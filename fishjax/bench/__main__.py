"""`python -m fishjax.bench NAME`: measurements. Human text goes to stderr; exit 0 ok, 1 failed, 2 usage."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fishjax.errors import FishjaxError, InvalidRequest

from .serve.command import serve
from .step.command import step

if TYPE_CHECKING:
    from .cases import Case
    from .run import Run

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Measurements.")
BASELINES = Path(__file__).parent / "baselines"


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
    budget: Annotated[float, typer.Option(help="Start no new case after so many seconds")] = math.inf,
    workers: Annotated[
        int | None, typer.Option(help="Compiling processes [default: half the cores, at most 8]")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write, beside a .jsonl journal and a .log")] = None,
    freeze: Annotated[
        bool, typer.Option(help="Write fishjax/bench/baselines/<device>/kernels.json if all is well")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Measure nothing: check --out (and --freeze it), else the frozen files")
    ] = False,
    tune: Annotated[
        bool, typer.Option("--tune", help="Time every config of the op; write its tuned/<device>.json")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout")] = False,
) -> None:
    """Time the ops at S2-Pro's shapes against the memory floor, XLA and torch."""
    from . import cases as grid_of
    from . import kernels as suite
    from . import ops

    if check:
        _check(out, freeze)
        return
    filters = {"ops": op, "shapes": shapes.split(",") if shapes else None, "rows": m, "n": n, "k": k}
    chosen = grid_of.select(grid_of.grid(), **filters)
    fields = ops.parse_config(config) if config else None
    if fields:
        for case in chosen:
            ops.check_fields(case.op, fields)
    if freeze and {case.key for case in chosen} != {case.key for case in grid_of.grid()}:
        raise InvalidRequest("--freeze takes the whole grid: leave the filters out")
    run = suite.start(out, workers or suite.default_workers(), budget)
    if tune:
        _tune(run, chosen, out)
        return
    backend = "mosaic"
    if not run.on_gpu:
        _say("no GPU was found: the reference back end runs a few small cases, and nothing is frozen")
        chosen, backend, fields, freeze = grid_of.tiny_grid(), "reference", None, False
    results = suite.measure(run, suite.make_tasks(chosen, {"backend": backend, "config": fields}, peers))
    document = suite.make_document(suite.header_of(run), chosen, results, backend)
    if out:
        out.write_text(json.dumps(document, indent=1) + "\n")
    _print_table(document)
    if json_output:
        print(json.dumps(document))
    if freeze:
        _freeze(document)
    if any(row.get("failed") or not row.get("correct", True) or row.get("overlapped") for row in document["rows"]):
        raise typer.Exit(1)


def _tune(run: Run, chosen: list[Case], out: Path | None) -> None:
    from . import kernels as suite
    from . import tune

    if not run.on_gpu:
        raise InvalidRequest("--tune needs a GPU, and none was found")
    results = suite.measure(run, tune.make_tasks(chosen))
    choices = tune.choose(results)
    _say(tune.table(results))
    for path in tune.write(choices, run.hello["device"]):
        _say(f"written: {path}")
    if out:
        out.write_text(json.dumps({"header": suite.header_of(run), "tuned": choices}, indent=1) + "\n")


def _freeze(document: dict) -> None:
    """Write the baseline of the document's device, if it passes the check; else exit 1."""
    _fail_on_problems({"not frozen": document})
    path = BASELINES / document["header"]["device"] / "kernels.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    _say(f"frozen: {path}")


def _check(out: Path | None, freeze: bool) -> None:
    paths = [out] if out else sorted(BASELINES.glob("*/kernels.json"))
    if not paths:
        raise InvalidRequest(f"nothing to check: {BASELINES} holds no kernels.json; name a file with --out")
    documents = {str(path): json.loads(path.read_text()) for path in paths}
    _fail_on_problems(documents)
    if freeze and out:
        _freeze(documents[str(out)])


def _fail_on_problems(documents: dict[str, dict]) -> None:
    from .cases import grid
    from .check import problems

    found = [f"{name}: {problem}" for name, document in documents.items() for problem in problems(document, grid())]
    for problem in found:
        _say(problem)
    _say(f"{len(documents)} files checked, {len(found)} problems")
    if found:
        raise typer.Exit(1)


def _print_table(document: dict) -> None:
    from .report import kernel_tables

    _say(kernel_tables(document))


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
    out: Annotated[Path | None, typer.Option(help="JSON file to write")] = None,
    freeze: Annotated[
        bool, typer.Option(help="Write fishjax/bench/baselines/<device>/gate.json; takes all texts and policies")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON document as the last line of stdout")] = False,
) -> None:
    """Is a precision as good as the baseline (fp32 on a CPU, bf16 on a GPU), and the voice as good as it was?"""
    from fishjax.engine.compile_cache import default_folder, keep_compiled
    from fishjax.speech import MINNOW
    from fishjax.status_line import StatusLine

    from .gate.measure import default_policies
    from .gate.run import make_document, run, to_json
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
        out.write_text(to_json(document))
    _say(gate_table(document))
    frozen = BASELINES / document["header"]["device"] / "gate.json"
    if freeze:
        frozen.parent.mkdir(parents=True, exist_ok=True)
        frozen.write_text(to_json(document))
        _say(f"frozen: {frozen}")
    before = json.loads(frozen.read_text()) if folder.samefile(MINNOW) and frozen.exists() else {"rows": []}
    found = worse(document, before)
    for problem in found:
        _say(problem)
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
        _say(f"rewritten: {page}")
    if plots:
        if importlib.util.find_spec("matplotlib") is None:
            raise InvalidRequest("--plots needs matplotlib: pip install 'fishjax[bench]'")
        for path in reports.write_plots(plots):
            _say(f"drawn: {path}")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def main() -> None:
    """Run the command line; errors that fishjax raises on purpose become one sentence and exit code 2."""
    try:
        app()
    except FishjaxError as error:
        _say(f"error: {error}")
        sys.exit(2)


if __name__ == "__main__":
    main()
