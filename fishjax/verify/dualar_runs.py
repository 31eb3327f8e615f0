"""Recorded runs of a DualAR model, replayed frame by frame: single runs, and long texts in several batches.

Runs are found in the file: every `<run>.seq` has its settings in `expected.json`. `verify.e2e` decodes the same
replays to sound.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fishjax.config import ModelConfig
from fishjax.errors import WeightsError
from fishjax.text.prompt import Mode, Prompter, Reference
from fishjax.text.reference_split import group_turns_into_batches, split_text_by_speaker
from fishjax.text.tokenizer import Tokenizer
from fishjax.verify.folders import model_folders
from fishjax.verify.replay import Replayer, Run, RunSettings
from fishjax.verify.report import FLOAT_TOLERANCE, GoldenFile, difference
from fishjax.weights.load import load_dual_ar

MARGIN_TOLERANCE = 1e-4
_MINUS_INFINITY = -1e29  # recorded -inf is -1e30


@dataclass(frozen=True)
class Replayed:
    """Codes (C, T) of every run of a folder: single runs by name, long texts as one array per segment."""

    runs: Mapping[str, Run]
    segments: Mapping[str, list[np.ndarray]]


def replay_folder(folder: Path, root: Path) -> Replayed:
    """The runs of a folder, replayed; made once per state of its files."""
    places = [folder, *model_folders(folder)]
    files = sorted(path for place in set(places) for path in place.iterdir() if path.is_file())
    return _replay(folder, root, tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in files))


def single_runs(names: list[str]) -> list[str]:
    """Names of the runs recorded as `<run>.seq`."""
    return [name.removesuffix(".seq") for name in names if name.endswith(".seq")]


def long_runs(names: list[str]) -> list[str]:
    """Names of the runs recorded as `<run>.prompt0`: long texts in several batches."""
    return [name.removesuffix(".prompt0") for name in names if name.endswith(".prompt0")]


def compare_runs(folder: Path, root: Path, config: ModelConfig, golden: GoldenFile, settings: GoldenFile) -> None:
    """Compare every run of a folder; `golden` is its `expected.safetensors`, `settings` its `expected.json`."""
    replayed = replay_folder(folder, root)
    for name, run in replayed.runs.items():
        recorded = settings.read(name)
        golden.compare(f"{name}.seq", run.seq.astype(golden.read(f"{name}.seq").dtype), 0)
        for kind, logits in (("slow", run.slow_logits), ("fast", run.fast_logits)):
            entry = f"{name}.{kind}_logits"
            if entry in golden:
                error = _masked_difference(golden.read(entry), logits)
                golden.check(entry, error, FLOAT_TOLERANCE, entries=[entry])
            if f"{name}.{kind}_uniform" in golden:
                golden.read(f"{name}.{kind}_uniform")
        stopped = int(run.seq[0, -1]) == int(settings.read("im_end_id"))
        facts: dict[str, Any] = {
            "frames": run.num_frames,
            "stopped": stopped,
            "ras_fired_at_frames": run.ras_fired_at,
            "ras_changed_token_at_frames": run.ras_changed_at,
        }
        for fact, value in facts.items():
            if fact in recorded:
                settings.check(f"{name}.{fact}", difference(recorded[fact], value, exact=True), 0, entries=[name])
        if "min_margin_slow_fast" in recorded:
            margins = np.array([_smallest_gap(run.slow_logits), _smallest_gap(run.fast_logits)])
            error = float(np.max(np.abs(margins - np.asarray(recorded["min_margin_slow_fast"]))))
            settings.check(f"{name}.min_margin_slow_fast", error, MARGIN_TOLERANCE, entries=[name])
    for name, segments in replayed.segments.items():
        _compare_long(name, segments, folder, root, config, golden, settings)


def _compare_long(
    name: str,
    segments: list[np.ndarray],
    folder: Path,
    root: Path,
    config: ModelConfig,
    golden: GoldenFile,
    settings: GoldenFile,
) -> None:
    """Prompts and codes of a long text: the prompts are rebuilt from texts and from the codes just replayed."""
    recorded, references = settings.read(name), _references(golden, settings, name)
    batches = _batches(recorded)
    actions = ["sample"] * len(batches) + ["next"]
    for fact, value in (("batches", batches), ("actions", actions)):
        if fact in recorded:
            settings.check(f"{name}.{fact}", difference(recorded[fact], value, exact=True), 0, entries=[name])
    prompter = _prompter(folder, root, config)
    for i, codes_KT in enumerate(segments):
        history = [Reference(text, codes) for text, codes in zip(batches[:i], segments[:i], strict=True)]
        entry = f"{name}.prompt{i}"
        prompt_KT = golden.read(entry)
        if prompter is not None:
            built_KT = prompter.prompt(references, history, batches[i])
            golden.compare(entry, built_KT.astype(prompt_KT.dtype), 0)
        else:
            # No tokenizer in this folder: text columns are taken as recorded, the frames among them are checked.
            spoken_KT = np.concatenate([part.codes_KT for part in (*references, *history)], axis=1)
            frames_KT = prompt_KT[
                1:, (prompt_KT[0] >= config.semantic_begin_id) & (prompt_KT[0] <= config.semantic_end_id)
            ]
            error = difference(frames_KT, spoken_KT.astype(frames_KT.dtype), exact=True)
            golden.check(f"{entry} (frames only: no tokenizer here)", error, 0, entries=[entry])
        golden.compare(f"{name}.codes{i}", codes_KT.astype(golden.read(f"{name}.codes{i}").dtype), 0)


@functools.lru_cache(maxsize=2)
def _replay(folder: Path, root: Path, state: tuple) -> Replayed:
    """`state` names the files as they are now, so that a changed folder is replayed again."""
    config, model = load_dual_ar(model_folders(folder)[0])
    golden = GoldenFile.open(folder / "expected.safetensors", root)
    names = golden.names()
    if not single_runs(names) and not long_runs(names):
        return Replayed({}, {})
    settings = GoldenFile.open(folder / "expected.json", root)
    replayer = Replayer(model)
    runs = {name: _replay_single(name, replayer, golden, settings) for name in single_runs(names)}
    segments = {
        name: _replay_long(name, replayer, _prompter(folder, root, config), golden, settings)
        for name in long_runs(names)
    }
    return Replayed(runs, segments)


def _replay_single(name: str, replayer: Replayer, golden: GoldenFile, settings: GoldenFile) -> Run:
    recorded = settings.read(name)
    uniforms = [
        golden.read(f"{name}.{kind}_uniform") if f"{name}.{kind}_uniform" in golden else None
        for kind in ("slow", "fast")
    ]
    prompt_KT = golden.read(f"prompt{recorded['prompt']}")
    return replayer.generate(
        prompt_KT, _settings(recorded, settings), slow_uniform=uniforms[0], fast_uniform=uniforms[1]
    )


def _replay_long(
    name: str, replayer: Replayer, prompter: Prompter | None, golden: GoldenFile, settings: GoldenFile
) -> list[np.ndarray]:
    recorded, references = settings.read(name), _references(golden, settings, name)
    batches, segments = _batches(recorded), []
    for i, text in enumerate(batches):
        if prompter is None:
            prompt_KT = golden.read(f"{name}.prompt{i}")
        else:
            history = [Reference(text, codes) for text, codes in zip(batches[:i], segments, strict=True)]
            prompt_KT = prompter.prompt(references, history, text)
        segments.append(replayer.generate(prompt_KT, _settings(recorded, settings)).codes)
    return segments


def _settings(recorded: Mapping[str, Any], settings: GoldenFile) -> RunSettings:
    optional = {
        name: settings.read(name) for name in ("ras_window", "ras_temperature", "ras_top_p") if name in settings
    }
    try:
        return RunSettings(
            im_end_id=int(settings.read("im_end_id")),
            max_new_tokens=int(recorded["max_new_tokens"]),
            temperature=float(recorded["temperature"]),
            top_p=float(recorded["top_p"]),
            top_k=int(recorded["top_k"]),
            **optional,
        )
    except KeyError as error:
        raise WeightsError(f"{settings.name}: a run has no setting {error}") from error


def _batches(recorded: Mapping[str, Any]) -> list[str]:
    """The batches of a long text, as the original cuts them; untagged text is one batch."""
    turns = split_text_by_speaker(recorded["text"])
    return group_turns_into_batches(turns, max_bytes=recorded["chunk_length"]) if turns else [recorded["text"]]


def _references(golden: GoldenFile, settings: GoldenFile, name: str) -> list[Reference]:
    texts = settings.read(name).get("reference_texts", [])
    return [Reference(text, golden.read(f"{name}.reference_codes{i}")) for i, text in enumerate(texts)]


def _prompter(folder: Path, root: Path, config: ModelConfig) -> Prompter | None:
    """From the tokenizer of this model: in the folder, else anywhere below root; None when there is none."""
    for path in [*sorted(folder.rglob("tokenizer.json")), *sorted(root.rglob("tokenizer.json"))]:
        tokenizer = Tokenizer.from_file(path)
        ids = (tokenizer.semantic_begin_id, tokenizer.semantic_end_id)
        if ids == (config.semantic_begin_id, config.semantic_end_id):
            return Prompter(tokenizer, config.num_codebooks, "chat", Mode.REFERENCE)
    return None


def restore_infinity(logits: np.ndarray) -> np.ndarray:
    """Recorded logits, float32, with -inf where -1e30 stands for it."""
    return np.where(logits < _MINUS_INFINITY, -np.inf, logits).astype(np.float32)


def _masked_difference(expected: np.ndarray, actual: np.ndarray) -> float:
    """As `difference`, over the finite entries; -inf (recorded as -1e30) must stand in the same places."""
    if expected.shape != actual.shape:
        return float("inf")
    masked = expected < _MINUS_INFINITY
    if not np.array_equal(masked, actual < _MINUS_INFINITY):
        return float("inf")
    return difference(expected[~masked], actual[~masked], exact=False)


def _smallest_gap(logits: np.ndarray) -> float:
    """Between the best and the second best logit, over all rows."""
    best = np.partition(logits.reshape(-1, logits.shape[-1]), -2, axis=-1)[:, -2:]
    return float(np.min(best[:, 1] - best[:, 0]))
