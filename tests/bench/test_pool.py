"""Workers: a hang or a crash costs one measurement, the lock excludes, and a real worker measures a real case."""

import fcntl
import os
import sys
import textwrap
import threading
import time

import pytest

from fishjax.bench import cases, kernels, worker
from fishjax.bench.pool import LIMITS_S, Pool, Task
from fishjax.bench.worker import GpuLock

STUBBORN = """
    import json, os, sys, time
    print(json.dumps({"hello": {"versions": {"stub": "1"}}}), flush=True)
    for line in sys.stdin:
        m = json.loads(line)["case"]["m"]
        print(json.dumps({"stage": "wait"}), flush=True)
        print(json.dumps({"stage": "run"}), flush=True)
        if m == 2:
            open(sys.argv[1], "w").write(str(os.getpid()))
            time.sleep(600)
        if m == 3:
            sys.exit(7)
        print(json.dumps({"result": {"host_us": m}}), flush=True)
"""


def case(m):
    return cases.Case("block_scaled_matmul", "tiny", {"N": 256, "K": 256}, m, "quantized")


def run_pool(pool, batches, deadline=float("inf")):
    results = []
    for thread in pool.run(batches, 1, deadline, lambda task, result: results.append((task.case.m, result))):
        thread.join()
    return results


@pytest.fixture
def stubborn(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(STUBBORN))
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, str(script), str(tmp_path / "pid")]
        yield Pool("jax", tmp_path / "lock", log, command, LIMITS_S | {"run": 3.0})


def test_a_hang_and_a_crash_cost_one_case_each(stubborn, tmp_path):
    started = time.monotonic()
    results = run_pool(stubborn, [[Task(case(m), "kernel", "jax") for m in (1, 2, 3, 4)]])
    assert time.monotonic() - started < 30
    assert [m for m, _ in results] == [1, 2, 3, 4]
    assert results[0][1]["host_us"] == 1 and results[3][1]["host_us"] == 4
    assert set(results[0][1]["stage_s"]) == {"compile", "wait", "run"}
    assert results[1][1]["failed"] and "timed out after 3 s in stage 'run'" in results[1][1]["reason"]
    assert results[2][1]["failed"] and "exit code 7" in results[2][1]["reason"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert stubborn.versions == {"stub": "1"}


def test_a_spent_budget_starts_nothing(stubborn):
    results = run_pool(stubborn, [[Task(case(1), "kernel", "jax")]], deadline=time.monotonic() - 1)
    assert "budget" in results[0][1]["reason"] and results[0][1]["failed"]


def test_the_lock_excludes_and_tells_its_stages(tmp_path):
    told = []
    with GpuLock(tmp_path / "lock", told.append), (tmp_path / "lock").open("w") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert told == ["wait", "run"]
    assert told[-1] == "compile"
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_who_shares_the_lock_meets_others_who_do_and_nobody_who_measures(tmp_path):
    told = []
    first, second = (GpuLock(tmp_path / "lock", told.append) for _ in range(2))
    with first.shared(), second.shared(), (tmp_path / "lock").open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert told == ["wait", "compile", "wait", "compile"]
    with first, (tmp_path / "lock").open("w") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


def test_who_waits_to_measure_lets_nobody_past(tmp_path):
    events = []

    def measure():
        with GpuLock(tmp_path / "lock", lambda _: None):
            events.append("measured")

    def compile_after():
        with GpuLock(tmp_path / "lock", lambda _: None).shared():
            events.append("compiled")

    with GpuLock(tmp_path / "lock", lambda _: None).shared():
        threads = [threading.Thread(target=target, daemon=True) for target in (measure, compile_after)]
        for thread in threads:
            thread.start()
            time.sleep(0.3)  # the first one waits for the lock when the second one comes
        assert events == []
    for thread in threads:
        thread.join()
    assert events == ["measured", "compiled"]


def test_a_fresh_pool_gives_every_batch_a_process_of_its_own(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(STUBBORN).replace('{"host_us": m}', '{"pid": os.getpid()}'))
    with (tmp_path / "log").open("wb") as log:
        pool = Pool("jax", tmp_path / "lock", log, [sys.executable, str(script), "-"], fresh=True)
        batches = [[Task(case(m), "kernel", "jax") for m in pair] for pair in ((1, 4), (5, 6))]
        a, b, c, d = (result["pid"] for _, result in run_pool(pool, batches))
    assert a == b != c == d


def test_a_real_worker_measures_and_journals(tmp_path):
    run = kernels.start(tmp_path / "out.json", 1, 200.0)
    chosen = [case(8)]
    tasks = kernels.make_tasks(chosen, {"backend": "reference", "config": None}, peers=False)
    refused = [[Task(case(16), "kernel", "jax", {"backend": "mosaic", "config": None})]]
    results = kernels.measure(run, tasks + refused)
    document = kernels.make_document(kernels.header_of(run), chosen, results, "reference")
    (row,) = document["rows"]
    assert row["correct"] and row["host_us"] > 0 and row["rel_err"] < row["tolerance"]
    assert row["kernel_us"] is None and "CUPTI" in document["header"]["notes"][0]
    assert "9.0" in results[1][1]["reason"] and "failed" not in results[1][1]
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_who_measures_shares_no_core_with_who_compiles(monkeypatch, tmp_path):
    moved = []
    monkeypatch.setattr(worker, "_ALL_CORES", set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: moved.append((thread, tuple(cores))))
    with worker.GpuLock(tmp_path / "lock", lambda stage: None):
        threads = {int(thread) for thread in os.listdir("/proc/self/task")}
        assert {thread for thread, _ in moved} >= threads and {cores for _, cores in moved} == {(14, 15)}
        moved.clear()
    assert {cores for _, cores in moved} == {tuple(range(14))}
