"""docs/portability.md claims no more than the tree holds."""

import re
from pathlib import Path

import pytest

import pallas_kernels
from pallas_kernels._dispatch import DEFAULT_ORDER, Backend

PAGE = (Path(__file__).parents[2] / "docs" / "portability.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if re.match(r"\| `\w+`", line)
]
CHIPS = ("sm_90", "sm_100")


def op_of(row):
    return re.match(r"`(\w+)`", row[0]).group(1)


def test_every_op_has_a_row_for_every_chip():
    assert sorted((op_of(row), row[1]) for row in ROWS) == sorted((op, chip) for op in DEFAULT_ORDER for chip in CHIPS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{op_of(row)}-{row[1]}")
def test_a_row_claims_no_kernel_that_is_not_there(row):
    op, chip, reference, interpreter, lowered, compiled, run, measured = op_of(row), *row[1:]
    kernel = Path(pallas_kernels.__file__).parent / op / f"mosaic_{chip.replace('_', '')}.py"
    assert reference == "yes"
    if not kernel.exists():
        assert [interpreter, lowered, compiled, run, measured] == ["no kernel"] * 2 + ["no"] * 3
        return
    assert "no" not in (interpreter, lowered) and "no kernel" not in (interpreter, lowered)
    assert (compiled == "no") == (run == "no")
    if run == "no":
        assert measured == "no" and Backend.MOSAIC not in DEFAULT_ORDER[op]


def test_a_kernel_that_comes_first_has_run():
    for op, order in DEFAULT_ORDER.items():
        if order[0] is Backend.MOSAIC:
            assert any(op_of(row) == op and row[6].startswith("H200") for row in ROWS)
