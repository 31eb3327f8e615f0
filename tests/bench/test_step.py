"""The suite `step`: its cases, its weights, its peer, its parts, its rows and what may be frozen."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from typer.testing import CliRunner

from fishjax.bench import __main__ as command_line
from fishjax.bench import frozen, header, report
from fishjax.bench.pool import Task
from fishjax.bench.step import cases, check, floor, parts, run, tables, weights
from fishjax.bench.step.cases import StepCase
from fishjax.bench.step.rig import EngineRun, GroupRun, PeerRun, Rig, chunk_ms, steady_ms
from fishjax.engine.memory import num_bytes
from fishjax.errors import InvalidRequest
from pallas_kernels import BlockScaled, MxScaled, ScaledKV

runner = CliRunner()
FP32 = "slow=fp32,fast=fp32,head=fp32,kv=fp32,codec=fp32"
FP8 = cases.POLICIES[0]


def test_the_grid_holds_every_combination_once():
    grid = cases.grid()
    assert len({case.key for case in grid}) == len(grid) == 20
    assert {case.slots for case in grid} == {1, 4, 16, 64}
    assert {(case.precision.slow, case.precision.fast, case.precision.kv) for case in grid} == {
        ("bf16", "bf16", "bf16"), ("fp8", "fp8", "bf16"), ("fp8", "fp8", "fp8")
    }  # fmt: skip
    assert {case.fused for case in grid if case.precision.kv == "fp8"} == {"none", "slow", "both"}
    assert {case.fused for case in grid if case.precision.fast == "bf16"} == {"none"}
    assert all(case.precision.codec == "bf16" for case in grid)


@pytest.mark.parametrize("slots", cases.SLOTS)
def test_lengths_are_spread_evenly_and_stay_in_their_slots(slots):
    case = StepCase("s2_pro", slots, "bf16")
    assert case.lengths_B.mean() == pytest.approx(544, abs=1) and (case.lengths_B == case.lengths_B).all()
    assert case.start_B.min() >= 1 and (case.start_B + cases.CYCLE).max() <= case.max_len
    middle = case.start_B + cases.CYCLE // 2
    assert (np.abs(middle - case.lengths_B) <= cases.CYCLE // 2).all() and abs(middle.mean() - 544) < 2
    if slots == 64:
        assert case.lengths_B.min() < 80 and case.lengths_B.max() > 1000 and len(set(case.lengths_B)) == 64


def test_filters_and_refusals():
    chosen = cases.select(cases.grid(), [3], ["kv=fp8"])
    assert [(case.slots, case.precision.kv, case.precision.slow) for case in chosen] == [(3, "fp8", "bf16")]
    for options, says in ((["--slots", "0"], "at least 1"), (["--policy", "slow=fp5"], "does not exist")):
        assert says in str(runner.invoke(command_line.app, ["step", *options]).exception)
    refused = runner.invoke(command_line.app, ["step", "--freeze", "--slots", "1"]).exception
    assert isinstance(refused, InvalidRequest) and "whole grid" in str(refused)


@pytest.mark.parametrize("on_device", [1, 1 << 30])
def test_random_arrays_have_shapes_formats_and_sizes_of_what_is_described(monkeypatch, on_device):
    monkeypatch.setattr(weights, "ON_DEVICE", on_device)
    e4m3 = jnp.float8_e4m3fn
    described = {
        "matrix": jax.ShapeDtypeStruct((300, 256), jnp.bfloat16),
        "fp8": BlockScaled(jax.ShapeDtypeStruct((320, 256), e4m3), jax.ShapeDtypeStruct((3, 32), jnp.float32), 300),
        "mx": MxScaled(
            jax.ShapeDtypeStruct((384, 256), e4m3), jax.ShapeDtypeStruct((9, 384), jnp.uint8), 300, "registers"
        ),
        "conv": jax.ShapeDtypeStruct((7, 64, 32), jnp.float32),
        "kv": ScaledKV(
            jax.ShapeDtypeStruct((2, 2, 64, 64), e4m3), jax.ShapeDtypeStruct((2, 2, 64), jnp.float32)
        ),
        "norm": jax.ShapeDtypeStruct((256,), jnp.bfloat16),
        "ids": jax.ShapeDtypeStruct((5,), jnp.int32),
    }  # fmt: skip
    made = weights.random_like(described, seed=1)
    shapes = [[(a.shape, a.dtype) for a in jax.tree.leaves(tree)] for tree in (described, made)]
    assert shapes[0] == shapes[1] and made["fp8"].shape == made["mx"].dequantize().shape == (300, 256)
    size = {"matrix": 256**-0.5, "fp8": 256**-0.5, "mx": 256**-0.5, "conv": (7 * 64) ** -0.5, "kv": 1.0}
    for name, wanted in size.items():
        array = made[name].dequantize() if hasattr(made[name], "dequantize") else made[name]
        assert np.std(np.asarray(array, np.float32)) == pytest.approx(wanted, rel=0.5 if name == "mx" else 0.1), name
    assert np.asarray(made["norm"], np.float32).mean() == pytest.approx(1, abs=0.05)
    again = weights.random_like([described["matrix"]] * 2, seed=1)
    assert not np.array_equal(*again) and len({a.unsafe_buffer_pointer() for a in again}) == 2


def test_the_floor_counts_the_fast_transformer_once_a_pass():
    rig = Rig(StepCase("s2_pro", 1, FP8))
    slow = 36 * (6144 * 2560 + 2560 * 4096 + 3 * 2560 * 9728)
    fast = 4 * (6144 * 2560 + 2560 * 4096 + 3 * 2560 * 9728) + 4096 * 2560
    live = 544 * 36 * 2 * 8 * (128 + 4)
    by_hand = slow + 4224 * 2560 + 9 * fast + live
    sound = floor.floor_bytes(rig) - by_hand
    codec = num_bytes(nnx.state(rig.codec))
    assert 0.2 * codec < sound < codec
    assert 1.6 < floor.floor_ms(rig) < 2.0


@pytest.fixture(scope="module")
def plain():
    rig = Rig(StepCase("tiny", 3, FP32))
    return rig, rig.fill()


def test_the_peer_makes_the_engine_s_greedy_frames(plain):
    rig, filled = plain
    (decode, _), (sound, _), (peer, _) = rig.decode(), rig.sound(), rig.peer()
    engine, other = EngineRun(rig, filled.decode(decode), filled.sound(sound)), PeerRun(rig, filled.peer(peer))
    engine._state = greedy(engine._state)
    for run_ in (engine, other):
        run_.set_back()
    for _ in range(3):
        ours, theirs = engine.step().result(), other.step().result()
        np.testing.assert_array_equal(ours.codes_BK, theirs.codes_BK)
        np.testing.assert_allclose(ours.audio_Bs, theirs.audio_Bs, atol=2e-4)
        # Repetition would make the engine draw again: a window that never matches keeps it greedy.
        engine._state = greedy(engine._state)


def greedy(state):
    slots = dataclasses.replace(
        state.slots, top_k_B=jnp.ones_like(state.slots.top_k_B), window_BW=jnp.full_like(state.slots.window_BW, -1)
    )
    return dataclasses.replace(state, slots=slots)


def test_steps_are_timed_one_late_lengths_are_set_back_and_the_warm_up_is_left_out():
    events = []

    class Fake:
        def set_back(self):
            events.append("back")

        def step(self):
            number = events.count("step")
            events.append("step")
            return type("P", (), {"result": lambda _: events.append(("read", number))})()

    ms = steady_ms(Fake(), 40, lambda: events.append("warm"))
    assert len(ms) == 40 and (ms >= 0).all()
    order = [event for event in events if event == "step" or event[0] == "read"]
    assert order[:5] == ["step", "step", ("read", 0), "step", ("read", 1)] and order[-1] == ("read", 72)
    assert events.count("back") == 3 and events[: events.index("warm")].count("step") == cases.CYCLE


def test_each_variant_lacks_one_part_more():
    lowered = parts.lower(Rig(StepCase("tiny", 2, "bf16")))
    texts = [low.as_text() for _, _, low in lowered]
    assert [part for part, *_ in lowered] == list(parts.PARTS)
    assert not any("chlo.top_k" in text for text in texts)
    scatters = [text.count("stablehlo.scatter") for text in texts]
    assert scatters[0] == scatters[1] > 0 == scatters[2] == scatters[3]
    matmuls = [text.count("call @matmul") + text.count("dot_general") for text in texts]
    assert matmuls[0] > matmuls[1] > matmuls[2] > matmuls[3] == 0
    # Outside `without` the functions are the engine's own again.
    bound, arguments = Rig(StepCase("tiny", 2, "bf16")).decode()
    assert "chlo.top_k" in bound.func.lower(*bound.args, *arguments).as_text()


def test_the_profiler_takes_a_step_as_it_is():
    assert isinstance(parts._OneStep(None), jax.stages.Wrapped)  # pyright: ignore


def measured(task):
    if task.part == "peer":
        return {"ms_p50": 6.0, "ms_p99": 6.5, "ms_mean": 6.0, "steps": 256}
    slots = task.case.slots
    times = {"ms_p50": 2.5, "ms_p99": 3.0, "ms_mean": 2.56, "steps": 256, "decode_ms": 2.0, "codec_ms": 0.4}
    times |= {"grouped_ms_mean": 2.2, "codec_group_ms": 0.8, "prefill_ms": 3.5}
    memory = {"device_bytes": 1050, "peak_bytes": 1200, "predicted_bytes": 1000}
    return {**times, **memory, "compiles": 0, "floor_ms": 1.0 + slots / 64, "setup_s": {}}


@pytest.fixture
def results():
    return [(task, measured(task)) for batch in run.make_tasks(cases.grid(), trace=False) for task in batch]


def document(results, tmp_path):
    head = {**header.make_header("step", "nvidia-h200", {"jax": "0"}, {}, [], run.METHOD), "floor": "x"}
    return run.make_document(head, cases.grid(), results, tmp_path)


def change(results, part, **fields):
    i = next(i for i, (task, _) in enumerate(results) if task.part == part)
    return [*results[:i], (results[i][0], results[i][1] | fields), *results[i + 1 :]]


def test_a_whole_run_passes_and_survives_json(results, tmp_path):
    whole = json.loads(json.dumps(document(results, tmp_path)))
    assert check.problems(whole, cases.grid()) == [] and len(whole["rows"]) == 20
    row = whole["rows"][0]
    assert (row["slots"], row["peer_xla_bf16_ms"]) == (64, 6.0)
    assert row["frames_per_s"] == pytest.approx(64e3 / 2.56)
    assert row["audio_s_per_s"] == pytest.approx(64e3 / 2.56 * 2048 / 44100)
    assert row["gate"] is None and "no frozen gate" in row["gate_reason"]
    assert row["kv"] == "fp8" and row["lengths"]["mean"] == pytest.approx(544, abs=1)
    text = tables.step_table(whole)
    assert "25,000" in text and "| 2.40 |" in text and text.count("\n") == 21


def test_a_frozen_gate_of_the_device_speaks_in_the_rows(results, tmp_path):
    (tmp_path / "nvidia-h200").mkdir()
    verdict = {"policy": "bf16", "precision": str(StepCase("s2_pro", 1, "bf16").precision), "verdict": "baseline"}
    (tmp_path / "nvidia-h200" / "gate.json").write_text(json.dumps({"rows": [verdict]}))
    rows = document(results, tmp_path)["rows"]
    assert {row["gate"] for row in rows if row["policy"] == "bf16"} == {"baseline"}
    assert {row["gate"] for row in rows if row["policy"] != "bf16"} == {None}


@pytest.mark.parametrize(
    ("part", "fields", "says"),
    [
        ("engine", {"compiles": 2}, "compiled 2 programs"),
        ("engine", {"steps": 100}, "fewer than 200"),
        ("engine", {"ms_p50": 0.5}, "less than memory allows"),
        ("engine", {"device_bytes": 1200}, "the engine plans 1,000"),
        ("engine", {"ms_p50": None, "ms_mean": None, "reason": "timed out", "failed": True}, "timed out"),
        ("engine", {"ms_p50": None, "ms_mean": None}, "neither a time nor a reason"),
    ],
)
def test_the_check_finds_a_bad_row(results, tmp_path, part, fields, says):
    (problem,) = check.problems(document(change(results, part, **fields), tmp_path), cases.grid())
    assert says in problem


def test_the_check_finds_holes(results, tmp_path):
    (problem,) = check.problems(document(results[1:], tmp_path), cases.grid())
    assert "not measured" in problem
    lacking = document(results, tmp_path)
    del lacking["rows"][0]
    assert check.problems(lacking, cases.grid()) == [f"{cases.grid()[0].key}: no row"]
    no_peer = document([(t, r) for t, r in results if t.part != "peer"], tmp_path)
    assert check.problems(no_peer, cases.grid()) == [] and "not measured" in no_peer["rows"][0]["peer_reason"]


def test_only_a_whole_sound_file_is_frozen(results, tmp_path, monkeypatch):
    monkeypatch.setattr(frozen, "BASELINES", tmp_path / "baselines")
    kept, path = tmp_path / "baselines" / "nvidia-h200" / "step.json", tmp_path / "s.json"
    for found, code in ((change(results, "engine", compiles=1), 1), (results, 0)):
        path.write_text(json.dumps(document(found, tmp_path)))
        done = runner.invoke(command_line.app, ["step", "--check", "--freeze", "--out", str(path)])
        assert done.exit_code == code and kept.exists() == (code == 0)


def test_peers_share_the_process_of_their_bf16_case_or_have_their_own():
    batches = run.make_tasks(cases.grid(), trace=True)
    assert [[t.part for t in batch] for batch in batches if batch[0].case.policy == "bf16"] == [
        ["engine", "peer", "parts"]
    ] * 4
    alone = run.make_tasks([StepCase("s2_pro", 1, FP8)], trace=False)
    assert [[(t.case.policy, t.part) for t in batch] for batch in alone] == [[(FP8, "engine")], [("bf16", "peer")]]
    assert all("parts" not in [t.part for t in batch] for batch in batches if batch[0].case.fused != "none")


def test_a_trace_is_a_table_that_adds_up(results, tmp_path):
    case = cases.grid()[0]
    trace = {
        "step_ms": 3.0,
        "clock": "device time of kernels",
        "parts": [{"part": "codec", "ms": 1.0}, {"part": parts.GAPS, "ms": 2.0}],
        "kernels": [{"kernel": "fusion_1", "calls": 3, "ms": 0.5}],
    }
    text = tables.trace_tables(document([*results, (Task(case, "parts", "step"), trace)], tmp_path))
    assert "| sum | 3.000 | 100% |" in text and "`fusion_1` | 3" in text


def test_groups_of_frames_sound_as_frames_one_by_one(plain):
    rig, filled = plain
    (decode, _), (sound, _), (group, _) = rig.decode(), rig.sound(), rig.group()
    alone = EngineRun(rig, filled.decode(decode), filled.sound(sound))
    grouped = EngineRun(rig, filled.decode(decode), group=filled.sound(group))
    for run_ in (alone, grouped):
        run_.set_back()
    singles, together = [], []
    for step in range(8):
        mine, theirs = alone.step().result(), grouped.step().result()
        np.testing.assert_array_equal(mine.codes_BK, theirs.codes_BK)
        singles.append(mine.audio_Bs)
        assert theirs.has_sound_B.all() == (step % 4 == 3)
        together += [theirs.audio_Bs] if step % 4 == 3 else []
    np.testing.assert_allclose(np.concatenate(together, axis=1), np.concatenate(singles, axis=1), atol=2e-4)


def test_a_chunk_is_timed_and_the_codec_s_call_for_several(plain):
    rig, filled = plain
    assert chunk_ms(rig, filled.prefill(rig.prefill()[0]), 2) > 0
    assert (steady_ms(GroupRun(rig, filled.sound(rig.group()[0])), 3) > 0).all()


@pytest.mark.slow
def test_the_command_on_a_cpu(tmp_path):
    out = tmp_path / "step.json"
    done = runner.invoke(command_line.app, ["step", "--trace", "--policy", "bf16", "--json", "--out", str(out)])
    assert done.exit_code == 0 and "no GPU was found" in done.stderr
    written = json.loads(out.read_text())
    assert json.loads(done.stdout.strip().splitlines()[-1]) == written
    (row,), (trace,) = written["rows"], written["traces"]
    assert row["model"] == "tiny" and row["compiles"] == 0 and row["steps"] >= 200 and row["peer_xla_bf16_ms"] > 0
    assert row["device_bytes"] >= row["predicted_bytes"] > 0
    assert sum(part["ms"] for part in trace["parts"]) == pytest.approx(trace["step_ms"])
    assert len(out.with_suffix(".jsonl").read_text().splitlines()) == 4


def test_the_page_of_a_device_quotes_its_steps(results, tmp_path):
    assert "No figures" in report.step_markdown(tmp_path)
    (tmp_path / "nvidia-h200").mkdir()
    (tmp_path / "nvidia-h200" / "step.json").write_text(json.dumps(document(results, tmp_path)))
    text = report.step_markdown(tmp_path)
    assert "## Step on nvidia-h200" in text and "25,000" in text and "plain bfloat16 jnp" in text


def test_frozen_files_pass_the_check():
    for path in report.BASELINES.glob("*/step.json"):
        assert check.problems(json.loads(path.read_text()), cases.grid()) == []
