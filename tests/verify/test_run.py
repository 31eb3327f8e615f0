"""Verify of whole folders: everything claimed, everything compared, nothing skipped in silence."""

from __future__ import annotations

import io
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fishjax.verify.run import print_reports, to_json, verify_folder


@pytest.fixture(scope="module")
def whole(golden):
    return verify_folder(golden)


def failing(reports) -> dict[str, list[str]]:
    return {r.file: [c.name for c in r.checks if not c.ok] + list(r.untouched) for r in reports if not r.ok}


def test_the_recorded_folder_passes_and_every_file_is_claimed(golden, whole):
    assert failing(whole) == {}
    on_disk = {str(p.relative_to(golden)) for p in golden.rglob("*") if p.is_file() and p.name != "README.md"}
    assert {report.file for report in whole} >= on_disk
    for folder in ("dualar_tiny", "dualar_bias", "dualar_real", "codec_tiny", "e2e", "prompt_format"):
        assert sum(report.compared for report in whole if report.file.startswith(f"{folder}/")) >= 7, folder
    sound = next(report for report in whole if report.file == "e2e/expected.safetensors")
    assert sound.compared == sound.present == 10
    assert max(check.error for check in sound.checks) < 5e-5


def test_table_and_json(whole):
    text = io.StringIO()
    print_reports(whole, file=text)
    assert "sampled.seq" in text.getvalue() and text.getvalue().rstrip().endswith("all within tolerance")
    document = json.loads(json.dumps(to_json(whole), allow_nan=False))
    assert document["ok"] and all(entry["ok"] for entry in document["files"])


@pytest.mark.parametrize("entry", ["sampled.waveform", "long.segment1", "long.waveform", "greedy.codes"])
def test_a_changed_sound_is_seen(golden, tmp_path, entry):
    for name in ("dualar_tiny", "codec_tiny", "e2e", "prompt_format"):
        shutil.copytree(golden / name, tmp_path / name)
    path = tmp_path / "e2e" / "expected.safetensors"
    tensors = load_file(path)
    changed = tensors[entry].copy()
    changed.reshape(-1)[7] += 1 if changed.dtype.kind == "i" else 1e-2
    save_file(tensors | {entry: changed}, path)
    assert failing(verify_folder(tmp_path)) == {"e2e/expected.safetensors": [entry]}


def test_sound_without_a_voice_that_made_it_fails(golden, tmp_path):
    shutil.copytree(golden / "e2e", tmp_path / "e2e")
    assert "e2e/expected.safetensors" in failing(verify_folder(tmp_path))


def test_missing_and_empty_folders_fail(tmp_path):
    assert failing(verify_folder(tmp_path / "nowhere"))
    assert failing(verify_folder(tmp_path))
    (tmp_path / "README.md").write_text("nothing here")
    (tmp_path / "inner").mkdir()
    assert failing(verify_folder(tmp_path))
    assert not to_json([])["ok"]


@pytest.mark.parametrize("name", ["notes.txt", "expected.json", "cases.json", "more/expected.safetensors"])
def test_an_unknown_file_fails(golden, tmp_path, name):
    shutil.copytree(golden / "dualar_real", tmp_path / "shapes")
    path = tmp_path / "extra" / name
    path.parent.mkdir(parents=True)
    if path.suffix == ".safetensors":
        save_file({"x": np.ones(2, np.float32)}, path)
    else:
        path.write_text("{}")
    assert list(failing(verify_folder(tmp_path))) == [f"extra/{name}"]


def test_a_damaged_file_fails_and_the_rest_is_still_reported(golden, tmp_path):
    shutil.copytree(golden / "dualar_real", tmp_path / "shapes")
    shutil.copytree(golden / "dualar_bias", tmp_path / "bias")
    path = tmp_path / "bias" / "expected.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    reports = verify_folder(tmp_path)
    assert all(file.startswith("bias") for file in failing(reports))
    assert any(report.file.startswith("shapes") and report.ok for report in reports)


def test_the_http_contract_is_listed_and_does_not_fail(tmp_path):
    case = {"name": "health", "method": "GET", "path": "/v1/health", "status": 200}
    (tmp_path / "cases.json").write_text(json.dumps({"cases": [case], "note": "n"}))
    (report,) = verify_folder(tmp_path)
    assert report.ok and report.compared == 0
    assert "not replayed: HTTP contract of the original" in report.checks[0].name
