"""docs/portability.md claims no more than the tree holds."""

import hashlib
import importlib
import json
import re
from pathlib import Path

import pytest

import pallas_kernels
from pallas_kernels._dispatch import COMES_FIRST

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "portability.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if re.match(r"\| `\w+`", line)
]
CHIPS = {"sm_90": "9.0", "sm_100": "10.0"}
COMPILED = json.loads((Path(__file__).parent / "data" / "compiled.json").read_text())


RUNGS = ("reference", "interpreter", "lowered", "compiled", "run", "measured")
README = re.findall(r"^\| `(\w+)`[^|]*\| (\w+)[^|]*\| (\w+)[^|]*\|$", (ROOT / "README.md").read_text(), flags=re.M)


def op_of(row):
    return re.match(r"`(\w+)`", row[0]).group(1)


def test_every_op_has_a_row_for_every_chip():
    assert sorted((op_of(row), row[1]) for row in ROWS) == sorted((op, chip) for op in COMES_FIRST for chip in CHIPS)


def test_the_readme_names_the_highest_rung_of_each():
    highest = {}
    for row in ROWS:
        reached = [rung for rung, cell in zip(RUNGS, row[2:], strict=True) if cell not in ("no", "no kernel")]
        highest[op_of(row), row[1]] = reached[-1]
    rungs = [(op, *cells) for op, *cells in README if op in COMES_FIRST and set(cells) <= set(RUNGS)]
    assert sorted(rungs) == sorted((op, highest[op, "sm_90"], highest[op, "sm_100"]) for op in COMES_FIRST)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{op_of(row)}-{row[1]}")
def test_a_row_claims_no_more_than_is_there(row):
    op, chip, reference, interpreter, lowered, compiled, run, measured = op_of(row), *row[1:]
    folder = Path(pallas_kernels.__file__).parent / op
    assert reference == "yes"
    if not (folder / f"mosaic_{chip.replace('_', '')}.py").exists():
        assert [interpreter, lowered, compiled, run, measured] == ["no kernel"] * 2 + ["no"] * 3
        return
    assert "no" not in (interpreter, lowered) and "no kernel" not in (interpreter, lowered)
    names = {line["shape"].split(",")[0] for line in COMPILED["rows"] if (line["op"], line["chip"]) == (op, chip)}
    specs = {spec.name for spec in importlib.import_module(f"pallas_kernels.{op}.arg_specs").SPECS}
    if compiled == "yes":
        assert names == specs
    else:
        assert names < specs and (compiled == "no") == (not names)
    if run == "no":
        assert measured == "no" and CHIPS[chip] not in COMES_FIRST[op]


def test_what_compiled_is_what_is_here():
    """A kernel that changed since is not known to compile: `python tools/compile_kernels.py --freeze`, or say "no"."""
    folder = ROOT / "pallas_kernels"
    ops = {line["op"] for line in COMPILED["rows"]}
    there = {path for op in ops for pattern in ("mosaic_*.py", "config*.py") for path in (folder / op).glob(pattern)}
    shared = {folder / name for name in ("_chip.py", "_mosaic.py", "_chain.py", "_persistent.py")}
    assert {ROOT / name for name in COMPILED["sources"]} == there | shared
    for name, digest in COMPILED["sources"].items():
        assert hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:16] == digest, name
    assert all(len(line["registers"]) == len(line["spilled"]) > 0 for line in COMPILED["rows"])
    assert not any(sum(line["spilled"]) for line in COMPILED["rows"])


def test_a_kernel_that_comes_first_has_run():
    for op, capabilities in COMES_FIRST.items():
        for capability in capabilities:
            assert any(op_of(row) == op and CHIPS[row[1]] == capability and row[6] != "no" for row in ROWS)


def test_nothing_is_claimed_to_have_run_on_a_blackwell():
    """Until somebody has: then this test goes, and the rows name the device."""
    assert {(row[6], row[7]) for row in ROWS if row[1] == "sm_100"} == {("no", "no")}
    for kernel in (ROOT / "pallas_kernels").glob("*/mosaic_sm100.py"):
        assert "Never run on a Blackwell." in kernel.read_text()
