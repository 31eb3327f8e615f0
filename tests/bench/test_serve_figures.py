"""What is made of calls: underruns, percentiles, rates, verdicts, tables. And what callers are told to do."""

import itertools
import json
import re
import statistics
from pathlib import Path

import pytest

from fishjax.bench import report
from fishjax.bench.header import make_header
from fishjax.bench.serve import loads, rows, soak_verdict, tables, verdict
from fishjax.bench.serve.arrivals import ON_SHARE, PERIOD_S, arrival_times
from fishjax.bench.serve.call import OK, Call, underrun_s
from fishjax.bench.serve.clip import unique_clip, write_clip
from fishjax.bench.serve.drive import Seen, read_calls
from fishjax.bench.serve.plan import CallersPlan, Requests, split
from fishjax.bench.serve.prompts import NUM_PROMPTS, prompt
from fishjax.bench.serve.run import Suite, server_options

ABOUT = {"server": 1, "loop": "closed", "concurrency": 4, "rate": None, "policy": "bf16", "voices": "cached"}


def call(called_s, arrivals=(), status=OK, **fields):
    arrivals = [(called_s + after_s, n) for after_s, n in arrivals]
    ended_s = fields.pop("ended_s", arrivals[-1][0] if arrivals else called_s + 0.01)
    given = {"lane": "real", "does": "listens", "frame_s": 0.05, "promised": bool(arrivals)} | fields
    return Call(called_s=called_s, arrivals=arrivals, status=status, ended_s=ended_s, **given)


@pytest.mark.parametrize(("fused", "flags"), [(None, []), ("slow", ["--fused", "slow"]), ("none", ["--fused", "none"])])
def test_a_server_is_started_as_the_command_says(fused, flags):
    loads_of_it = {"concurrency": (1,), "rates": (), "bursty": False, "seconds": 1.0, "voices": "cached", "seed": 0}
    suite = Suite(
        slots=(4,), max_frames=None, gpu_price=None, batch_lane=False, check=False, address=None,
        model=Path("some/model"), precision="slow=fp8", max_len=None, fused=fused, **loads_of_it,
    )  # fmt: skip
    started = server_options(suite, 4, "--max-queue", "0")
    wanted = ["--model", "some/model", "--precision", "slow=fp8", "--slots", "4", *flags, "--max-queue", "0"]
    assert started == wanted


def row(calls, looks=(), from_s=100.0, to_s=110.0, price=None, **about):
    return rows.make_row(Seen(list(calls), list(looks), from_s, to_s), ABOUT | about, num_slots=4, gpu_price=price)


@pytest.mark.parametrize(
    ("arrivals", "silent_s"),
    [
        ([], 0.0),
        ([(3.0, 1)], 0.0),
        ([(3.0, 2), (3.05, 1), (3.15, 1)], 0.0),
        ([(3.0, 1), (3.25, 1)], 0.15),
        ([(3.0, 1), (3.25, 1), (3.5, 1)], 0.30),
        ([(3.0, 1), (3.25, 4), (3.5, 1)], 0.15),
    ],
)
def test_a_listener_is_without_sound_from_dry_to_the_next_message(arrivals, silent_s):
    if silent_s:
        assert underrun_s(arrivals, 0.1) == pytest.approx(silent_s)
    else:
        assert underrun_s(arrivals, 0.1) == 0


def test_figures_are_those_of_the_measured_time():
    calls = [call(100 + i, [(0.010 * (i + 1), 2), (0.010 * (i + 1) + 0.02, 3)]) for i in range(10)]
    early, late = call(99.9, [(0.2, 5)]), call(110.0, [(0.001, 50)])
    made = row([early, late, *calls], looks=[(99, 4, 0), (101, 1, 0), (105, 3, 0), (110, 4, 0)], price=3.0)
    assert made["calls"] == made["heard"] == 10
    assert [made[f"ttfa_ms_p{share}"] for share in (50, 95, 99)] == pytest.approx([50, 100, 100])
    assert made["frames_per_s"] == pytest.approx(5.5)  # the early call's frames came in the measured time
    assert made["audio_s_per_s"] == pytest.approx(0.275)
    assert made["slot_utilisation"] == 0.5
    assert made["cost_per_hour_of_audio"] == pytest.approx(3.0 / 0.275, abs=1e-4)
    assert made["continuity"] == 1.0 and made["underrun_ms_p95"] == 0


