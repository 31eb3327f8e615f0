"""Verify of the codec folders passes on what was recorded and sees every single change."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fishjax.errors import WeightsError
from fishjax.verify import codec
from fishjax.verify.report import difference


@pytest.fixture(scope="module", autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def seen(golden, recording):
    """Reports of codec_tiny, and of each comparison what fishjax computed and the tolerance."""
    with recording() as compared:
        reports = codec.verify(golden / "codec_tiny", golden)
    return {report.file: report for report in reports}, compared


def test_the_recorded_codec_passes_and_nothing_is_skipped(golden, seen):
    reports, _ = seen
    assert all(report.ok for report in reports.values())
    on_disk = {str(path.relative_to(golden)) for path in (golden / "codec_tiny").iterdir()}
    assert set(reports) == on_disk
    report = reports["codec_tiny/expected.safetensors"]
    assert (report.present, report.compared) == (63, 49)
    assert max(check.error for check in report.checks) < 5e-5


def test_one_changed_value_in_each_tensor_is_seen(golden, seen):
    expected = load_file(golden / "codec_tiny" / "expected.safetensors")
    entries = {name: pair for (file, name), pair in seen[1].items() if file.endswith("expected.safetensors")}
    assert len(entries) == 49
    for name, (actual, tolerance) in entries.items():
        changed = expected[name].copy()
        place = changed.reshape(-1)
        middle = len(place) // 2
        place[middle] = {"f": place[middle] + 1e-2, "b": not place[middle]}.get(changed.dtype.kind, place[middle] + 1)
        assert difference(changed, actual, exact=tolerance == 0) > tolerance, name


def test_changes_in_the_files_are_seen_where_they_are(golden, tmp_path):
    folder = tmp_path / "other_name"
    shutil.copytree(golden / "codec_tiny", folder)
    expected = load_file(folder / "expected.safetensors")
    changed = ("odd.waveform", "exact.latents", "module.encoder.block.1.out", "random.waveform")
    for name in changed:
        expected[name].reshape(-1)[5] += 1e-2
    expected["long.codes"][0, 2, 100] = (expected["long.codes"][0, 2, 100] + 1) % 32
    expected["window_mask_15"][3, 9] ^= True
    save_file(expected | {"odd.surprise": np.ones(3, np.float32)}, folder / "expected.safetensors")
    settings = json.loads((folder / "expected.json").read_text())
    settings["lengths"]["odd"]["feature_lengths"] = [11]
    settings["min_code_margin"]["batch"] += 1e-2
    (folder / "expected.json").write_text(json.dumps(settings))
    reports = {report.file: report for report in codec.verify(folder, tmp_path)}
    report = reports["other_name/expected.safetensors"]
    assert report.untouched == ("odd.surprise",)
    failed = {check.name for check in report.checks if not check.ok}
    # Another code makes another sound, so the long case's decode cannot match either.
    decoded = {"long.waveform", "long.decoder_in", "long.waveform frame by frame"}
    assert failed == {*changed, "long.codes", "window_mask_15"} | decoded
    failed = {check.name for check in reports["other_name/expected.json"].checks if not check.ok}
    assert failed == {"lengths", "min_code_margin"}


def test_other_shapes_and_lengths_than_published_are_seen(golden, tmp_path):
    """That the published ones pass, test_run.py shows."""
    for path in (golden / "codec_real").iterdir():
        raw = json.loads(path.read_text())
        if "shapes" in raw:
            raw["shapes"]["decoder.model.6.conv.bias"] = [2]
        else:
            raw["cases"][4]["feature_length"] += 1
        (tmp_path / path.name).write_text(json.dumps(raw))
    wrong = [check.name for report in codec.verify(tmp_path, tmp_path) for check in report.checks if not check.ok]
    assert sorted(wrong) == ["cases", "shapes"]


def test_wrong_weights_and_unknown_modules_are_said(golden, tmp_path):
    shutil.copytree(golden / "codec_tiny", tmp_path / "codec")
    path = tmp_path / "codec" / "expected.safetensors"
    save_file({"module.decoder.model.77.in": np.ones((1, 4, 3), np.float32)}, path)
    with pytest.raises(WeightsError, match=r"module 'decoder.model.77' that is not there"):
        codec.verify(tmp_path / "codec", tmp_path)
    weights = load_file(tmp_path / "codec" / "model.safetensors")
    del weights["decoder.model.0.conv.bias"]
    save_file(weights, tmp_path / "codec" / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 missing: decoder.model.0.conv.bias"):
        codec.verify(tmp_path / "codec", tmp_path)


def test_other_folders_are_left_alone(golden):
    for name in ("dualar_tiny", "dualar_real", "prompt_format", "e2e"):
        assert codec.verify(golden / name, golden) == []
