"""Verify of the DualAR model: recorded forwards and runs, replayed; published shapes, rebuilt.

Two kinds of folder are known by what they hold, not by their name: `expected.safetensors` beside (or above) model
folders, and `<name>_config.json` beside `<name>_shapes.json`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fishjax.config import read_json
from fishjax.model.dual_ar import DualAR
from fishjax.verify.dualar_forwards import Forwards
from fishjax.verify.dualar_runs import compare_runs
from fishjax.verify.dualar_shapes import verify_shapes
from fishjax.verify.folders import model_folders
from fishjax.verify.report import FileReport, GoldenFile
from fishjax.weights.assign import parameters
from fishjax.weights.files import StoredTensor, read_checkpoint
from fishjax.weights.load import load_dual_ar


def verify(folder: Path, root: Path) -> list[FileReport]:
    """Reports on the DualAR files of one folder (and of its model folders); empty when it holds none.

    Raises WeightsError for a file that cannot be read or a run that cannot be replayed.
    """
    reports = verify_shapes(folder, root)
    models = model_folders(folder)
    if models:
        reports += _verify_models(folder, models, root)
    return reports


def _verify_models(folder: Path, places: list[Path], root: Path) -> list[FileReport]:
    config, model = load_dual_ar(places[0])
    reports = []
    for place in places:
        reports += _report_model_files(place, root, None if place == places[0] else model)
    golden = GoldenFile.open(folder / "expected.safetensors", root)
    settings_path = folder / "expected.json"
    settings = GoldenFile(settings_path, read_json(settings_path) if settings_path.is_file() else {}, root)
    Forwards(config, model, golden, settings).all()
    compare_runs(folder, root, config, golden, settings)
    reports.append(golden.report())
    if settings_path.is_file():
        reports.append(settings.report())
    return reports


def _report_model_files(place: Path, root: Path, first: DualAR | None) -> list[FileReport]:
    """Config and weight files are inputs; a second layout of the same model must hold the same parameters."""
    config_file = GoldenFile.open(place / "config.json", root)
    for name in config_file.names():
        config_file.read(name)
    reports = [config_file.report()]
    weights_path, tensors = read_checkpoint(place)
    by_file: dict[Path, dict[str, StoredTensor]] = {weights_path: tensors}
    if weights_path.name.endswith(".index.json"):
        index = GoldenFile.open(weights_path, root)
        for name in index.names():
            index.read(name)
        reports.append(index.report())
        by_file = {}
        for name, file_name in read_json(weights_path)["weight_map"].items():
            by_file.setdefault(place / file_name, {})[name] = tensors[name]
    worst = 0.0
    if first is not None:
        mine, theirs = parameters(load_dual_ar(place)[1]), parameters(first)
        same = mine.keys() == theirs.keys() and all(
            np.array_equal(np.asarray(mine[path][...]), np.asarray(theirs[path][...])) for path in mine
        )
        worst = 0.0 if same else float("inf")
    for path, stored in by_file.items():
        weights = GoldenFile(path, stored, root)
        for name in weights.names():
            weights.read(name)
        if first is not None:
            weights.check("same parameters as the other layout", worst, 0, entries=weights.names())
        reports.append(weights.report())
    tokenizer_path = place / "tokenizer.json"
    if tokenizer_path.is_file():
        tokenizer_file = GoldenFile.open(tokenizer_path, root)
        for name in tokenizer_file.names():
            tokenizer_file.read(name)
        reports.append(tokenizer_file.report())
    return reports
