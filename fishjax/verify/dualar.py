"""Verify of the DualAR model: recorded forwards and runs, replayed; published shapes, rebuilt.

Two kinds of folder are known by what they hold, not by their name: `expected.safetensors` beside (or above) model
folders, and `<name>_config.json` beside `<name>_shapes.json`. Runs are found in the file: every `<run>.seq` has
its settings in `expected.json`.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.config import ModelConfig, read_json
from fishjax.engine import sampling
from fishjax.errors import WeightsError
from fishjax.model.dual_ar import DualAR, select_frames
from fishjax.model.layers import rope_table
from fishjax.text.prompt import Mode, Prompter, Reference
from fishjax.text.split import group_turns_into_batches, split_text_by_speaker
from fishjax.text.tokenizer import Tokenizer
from fishjax.verify.replay import Replayer, Run, RunSettings
from fishjax.verify.report import FileReport, GoldenFile, difference
from fishjax.weights.assign import parameters
from fishjax.weights.files import StoredTensor, read_checkpoint
from fishjax.weights.load import load_dual_ar, public_shapes
from fishjax.weights.names import Layout

FLOAT_TOLERANCE = 2e-4
PROBABILITY_TOLERANCE = 2e-5
MARGIN_TOLERANCE = 1e-4
# The bfloat16 model is another rounding of the same numbers: a loose check, worst and average difference.
BF16_WORST, BF16_AVERAGE = 0.5, 0.1

_MINUS_INFINITY = -1e29  # recorded -inf is -1e30


@dataclass(frozen=True)
class Replayed:
    """Codes (C, T) of every run of a folder: single runs by name, long texts as one array per segment."""

    runs: Mapping[str, Run]
    segments: Mapping[str, list[np.ndarray]]


def verify(folder: Path, root: Path) -> list[FileReport]:
    """Reports on the DualAR files of one folder (and of its model folders); empty when it holds none.

    Raises WeightsError for a file that cannot be read or a run that cannot be replayed.
    """
    reports = _verify_shapes(folder, root)
    models = model_folders(folder)
    if models:
        reports += _verify_models(folder, models, root)
    return reports


def model_folders(folder: Path) -> list[Path]:
    """The DualAR model folders that `expected.safetensors` of this folder speaks of: itself or its children."""
    if not (folder / "expected.safetensors").is_file():
        return []
    children = sorted(child for child in folder.iterdir() if child.is_dir())
    return [place for place in (folder, *children) if _is_dual_ar_config(place / "config.json")]


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


def _is_dual_ar_config(path: Path) -> bool:
    if not path.is_file():
        return False
    raw = read_json(path)
    return "text_config" in raw or raw.get("model_type") == "dual_ar" or {"vocab_size", "n_fast_layer"} <= raw.keys()


# --- published shapes -----------------------------------------------------------------------------------------


def _verify_shapes(folder: Path, root: Path) -> list[FileReport]:
    reports = []
    for shapes_path in sorted(folder.glob("*_shapes.json")):
        config_path = folder / (shapes_path.name.removesuffix("_shapes.json") + "_config.json")
        if not _is_dual_ar_config(config_path):
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


# --- a model and what it computed -----------------------------------------------------------------------------


def _verify_models(folder: Path, places: list[Path], root: Path) -> list[FileReport]:
    config, model = load_dual_ar(places[0])
    reports = []
    for place in places:
        reports += _report_model_files(place, root, None if place == places[0] else model)
    golden = GoldenFile.open(folder / "expected.safetensors", root)
    settings_path = folder / "expected.json"
    settings = GoldenFile(settings_path, read_json(settings_path) if settings_path.is_file() else {}, root)
    _Comparison(config, model, golden, settings).all()
    _compare_runs(folder, root, config, golden, settings)
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


class _Comparison:
    """All entries but the runs. Each method looks for its entries and does nothing when there are none."""

    def __init__(self, config: ModelConfig, model: DualAR, golden: GoldenFile, settings: GoldenFile):
        self.config, self.model, self.golden, self.settings = config, model, golden, settings
        self.replayer = Replayer(model)
        self._graph, self._state = nnx.split(model)

    def all(self) -> None:
        """Compare everything that is there."""
        for name in ("semantic_begin_id", "semantic_end_id"):
            if name in self.settings:
                self.settings.compare(name, getattr(self.config, name), 0)
        for name in ("seed", "im_end_id", "ras_window", "ras_temperature", "ras_top_p"):
            if name in self.settings:
                self.settings.read(name)
        self.prompts()
        self.generate_forward()
        self.prefill_and_step()
        self.rope()
        self.train()
        self.probabilities()

    def prompts(self) -> None:
        """Recorded prompts are inputs; through the cache and without it they must give the same hidden states."""
        for name in self.golden.names("prompt"):
            columns_KT = np.asarray(self.golden.read(name), np.int32)
            hidden_TD, _ = self.replayer.prefill(columns_KT)
            without_1TD, _ = self._run(DualAR.generate_forward, jnp.asarray(columns_KT)[None])
            error = difference(np.asarray(without_1TD[0]), hidden_TD, exact=False)
            self.golden.check(f"{name}: cached = cache-free", error, FLOAT_TOLERANCE)

    def generate_forward(self) -> None:
        """Cache-free generate forward of a batch."""
        pairs = [(name, name.removesuffix("inputs")) for name in self.golden.names() if name.endswith(".inputs")]
        if "inp" in self.golden:
            pairs.append(("inp", "generate_"))
        for inputs, prefix in pairs:
            hidden_BTD, logits_BTV = self._run(DualAR.generate_forward, self._columns(inputs))
            self._compare(f"{prefix}logits_all", logits_BTV)
            self._compare(f"{prefix}hidden_all", self.model.fast_hidden(hidden_BTD))

    def prefill_and_step(self) -> None:
        """The first prompt through the cache, the fast pass on its last hidden state, one cached step."""
        dot = "." if self.golden.names("prefill.") else "_"
        if not self.golden.names(f"prefill{dot}"):
            return
        columns_KT = self._first_prompt()
        length = columns_KT.shape[1]
        hidden_TD, cache = self.replayer.prefill(columns_KT, length + 1)
        last_1D = hidden_TD[-1:]
        self._compare(f"prefill{dot}logits_all", self.model.slow.logits(hidden_TD))
        self._compare(f"prefill{dot}hidden_all", self.model.fast_hidden(hidden_TD))
        self._compare(f"prefill{dot}logits", self.model.slow.logits(last_1D))
        self._compare(f"prefill{dot}hidden_projected", self.model.fast_input(last_1D))
        for name in self.golden.names(f"prefill{dot}"):
            if match := re.fullmatch(r"prefill.([kv])_cache_(?:layer(\d+)|last)", name):
                layer = -1 if match[2] is None else int(match[2])
                half = cache.k_BGSd if match[1] == "k" else cache.v_BGSd
                self._compare(name, np.asarray(half[layer])[0, :, :length])
        if f"fast{dot}input_ids" in self.golden:
            codes_1K = jnp.asarray(self.golden.read(f"fast{dot}input_ids"), jnp.int32)[None]
            self._compare(f"fast{dot}logits", self.model.fast.forward(self.model.fast_input(last_1D), codes_1K)[0])
        if f"step{dot}column" in self.golden:
            x_B1D = self.model.slow.embed(self._columns(f"step{dot}column")[None], generation=True)
            hidden_B1D, _ = self.model.slow.extend(x_B1D, jnp.array([length], jnp.int32), cache)
            self._compare(f"step{dot}logits", self.model.slow.logits(hidden_B1D[0]))
            self._compare(f"step{dot}hidden_projected", self.model.fast_input(hidden_B1D[0]))
        self._bf16(columns_KT)

    def _bf16(self, columns_KT: np.ndarray) -> None:
        name = "bf16.prefill_logits"
        if name not in self.golden:
            return
        half = _as_bfloat16(self.model)
        hidden_TD, _ = Replayer(half).prefill(columns_KT)
        error = np.abs(np.asarray(half.slow.logits(hidden_TD[-1:]), np.float64) - self.golden.read(name))
        note = "loose: bfloat16"
        self.golden.check(f"{name} worst", error.max(), BF16_WORST, entries=[name], note=note)
        self.golden.check(f"{name} average", error.mean(), BF16_AVERAGE, entries=[name], note=note)

    def rope(self) -> None:
        """Rotary tables, exactly."""
        slow, fast = self.config.slow, self.config.fast
        if "rope.table" in self.golden:
            table = rope_table(self.config.max_seq_len, slow.head_dim, slow.rope_base)
            rows = self.golden.read("rope.rows") if "rope.rows" in self.golden else slice(None)
            self.golden.compare("rope.table", table[rows].astype(np.float32), 0)
        if "rope.fast_table" in self.golden:
            table = rope_table(self.config.num_codebooks, fast.head_dim, fast.rope_base)
            self.golden.compare("rope.fast_table", table.astype(np.float32), 0)

    def train(self) -> None:
        """Train forwards: of a padded batch, of its first sequence alone, or of a batch without padding."""
        if "train.inp" in self.golden:
            columns_BKT, labels_BKT = self._columns("train.inp"), self.golden.read("train.labels")
            mask_BT = self.golden.read("train.key_padding_mask") if "train.key_padding_mask" in self.golden else None
            self._train("train.", columns_BKT, labels_BKT, mask_BT)
            if self.golden.names("train_single."):
                length = columns_BKT.shape[2] if mask_BT is None else int((~mask_BT[0]).sum())
                self._train("train_single.", columns_BKT[:1, :, :length], labels_BKT[:1, :, :length], None)
        if "labels" in self.golden:
            self._train("", self._columns("inp"), self.golden.read("labels"), None)

    def _train(self, prefix: str, columns_BKT: jax.Array, labels_BKT: np.ndarray, mask_BT: np.ndarray | None) -> None:
        mask = None if mask_BT is None else jnp.asarray(mask_BT)
        hidden_BTD, logits_BTV = self._run(DualAR.train_logits, columns_BKT, mask)
        valid_BT = np.ones(columns_BKT[:, 0].shape, bool) if mask_BT is None else ~mask_BT
        valid_logits = np.asarray(logits_BTV)[valid_BT]
        self._compare(f"{prefix}token_logits_valid", valid_logits)
        name = f"{prefix}token_logits"
        if name in self.golden:
            batched = self.golden.read(name).ndim == 3
            self._compare(name, logits_BTV if batched else valid_logits)
        hidden_ND, codes_NK = select_frames(self.config, hidden_BTD, labels_BKT)
        self._compare(f"{prefix}codebook_logits", self._run(DualAR.fast_logits, hidden_ND, codes_NK))

    def probabilities(self) -> None:
        """Filtered probabilities of recorded logits, for each row of settings."""
        names = [name for name in self.golden.names("probs.") if name.endswith(".logits")]
        if not names:
            return
        rows = np.asarray(self.settings.read("probs_settings"), np.float64)
        knobs = sampling.Knobs(
            jnp.asarray(rows[:, 0], jnp.float32),
            jnp.asarray(rows[:, 1], jnp.float32),
            jnp.asarray(rows[:, 2], jnp.int32),
        )
        for name in names:
            logits_N = _restore_infinity(self.golden.read(name))
            logits_BN = jnp.asarray(np.repeat(logits_N[None], len(rows), axis=0))
            probs_BN = sampling.probabilities(logits_BN, knobs, reference=True)
            self.golden.compare(name.removesuffix("logits") + "probs", np.asarray(probs_BN), PROBABILITY_TOLERANCE)

    def _run(self, method: Callable[..., Any], *args: Any) -> Any:
        return _jitted(method, self._graph, self._state, *args)

    def _columns(self, name: str) -> jax.Array:
        return jnp.asarray(self.golden.read(name), jnp.int32)

    def _first_prompt(self) -> np.ndarray:
        if "prompt0" in self.golden:
            return np.asarray(self.golden.read("prompt0"), np.int32)
        return np.asarray(self.golden.read("inp")[0], np.int32)

    def _compare(self, name: str, actual: Any) -> None:
        if name in self.golden:
            self.golden.compare(name, np.asarray(actual), FLOAT_TOLERANCE)


@partial(jax.jit, static_argnums=(0, 1))
def _jitted(method: Callable[..., Any], graph: nnx.GraphDef, state: nnx.State, *args: Any) -> Any:
    return method(nnx.merge(graph, state), *args)


def _as_bfloat16(model: DualAR) -> DualAR:
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))


# --- recorded runs --------------------------------------------------------------------------------------------


def _compare_runs(folder: Path, root: Path, config: ModelConfig, golden: GoldenFile, settings: GoldenFile) -> None:
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


def _restore_infinity(logits: np.ndarray) -> np.ndarray:
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
