"""A run that ended early goes on where it stopped, with results of the same commit and machine alone."""

import json
import math
import sys
import textwrap

import pytest

from fishjax.bench import cases
from fishjax.bench.pool import Task
from fishjax.bench.run import Run
from fishjax.errors import InvalidRequest

WORKER = """
    import json, sys
    hello = {"platform": "cpu", "device": sys.argv[2], "versions": {"stub": "1"}}
    print(json.dumps({"hello": hello}), flush=True)
    for line in sys.stdin:
        m = json.loads(line)["case"]["m"]
        with open(sys.argv[1], "a") as asked:
            asked.write(f"{m} ")
        print(json.dumps({"result": {"reason": "broke", "failed": True} if m == 2 else {"host_us": m}}), flush=True)
"""


def tasks(*rows):
    return [[Task(cases.Case("mx_matmul", "tiny", {"N": 256, "K": 256}, m), "kernel", "jax")] for m in rows]


@pytest.fixture
def start(tmp_path):
    (tmp_path / "worker.py").write_text(textwrap.dedent(WORKER))

    def start(resume, device="one"):
        command = [sys.executable, str(tmp_path / "worker.py"), str(tmp_path / "asked"), device]
        out = tmp_path / "k.json"
        return Run("kernels", {"jax": 1}, out, math.inf, lambda *_: "done", resume, command=command)

    return start


def test_what_was_measured_is_not_measured_again(start, tmp_path):
    start(False).measure(tasks(1, 2, 3))
    results = start(True).measure(tasks(1, 2, 3, 4))
    assert (tmp_path / "asked").read_text() == "1 2 3 2 4 "  # what failed is tried again
    assert sorted((task.case.m, result.get("host_us")) for task, result in results) == [
        (1, 1), (2, None), (3, 3), (4, 4)
    ]  # fmt: skip
    start(True).measure(tasks(1, 4))
    assert (tmp_path / "asked").read_text() == "1 2 3 2 4 "
    head, *lines = map(json.loads, (tmp_path / "k.jsonl").read_text().splitlines())
    assert head["run"]["device"] == "one" and sorted(line["result"]["host_us"] for line in lines) == [1, 3, 4]


def test_results_of_another_machine_are_refused_and_a_run_without_resume_begins_anew(start, tmp_path):
    start(False).measure(tasks(1))
    with pytest.raises(InvalidRequest, match="another run"):
        start(True, device="two")
    assert len((tmp_path / "k.jsonl").read_text().splitlines()) == 2
    start(False, device="two").measure(tasks(1))
    assert (tmp_path / "asked").read_text() == "1 1 "
    with pytest.raises(InvalidRequest, match="no --out"):
        Run("kernels", {"jax": 1}, None, math.inf, lambda *_: "", True)