def test_refused_failed_and_broken_calls_are_counted_apart():
    refused = [call(101, status="RESOURCE_EXHAUSTED", ended_s=101.005, retry_ms=ms) for ms in (20, None)]
    failed = call(102, [(0.1, 1)], status="INTERNAL")
    broken = call(103, [(0.1, 1), (0.4, 1)], problem="frame 3 came where 1 was due")
    made = row([*refused, failed, broken])
    assert (made["rejected"], made["failed"], made["broken"], made["heard"]) == (2, 1, 1, 1)
    assert made["rejected_ms_p95"] == pytest.approx(5) and made["rejected_with_hint"] == 0.5
    assert made["continuity"] == 0 and made["underrun_ms_p95"] == pytest.approx(250)
    assert len(verdict.unsound([made])) == 2


def test_latencies_are_the_lanes_own_and_rates_are_everybodys():
    made = row([call(101, [(0.1, 1)]), call(101, [(0.9, 9)], lane="batch")])
    assert made["calls"] == 1 and made["ttfa_ms_p99"] == pytest.approx(100) and made["frames_per_s"] == 1.0


def test_poisson_and_bursty_arrivals_have_their_rate_and_their_seed():
    for bursty in (False, True):
        times = arrival_times(20, 400, 7, bursty=bursty)
        assert times == arrival_times(20, 400, 7, bursty=bursty) != arrival_times(20, 400, 8, bursty=bursty)
        assert times == sorted(times) and times[-1] < 400
        assert len(times) == pytest.approx(8000, rel=0.05)
        in_bursts = sum(time_s % PERIOD_S < ON_SHARE * PERIOD_S for time_s in times) / len(times)
        assert in_bursts == 1 if bursty else in_bursts == pytest.approx(ON_SHARE, abs=0.03)
    gaps = [b - a for a, b in itertools.pairwise(arrival_times(20, 400, 7, bursty=False))]
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.1)  # of an exponential: its mean


def test_no_prompt_comes_twice_and_each_is_of_the_vocabulary():
    numbers = [*range(2000), *range(30_000, 32_000), NUM_PROMPTS - 1]
    texts = [prompt(1, number) for number in numbers]
    assert len(set(texts)) == len(texts)
    assert prompt(1, 5) == prompt(1, 5)


def test_a_clip_changes_with_each_request_and_only_in_its_lowest_bits(tmp_path):
    import numpy as np

    samples_T = np.random.default_rng(0).integers(-9000, 9000, 22050, np.int16)
    write_clip(tmp_path / "clip.wav", samples_T, 22050)
    clips = [unique_clip(str(tmp_path / "clip.wav"), number) for number in (0, 1, 2, 70_000)]
    assert len(set(clips)) == 4
    for clip in clips:
        assert np.max(np.abs(np.frombuffer(clip[44:], "<i2").astype(int) - samples_T)) <= 1


def test_a_plan_is_dealt_out_and_no_request_is_made_twice():
    plan = CallersPlan("a:1", "real", 1.0, 9.0, Requests(3), callers=5, arrivals=[0.1, 0.2, 0.3], first=1000)
    parts = [CallersPlan.from_json(part.to_json()) for part in split(plan, 3)]
    assert [part.callers for part in parts] == [2, 2, 1]
    assert sorted(time_s for part in parts for time_s in part.arrivals) == [0.1, 0.2, 0.3]
    numbers = [part.first + i * part.stride for part in parts for i in range(50)]
    assert len(set(numbers)) == len(numbers) and min(numbers) == 1000
    assert [part.requests for part in parts] == [Requests(3)] * 3
    assert len(split(CallersPlan("a:1", "real", 1.0, 9.0, Requests(3), callers=1), 3)) == 1


def test_the_last_line_of_a_killed_process_may_be_half():
    whole = json.dumps({"lane": "killed", "does": "listens", "called_s": 1.0}).encode() + b"\n"
    assert len(read_calls(whole + whole + whole[:20])) == 2


def thresholds(**line):
    given = {"line": "a promise", "on": ["gpu"], "rows": {"loop": "closed", "concurrency": [4]}} | line
    return verdict.Thresholds({}, {}, {}, 60, verdict.Thresholds.read().frozen, {}, [given])


