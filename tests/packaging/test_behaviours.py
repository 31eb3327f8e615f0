"""Every row of docs/behaviours.md names tests, and they exist."""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "behaviours.md"
ROW = re.compile(r"^\| (?P<what>[^|]+) \| (?P<held>[^|]+) \|$", re.MULTILINE)
ROWS = [row for row in ROW.finditer(PAGE.read_text()) if row["what"] not in ("What it does", "---")]


def names_in(path: Path) -> set[str]:
    """Names of the tests in a file: functions, and classes that are assigned by name (hypothesis' state machines)."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in names if name.lower().startswith("test")}


def test_the_page_has_rows_for_all_its_kinds():
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert headings == ["Sound", "Text", "Voices", "Seeds", "Load", "Start-up, faults, end", "Numbers"]
    assert len(ROWS) >= 45


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["what"][:40])
def test_its_tests_exist(row):
    ids = re.findall(r"`(tests/[^:`]+)::(\w+)`", row["held"])
    assert ids
    assert row["held"].count("::") == len(ids), "an id that cannot be read"
    for file, name in ids:
        assert name in names_in(ROOT / file), f"{file}::{name}"


def test_every_limit_is_of_a_row_and_every_row_that_needs_a_device_has_one():
    lines = json.loads((ROOT / "fishjax/bench/serve/thresholds.json").read_text())["lines"]
    held = {row["what"]: row["held"] for row in ROWS}
    limited = {line["row"] for line in lines}
    assert limited <= set(held)
    assert {what for what in held if "*device*" in held[what] and "*, `bench " not in held[what]} <= limited
    assert all("*device*" in held[what] or "`bench serve --check`" in held[what] for what in limited)
