"""Published tensor shapes and measured lengths of a codec, rebuilt from its config without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.config import CodecConfig, read_json
from fishjax.errors import WeightsError
from fishjax.verify.folders import is_codec_config
from fishjax.verify.report import FileReport, GoldenFile
from fishjax.weights.codec_names import weight_norm_shapes
from fishjax.weights.load_codec import abstract_codec


def verify_published(folder: Path, root: Path) -> list[FileReport]:
    """JSON files with the tensor shapes or the measured lengths of a codec; the published one without a config."""
    reports = []
    config_path = folder / "config.json"
    config = CodecConfig.from_file(config_path) if is_codec_config(config_path) else CodecConfig()
    for path in sorted(folder.glob("*.json")):
        try:
            raw = read_json(path)
        except WeightsError:
            continue  # no room claims it, so it is reported as unknown
        if _holds_shapes(raw):
            reports.append(_verify_shapes(path, root, config))
        elif _holds_lengths(raw):
            reports.append(_verify_lengths(path, root, config))
    return reports


def _holds_shapes(raw: Mapping[str, Any]) -> bool:
    shapes = raw.get("shapes")
    return isinstance(shapes, dict) and any(name.startswith("quantizer.") for name in shapes)


def _holds_lengths(raw: Mapping[str, Any]) -> bool:
    cases = raw.get("cases")
    return "hop_length" in raw and isinstance(cases, list) and all("decoded_shape" in case for case in cases)


def _verify_shapes(path: Path, root: Path, config: CodecConfig) -> FileReport:
    golden = GoldenFile.open(path, root)
    shapes = weight_norm_shapes(abstract_codec(config))
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    golden.compare("shapes", {name: list(shape) for name, shape in shapes.items()}, 0)
    if "num_tensors" in golden:
        golden.compare("num_tensors", len(shapes), 0)
    if "num_parameters" in golden:
        golden.compare("num_parameters", sum(sizes.values()), 0)
    if "group_parameters" in golden:
        groups = golden.read("group_parameters")
        ours = {group: sum(n for name, n in sizes.items() if name.startswith(f"{group}.")) for group in groups}
        golden.compare("group_parameters", ours, 0)
    if "provenance" in golden:
        golden.read("provenance")
    return golden.report()


def _verify_lengths(path: Path, root: Path, config: CodecConfig) -> FileReport:
    golden = GoldenFile.open(path, root)
    golden.compare("hop_length", config.hop_length, 0)
    if "frame_length" in golden:
        golden.compare("frame_length", config.samples_per_frame, 0)
    if "sample_rate" in golden:
        golden.compare("sample_rate", config.sample_rate_hz, 0)
    if "delay" in golden:
        golden.read("delay")  # an attribute that the original keeps and never uses
    graph, state = nnx.split(abstract_codec(config))
    golden.compare("cases", [_lengths_case(config, graph, state, case) for case in golden.read("cases")], 0)
    return golden.report()


def _lengths_case(config: CodecConfig, graph: nnx.GraphDef, state: nnx.State, case: Mapping[str, Any]) -> dict:
    """One measured case with our numbers: shapes traced through the real modules, no weights needed."""
    ours: dict[str, Any] = {}
    if "input_samples" in case:
        samples = int(case["input_samples"])
        audio = jax.ShapeDtypeStruct((1, samples), jnp.float32)
        codes, _ = jax.eval_shape(lambda state, audio: nnx.merge(graph, state).encode(audio), state, audio)
        frames = config.num_frames(samples)
        ours |= {"input_samples": samples, "codes_shape": list(codes.shape), "feature_length": frames}
    else:
        ours["frames"] = int(case["frames"])
        codes = jax.ShapeDtypeStruct((1, config.num_codebooks, ours["frames"]), jnp.int32)
    sound = jax.eval_shape(lambda state, codes: nnx.merge(graph, state).decode(codes), state, codes)
    return ours | {"decoded_shape": [sound.shape[0], 1, sound.shape[1]]}
