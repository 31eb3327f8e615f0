"""Published tensor shapes of a DualAR model, rebuilt: `<name>_config.json` beside `<name>_shapes.json`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fishjax.config import ModelConfig
from fishjax.verify.folders import is_dual_ar_config
from fishjax.verify.report import FileReport, GoldenFile
from fishjax.weights.load import public_shapes
from fishjax.weights.names import Layout


def verify_shapes(folder: Path, root: Path) -> list[FileReport]:
    """Reports on every such pair of one folder; empty when it holds none."""
    reports = []
    for shapes_path in sorted(folder.glob("*_shapes.json")):
        config_path = folder / (shapes_path.name.removesuffix("_shapes.json") + "_config.json")
        if not is_dual_ar_config(config_path):
            continue
        config_file, golden = GoldenFile.open(config_path, root), GoldenFile.open(shapes_path, root)
        for name in config_file.names():
            config_file.read(name)
        layout: Layout = "nested" if "text_config" in config_file else "flat"
        shapes = public_shapes(ModelConfig.from_file(config_path), layout)
        for name in golden.names():
            if name == "shapes":
                golden.compare(name, {key: list(shape) for key, shape in shapes.items()}, 0)
            elif name == "num_tensors":
                golden.compare(name, len(shapes), 0)
            elif name == "num_parameters":
                golden.compare(name, sum(int(np.prod(shape)) for shape in shapes.values()), 0)
            elif name == "header_sha256":
                golden.compare(name, _header_hash(shapes), 0)
        reports += [config_file.report(), golden.report()]
    return reports


def _header_hash(shapes: Mapping[str, tuple[int, ...]]) -> str:
    rows = (f"{name}|BF16|{'x'.join(map(str, shapes[name]))}" for name in sorted(shapes))
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()