@pytest.mark.parametrize(
    ("line", "holds"),
    [
        ({"figure": "ttfa_ms_p95", "at_most": 100}, True),
        ({"figure": "ttfa_ms_p95", "below": 100}, False),
        ({"figure": "continuity", "at_least": 0.99}, True),
        ({"figure": "continuity", "at_least": 1.01}, False),
        ({"figure": "rejected_ms_p95", "at_most": 20}, False),
        ({"figure": "ttfa_ms_p95", "at_most": 2, "times": {"loop": "base"}}, True),
        ({"figure": "ttfa_ms_p95", "at_most": 1.9, "times": {"loop": "base"}}, False),
        ({"figure": "ttfa_ms_p95", "at_most": 9, "times": {"loop": "nobody"}}, False),
        ({"figure": "ttfa_ms_p95", "at_most": 100, "rows": {"loop": "crowd"}}, False),
    ],
)
def test_a_promise_holds_or_not_and_one_that_was_not_measured_does_not(line, holds):
    measured = [row([call(101, [(0.1, 1)])]), row([call(101, [(0.05, 1)])], loop="base")]
    (judged,) = verdict.verdicts(measured, thresholds(**line), "gpu")
    assert judged[1] is holds, judged[0]
    slow = row([call(101, [(0.01, 1)])], loop="base", server=2)  # of another server, so no measure
    assert [told for _, told in verdict.verdicts([slow, *measured], thresholds(**line), "gpu")] == [holds]
    assert not list(verdict.verdicts(measured, thresholds(**line), "cpu"))


def test_every_line_of_the_file_names_figures_and_loads_that_there_are():
    made = row([call(101, [(0.1, 1)])])
    loops = {"closed", "first", "next", "crowd", "after crowd", "no queue", "overload"}
    loops |= {"lane, real alone", "lane, filled"}
    for line in verdict.Thresholds.read().lines:
        assert line["figure"] in made
        assert {line["rows"]["loop"], line.get("times", {"loop": "first"})["loop"]} <= loops
        assert set(line["on"]) <= {"cpu", "gpu"} and len({"at_most", "at_least", "below"} & set(line)) == 1


def test_a_run_is_compared_with_its_frozen_self():
    limits = verdict.Thresholds.read()
    frozen = row([call(101, [(0.1, 100)])], concurrency=16)
    same, slow = dict(frozen), frozen | {"frames_per_s": frozen["frames_per_s"] / 1.06}
    late, other = frozen | {"ttfa_ms_p50": 106.0}, frozen | {"ttfa_ms_p50": 500.0, "policy": "fp8"}
    assert verdict.slower([same, other], [frozen], limits, "gpu") == []
    for worse in (slow, late):
        assert len(verdict.slower([worse], [frozen], limits, "gpu")) == 1
        assert verdict.slower([worse], [frozen], limits, "cpu") == []


def test_tables_say_what_was_measured_and_what_many_callers_gain():
    one = row([call(101, [(0.1, 10)])], concurrency=1)
    many = row([call(101, [(0.1, 10)]) for _ in range(5)], concurrency=64)
    document = {"rows": [one, many], "starts": [{"slots": 64, "start_s": 9.5}]}
    told = tables.serve_tables(document)
    assert "1 -> 64 callers: 5.0 times" in told and "closed, 64 callers" in told and "ready 9.5 s" in told
    widths = {line.count("|") for line in told.splitlines() if line.startswith("|")}
    assert len(widths) == 1
    alone, filled = row([], loop="lane, real alone", rate=2.0), row([], loop="lane, filled", rate=2.0)
    document["rows"] += [alone | {"slot_utilisation": 0.5}, filled | {"slot_utilisation": 0.9}]
    assert re.search(r"50\.0% -> 90\.0%", tables.lane(document))


@pytest.mark.parametrize(
    ("policy", "short"),
    [
        ("slow=fp32,fast=fp32", "fp32"),
        ("slow=fp8,fast=bf16", "slow=fp8,fast=bf16"),
        ("kv=fp8", "kv=fp8"),
        ("bf16", "bf16"),
    ],
)
def test_a_precision_of_all_modules_is_one_word(policy, short):
    assert tables.short_policy(policy) == short


def test_the_page_quotes_frozen_files_and_nothing_else(tmp_path):
    assert "No figures are frozen yet" in report.serve_markdown(tmp_path)
    (tmp_path / "gpu").mkdir()
    header = make_header("serve", "gpu", {"jax": "0"}, None, [], "a method")
    made = row([call(101, [(0.1, 10)])], concurrency=64)
    document = {"header": header, "load": {"model": "big"}, "starts": [], "rows": [made]}
    (tmp_path / "gpu" / "serve.json").write_text(json.dumps(document))
    told = report.serve_markdown(tmp_path)
    assert "## Server on gpu: big" in told and "a method" in told and "closed, 64 callers" in told


