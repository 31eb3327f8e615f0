"""Verify text in, sound out: the runs of a DualAR folder, replayed and decoded by a codec folder below the same root.

A folder is known by its `expected.safetensors` with nothing but `<run>.codes`, `<run>.waveform` and
`<run>.segment{i}` and no model of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fishjax.codec import Codec
from fishjax.errors import WeightsError
from fishjax.verify.compiled import compiled
from fishjax.verify.dualar_runs import Replayed, long_runs, replay_folder, single_runs
from fishjax.verify.folders import is_codec_config, model_folders
from fishjax.verify.report import FLOAT_TOLERANCE, FileReport, GoldenFile
from fishjax.weights.load_codec import load_codec

_ENTRY = re.compile(r"(?P<run>.+)\.(codes|waveform|segment(?P<index>\d+))")


def verify(folder: Path, root: Path) -> list[FileReport]:
    """Reports on the end-to-end file of one folder; empty when it holds none.

    When several voices or codecs below `root` could have made it, one that fits is enough. Raises WeightsError
    when there is none.
    """
    path = folder / "expected.safetensors"
    if not path.is_file() or (folder / "config.json").exists() or model_folders(folder):
        return []
    names = GoldenFile.open(path, root).names()
    if not names or not all(_ENTRY.fullmatch(name) for name in names):
        return []
    runs = {name.rpartition(".")[0] for name in names}
    first: FileReport | None = None
    for voice, codec in _pairs(root, runs):
        report = _compare(GoldenFile.open(path, root), replay_folder(voice, root), codec)
        if report.ok:
            return [report]
        first = first or report
    if first is None:
        raise WeightsError(
            f"no DualAR runs {sorted(runs)} and codec with as many codebooks below {root}: cannot replay"
        )
    return [first]


def _pairs(root: Path, runs: set[str]) -> Iterator[tuple[Path, Codec]]:
    """Folders whose file records all `runs`, with every codec of the same number of codebooks."""
    folders = [root, *sorted(path for path in root.rglob("*") if path.is_dir())]
    codecs = [load_codec(place)[1] for place in folders if is_codec_config(place / "config.json")]
    for voice in folders:
        places = model_folders(voice)
        if not places:
            continue
        names = GoldenFile.open(voice / "expected.safetensors", root).names()
        if not runs <= {*single_runs(names), *long_runs(names)}:
            continue
        for codec in codecs:
            yield voice, codec


def _compare(golden: GoldenFile, replayed: Replayed, codec: Codec) -> FileReport:
    decode = compiled(Codec.decode, codec)

    def sound_of(codes_KT: np.ndarray) -> np.ndarray:
        if codes_KT.shape[0] != codec.config.num_codebooks:
            raise WeightsError(f"runs have {codes_KT.shape[0]} codebooks, the codec {codec.config.num_codebooks}")
        return np.asarray(decode(jnp.asarray(codes_KT, jnp.int32)[None]))[0]

    for name, run in replayed.runs.items():
        if f"{name}.codes" in golden:
            golden.compare(f"{name}.codes", run.codes.astype(golden.read(f"{name}.codes").dtype), 0)
        if f"{name}.waveform" in golden:
            golden.compare(f"{name}.waveform", sound_of(run.codes), FLOAT_TOLERANCE)
    for name, segments in replayed.segments.items():
        # Each segment starts the codec from silence.
        sounds = [sound_of(codes_KT) for codes_KT in segments]
        for i, sound in enumerate(sounds):
            if f"{name}.segment{i}" in golden:
                golden.compare(f"{name}.segment{i}", sound, FLOAT_TOLERANCE)
        if f"{name}.codes" in golden:
            codes_KT = np.concatenate(segments, axis=1)
            golden.compare(f"{name}.codes", codes_KT.astype(golden.read(f"{name}.codes").dtype), 0)
        if f"{name}.waveform" in golden:
            golden.compare(f"{name}.waveform", np.concatenate(sounds), FLOAT_TOLERANCE)
    return golden.report()
