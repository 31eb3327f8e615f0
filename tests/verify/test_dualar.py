"""Verify of the DualAR folders sees every single change; that it passes on what was recorded, test_run.py shows."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fishjax.verify import dualar
from fishjax.verify.replay import Replayer, RunSettings
from fishjax.verify.report import GoldenFile, difference
from fishjax.weights.load import load_dual_ar


@pytest.fixture(scope="module", autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def copy(golden, tmp_path):
    """A temporary root with the tiny model and the tokenizer."""
    for name in ("dualar_tiny", "prompt_format"):
        shutil.copytree(golden / name, tmp_path / name)
    return tmp_path


def run(root):
    return {report.file: report for report in dualar.verify(root / "dualar_tiny", root)}


INPUTS = ("uniform", "inp", "labels", "mask", "rows", "inputs", "input_ids", "column")


def compared_entries(golden) -> list[str]:
    """All but inputs, and the bfloat16 logits, whose check is loose on purpose."""
    names = load_file(golden / "dualar_tiny" / "expected.safetensors")
    names = [name for name in names if not name.startswith(("bf16.", "prompt")) and not name.endswith(INPUTS)]
    probs_inputs = [name for name in names if name.startswith("probs.") and name.endswith(".logits")]
    return [name for name in names if name not in probs_inputs and "reference_codes" not in name]


def test_one_changed_value_in_each_tensor_is_seen(golden, copy, recording):
    """Every compared tensor gets 1e-2 on one entry, one tensor at a time.

    Beside what the clean run computed; logits, whose steps are compared one by one, in a run of their own.
    """
    with recording() as compared:
        run(copy)
    path = copy / "dualar_tiny" / "expected.safetensors"
    clean = load_file(path)
    rng = np.random.default_rng(0)
    entries = compared_entries(golden)
    assert len(entries) >= 30
    for name in entries:
        changed = clean[name].copy()
        finite = np.flatnonzero(changed.reshape(-1) > -1e29)
        where = rng.choice(finite)
        changed.reshape(-1)[where] += 1 if changed.dtype.kind == "i" else 1e-2
        if (pair := compared.get(("dualar_tiny/expected.safetensors", name))) is not None:
            actual, tolerance = pair
            assert difference(clean[name], actual, exact=tolerance == 0) <= tolerance, name
            assert difference(changed, actual, exact=tolerance == 0) > tolerance, name
            continue
        save_file(clean | {name: changed}, path)
        report = run(copy)["dualar_tiny/expected.safetensors"]
        assert not report.ok, name
        assert {check.name.split(" ")[0] for check in report.checks if not check.ok} >= {name}


@pytest.mark.parametrize(
    ("entry", "field", "value"),
    [
        ("greedy", "frames", 47),
        ("greedy_stop", "stopped", False),
        ("greedy", "min_margin_slow_fast", [0.094955, 0.027706]),
        ("sampled", "ras_fired_at_frames", [4, 5]),
        ("sampled", "temperature", 0.85),
        ("sampled", "top_p", 0.7),
        ("long", "batches", ["x"]),
        ("long", "text", "<|speaker:0|>something else"),
    ],
)
def test_changed_settings_are_seen(copy, entry, field, value):
    path = copy / "dualar_tiny" / "expected.json"
    settings = json.loads(path.read_text())
    settings[entry][field] = value
    path.write_text(json.dumps(settings))
    assert not all(report.ok for report in run(copy).values())


def test_an_entry_that_nobody_knows_fails(copy):
    path = copy / "dualar_tiny" / "expected.safetensors"
    save_file(load_file(path) | {"surprise": np.ones(3, np.float32)}, path)
    report = run(copy)["dualar_tiny/expected.safetensors"]
    assert not report.ok and report.untouched == ("surprise",)


def test_layouts_that_differ_fail(copy):
    path = copy / "dualar_tiny" / "s1_layout" / "model.safetensors"
    tensors = load_file(path)
    tensors["fast_norm.weight"] = tensors["fast_norm.weight"] + np.float32(1e-2)
    save_file(tensors, path)
    assert not all(report.ok for report in run(copy).values())


def test_runs_may_have_any_name(copy):
    folder = copy / "dualar_tiny"
    tensors, settings = load_file(folder / "expected.safetensors"), json.loads((folder / "expected.json").read_text())
    renamed = {name.replace("greedy_stop.", "quiet.").replace("long.", "story."): v for name, v in tensors.items()}
    settings["quiet"], settings["story"] = settings.pop("greedy_stop"), settings.pop("long")
    save_file(renamed, folder / "expected.safetensors")
    (folder / "expected.json").write_text(json.dumps(settings))
    reports = run(copy)
    assert all(report.ok for report in reports.values())
    names = {check.name for check in reports["dualar_tiny/expected.safetensors"].checks}
    assert {"quiet.seq", "story.prompt2"} <= names


def test_without_a_tokenizer_frames_of_prompts_are_still_checked(copy):
    shutil.rmtree(copy / "prompt_format")
    assert all(report.ok for report in run(copy).values())
    path = copy / "dualar_tiny" / "expected.safetensors"
    tensors = load_file(path)
    frames = np.flatnonzero(tensors["long.prompt2"][0] >= 432)
    tensors["long.prompt2"][2, frames[-1]] ^= 1
    save_file(tensors, path)
    assert not all(report.ok for report in run(copy).values())


def test_a_run_that_ignores_repetition_is_not_the_recorded_one(golden):
    folder = golden / "dualar_tiny"
    _, model = load_dual_ar(folder / "s1_layout")
    recorded = GoldenFile.open(folder / "expected.safetensors", golden)
    settings = RunSettings(im_end_id=422, max_new_tokens=64, temperature=0.75, top_p=0.9, top_k=30)
    uniforms = {f"{k}_uniform": recorded.read(f"sampled.{k}_uniform") for k in ("slow", "fast")}
    replayer, prompt, wanted = Replayer(model), recorded.read("prompt0"), recorded.read("sampled.seq")
    with_ras = replayer.generate(prompt, settings, **uniforms)
    np.testing.assert_array_equal(with_ras.seq, wanted)
    assert with_ras.ras_changed_at == [15, 18, 24, 27]
    without = replayer.generate(prompt, dataclasses.replace(settings, use_ras=False), **uniforms)
    first_frames = slice(prompt.shape[1], prompt.shape[1] + 15)
    np.testing.assert_array_equal(without.seq[:, first_frames], wanted[:, first_frames])
    assert without.seq[0, prompt.shape[1] + 15] != wanted[0, prompt.shape[1] + 15]
