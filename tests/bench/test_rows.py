"""Rows, the check that guards freezing, the tuner's choice, tables and the page that quotes them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fishjax.bench import __main__ as command_line
from fishjax.bench import cases, check, frozen, kernels, report, tune
from fishjax.bench.pool import Task

runner = CliRunner()
FIELDS = {"tile_n": 64}


def measured(case, part):
    if part == "kernel":
        kernel_us = cases.floor_us(case) * 2
        return {"host_us": kernel_us + 1, "host_us_spread": 0.01, "kernel_us": kernel_us, "rel_err": 1e-3}
    if part == "torch_block_fp8":
        return {"reason": "torch refuses it"}
    return {"host_us": 3 * cases.floor_us(case), "host_us_spread": 0.01}


@pytest.fixture
def results():
    batches = kernels.make_tasks(cases.grid(), {"backend": "mosaic", "config": None}, peers=True)
    return [(task, measured(task.case, task.part)) for batch in batches for task in batch]


def document(results):
    head = kernels.make_kernels_header("nvidia-h200", {"jax": "0"}, {"clocks.sm": "1980 MHz"}, [])
    return kernels.make_document(head, cases.grid(), results, "mosaic")


def problems(results):
    return check.problems(document(results), cases.grid())


def change(results, part, **fields):
    """The same results with the first one of `part` changed."""
    i = next(i for i, (task, _) in enumerate(results) if task.part == part)
    return [*results[:i], (results[i][0], results[i][1] | fields), *results[i + 1 :]]


def test_a_whole_run_passes_and_survives_json(results):
    whole = document(results)
    assert check.problems(json.loads(json.dumps(whole)), cases.grid()) == []
    assert len(whole["rows"]) == len(cases.grid())
    assert all(set(row["peers"]) == set(cases.PEERS) for row in whole["rows"])


def test_every_kernel_comes_before_any_peer_and_no_measurement_comes_twice(results):
    parts = [task.part for task, _ in results]
    assert "kernel" not in parts[len(cases.grid()) :]
    shared = [(task.case.group, task.part) for task, _ in results if task.part in kernels.SHARED_PEERS]
    assert len(set(shared)) == len(shared)
    assert len({(task.case.key, task.part) for task, _ in results}) == len(results)


def test_quantised_rows_take_the_bfloat16_peers_of_their_group(results):
    rows = {(r["op"], r["name"], r["m"], r["input"]): r["peers"] for r in document(results)["rows"]}
    a, b = (rows["block_scaled_matmul", "wo", 8, kind] for kind in ("quantized", "bfloat16"))
    assert a["xla_bf16"] == b["xla_bf16"] and "host_us" in a["xla_bf16"]
    assert a["xla_fp8"] != b["xla_fp8"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"rel_err": 0.5}, "is wrong"),
        ({"rel_err": float("nan")}, "is wrong"),
        ({"host_us": 10.0, "kernel_us": 12.0}, "overlapped"),
        ({"host_us": 0.1, "kernel_us": None}, "less than memory allows"),
        ({"host_us": None, "reason": "timed out", "failed": True}, "timed out"),
        ({"host_us": None}, "neither a time nor a reason"),
    ],
)
def test_the_check_finds_a_bad_row(results, fields, says):
    (problem,) = problems(change(results, "kernel", **fields))
    assert says in problem


def test_the_check_finds_holes(results):
    kernel, rest = results[0], results[1:]
    assert "not measured" in problems(rest)[0]
    lacking = document(results)
    del lacking["rows"][0], lacking["header"]["commit"]
    found = check.problems(lacking, cases.grid())
    assert len(found) == 2 and found[1] == f"{kernel[0].case.key}: no row" and "commit" in found[0]
    (peer,) = [p for p in problems(change(results, "xla_fp8", host_us=None))]
    assert "peer xla_fp8" in peer


def test_a_reason_is_enough_for_a_kernel_that_cannot_run(results):
    fields = {"host_us": None, "kernel_us": None, "rel_err": None, "reason": "no config fits"}
    assert problems(change(results, "kernel", **fields)) == []


def test_the_check_command(results, tmp_path, monkeypatch):
    monkeypatch.setattr(frozen, "BASELINES", tmp_path / "baselines")
    kept = tmp_path / "baselines" / "nvidia-h200" / "kernels.json"
    path = tmp_path / "k.json"
    path.write_text(json.dumps(document(results)))
    assert runner.invoke(command_line.app, ["kernels", "--check", "--out", str(path)]).exit_code == 0
    path.write_text(json.dumps(document(results[1:])))
    failed = runner.invoke(command_line.app, ["kernels", "--check", "--out", str(path)])
    assert failed.exit_code == 1 and "not measured" in failed.stderr
    assert runner.invoke(command_line.app, ["kernels", "--check", "--freeze", "--out", str(path)]).exit_code == 1
    assert not kept.exists()
    path.write_text(json.dumps(document(results)))
    assert runner.invoke(command_line.app, ["kernels", "--check", "--freeze", "--out", str(path)]).exit_code == 0
    assert json.loads(kept.read_text()) == document(results) | {"header": json.loads(path.read_text())["header"]}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--op", "block_scaled_matmul", "--config", "width=3"], "no width"),
        (["--freeze", "--m", "8"], "whole grid"),
        (["--shapes", "nothing"], "no case"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(options, says):
    result = runner.invoke(command_line.app, ["kernels", *options])
    assert says in str(result.exception)


def test_the_tuner_takes_the_fastest_that_is_right(tmp_path, monkeypatch):
    case = cases.Case("block_scaled_matmul", "wo", {"N": 2560, "K": 4096}, 8, "quantized")
    tried = [(5.0, 1e-3, 64), (3.0, 1e-3, 128), (1.0, 0.5, 256), (0.5, float("nan"), 512)]
    results = [
        (Task(case, "kernel", "jax", {"config": {"tile_n": n}}), {"host_us": t, "rel_err": e, "config": {"tile_n": n}})
        for t, e, n in tried
    ]
    failed = Task(case, "kernel", "jax", {"config": {"tile_n": 1}}), {"reason": "timed out", "failed": True}
    chosen = tune.choose([*results, failed])
    assert chosen == {"block_scaled_matmul": {"8x2560x4096": {"tile_n": 128}}}
    assert "timed out" in tune.table([*results, failed])
    monkeypatch.setattr(tune.pallas_kernels, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "block_scaled_matmul" / "tuned").mkdir(parents=True)
    file = tmp_path / "block_scaled_matmul" / "tuned" / "nvidia-h200.json"
    file.write_text('{"16x2560x4096": {"tile_n": 64}}')
    assert tune.write(chosen, "nvidia-h200") == [file]
    assert json.loads(file.read_text()) == {"16x2560x4096": {"tile_n": 64}, "8x2560x4096": {"tile_n": 128}}


def test_the_tuner_times_whole_buckets_only():
    batches = tune.make_tasks(cases.grid())
    assert {task.case.m for batch in batches for task in batch if task.case.op == "block_scaled_matmul"} == {
        8, 16, 32, 64, 128
    }  # fmt: skip
    keys = [(batch[0].case.op, cases.tuned_key(batch[0].case)) for batch in batches]
    assert len(set(keys)) == len(keys)


def test_tables_say_what_was_measured(results):
    refused = change(results, "kernel", host_us=None, kernel_us=None, rel_err=None, reason="no config fits")
    text = report.kernel_tables(document(refused))
    assert "- (no config fits)" in text and "`torch_block_fp8`: torch refuses it" in text
    row = document(results)["rows"][0]
    line = next(
        x for x in report.kernel_tables(document(results)).splitlines() if x.startswith("| wqkv 6144x2560 | 1 ")
    )
    assert f"{row['host_us']:.2f}" in line and f"{row['floor_us']:.2f}" in line and "1.0e-03" in line
    wrong = report.kernel_tables(document(change(results, "kernel", rel_err=1.0)))
    assert "**wrong**" in wrong


def test_markdown_and_plots_from_a_baseline(results, tmp_path):
    (tmp_path / "nvidia-h200").mkdir()
    (tmp_path / "nvidia-h200" / "kernels.json").write_text(json.dumps(document(results)))
    text = report.kernels_markdown(tmp_path)
    assert "## Kernels on nvidia-h200" in text and "4.48 TB/s" in text and "not measured by us" in text
    paths = report.write_plots(tmp_path, tmp_path)
    assert {p.name for p in paths} == {f"nvidia-h200-{op}.png" for op in cases.OPS}
    assert all(p.stat().st_size > 5000 for p in paths)


@pytest.mark.parametrize("page", ["docs/benchmarks.md", "docs/serving.md"])
def test_the_pages_quote_the_frozen_figures(page):
    page = Path(__file__).parents[2] / page
    assert report.rewrite(page.read_text()) == page.read_text()


def test_a_page_without_markers_is_refused():
    with pytest.raises(ValueError, match="markers"):
        report.rewrite("nothing")


def test_frozen_files_pass_the_check():
    for path in report.BASELINES.glob("*/kernels.json"):
        assert check.problems(json.loads(path.read_text()), cases.grid()) == []