def test_fill_requests_leave_the_real_trace_as_it_was():
    real = loads.opened(Requests(3, priority="REALTIME"), 2.0, 30.0, 0, 4, bursty=True, loop="lane, real alone")
    both = loads.lane(real, Requests(3, priority="BATCH"), 4, 30_000)
    assert both.load.plans[0] == real.load.plans[0]
    assert both.load.plans[1].lane == "batch" and both.load.plans[1].callers == 2 * 4


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (call(1, [(0.1, 1)], status="INTERNAL"), "promised, and then INTERNAL"),
        (call(1, [(0.1, 1)], status="RESOURCE_EXHAUSTED", retry_ms=5), "promised, and then RESOURCE_EXHAUSTED"),
        (call(1, status="RESOURCE_EXHAUSTED"), "no hint"),
        (call(1, status="INTERNAL", does="sends no sound as a clip"), "sends no sound as a clip: INTERNAL"),
        (call(1, [(0.1, 1)], problem="3 frames came, and no summary"), "no summary"),
        (call(1, [(0.1, 1)], status="UNAVAILABLE", does="reads slowly"), "UNAVAILABLE"),
    ],
)
def test_a_soak_finds_what_must_not_be(bad, says):
    good = [
        call(1, [(0.1, 1)]),
        call(1, status="RESOURCE_EXHAUSTED", retry_ms=5),
        call(1, status="CANCELLED", does="leaves before sound"),
        call(1, [(0.1, 1)], status="ABORTED", does="reads slowly"),
        call(1, status="NOT_FOUND", does="names no voice"),
    ]
    assert soak_verdict.judge_calls(good) == []
    (found,) = soak_verdict.judge_calls([*good, bad, bad])
    assert says in found and "(2 calls)" in found


def test_a_soak_finds_a_fault_that_nobody_was_told_of():
    told = [call(1, [(0.1, 1)], status="INTERNAL", ended_s=5.0), call(2, status="UNAVAILABLE", ended_s=5.0)]
    assert soak_verdict.judge_fault([call(1, [(0.1, 1)]), *told], 4.0) == []
    assert soak_verdict.judge_fault(told[1:], 4.0)
    assert soak_verdict.judge_fault([*told, call(1, [(0.1, 1)], status="CANCELLED", ended_s=5.0)], 4.0)
    assert soak_verdict.judge_fault([*told, call(1, [(0.1, 1)], status="INTERNAL", ended_s=3.0)], 4.0)


def test_a_soak_finds_memory_that_grows_after_it_settled():
    limits = {"settle_seconds": 10, "rss_growth_mb": 64}
    flat = [(s, 1000.0 + (0 if s < 5 else 200) + s % 2) for s in range(60)]
    assert soak_verdict.judge_memory(flat, limits) == []
    assert soak_verdict.judge_memory([(s, 1000.0 + 3 * s) for s in range(60)], limits)
    assert soak_verdict.judge_memory(flat[:8], limits)


def soaked(**fields):
    outcomes = {"listens": {"OK": 90, "RESOURCE_EXHAUSTED": 4}, "names no voice": {"NOT_FOUND": 6}}
    found = {"slots": 4, "seconds": 1800.0, "calls": 100, "outcomes": outcomes, "killed_processes": 7}
    found |= {"rss_mb": [700, 712, 709], "after_fault": {"INTERNAL": 4, "UNAVAILABLE": 2}, "problems": []}
    return {"header": make_header("soak", "gpu", {}, None, ["a note"], "a method"), "soak": found | fields}


def test_a_soak_is_told_whole(tmp_path):
    assert "No figures are frozen yet" in report.soak_markdown(tmp_path)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "soak.json").write_text(json.dumps(soaked()))
    told = report.soak_markdown(tmp_path)
    assert "| listens | 94 | OK 90, RESOURCE_EXHAUSTED 4 |" in told and "700 to 712 MB, at the end 709 MB" in told
    assert "a method a note." in told and "INTERNAL 4, UNAVAILABLE 2" in told and "Nothing that was promised" in told
    told = tables.soak_table(soaked(problems=["a slot was stuck"]))
    assert "- **a slot was stuck**" in told and "Nothing that was promised" not in told


def test_closed_loops_are_drawn(tmp_path):
    made = [row([call(101, [(0.1 * n, 10)])], concurrency=n) for n in (1, 4)] + [row([], loop="crowd")]
    (tmp_path / "gpu").mkdir()
    document = {"header": make_header("serve", "gpu", {}, None, [], ""), "load": {"model": "big"}, "rows": made}
    (tmp_path / "gpu" / "serve.json").write_text(json.dumps(document))
    (drawn,) = report.write_plots(tmp_path, tmp_path)
    assert drawn.name == "gpu-serve.png" and drawn.stat().st_size > 5000
