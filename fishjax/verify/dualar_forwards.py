"""Recorded forwards of a DualAR model, computed anew: logits, caches, rotary tables, training passes, probabilities.

The entries of one `expected.safetensors` but for its runs, which `dualar_runs` replays.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.config import ModelConfig
from fishjax.engine import sampling
from fishjax.model.dual_ar import DualAR, select_frames
from fishjax.model.layers import rope_table
from fishjax.verify.compiled import compiled
from fishjax.verify.dualar_runs import restore_infinity
from fishjax.verify.replay import Replayer
from fishjax.verify.report import FLOAT_TOLERANCE, GoldenFile, difference

PROBABILITY_TOLERANCE = 2e-5
# The bfloat16 model is another rounding of the same numbers: a loose check, worst and average difference.
BF16_WORST, BF16_AVERAGE = 0.5, 0.1


class Forwards:
    """All entries but the runs. Each method looks for its entries and does nothing when there are none."""

    def __init__(self, config: ModelConfig, model: DualAR, golden: GoldenFile, settings: GoldenFile):
        self.config, self.model, self.golden, self.settings = config, model, golden, settings
        self.replayer = Replayer(model)

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
            logits_N = restore_infinity(self.golden.read(name))
            logits_BN = jnp.asarray(np.repeat(logits_N[None], len(rows), axis=0))
            probs_BN = sampling.probabilities(logits_BN, knobs, reference=True)
            self.golden.compare(name.removesuffix("logits") + "probs", np.asarray(probs_BN), PROBABILITY_TOLERANCE)

    def _run(self, method: Callable[..., Any], *args: Any) -> Any:
        return compiled(method, self.model)(*args)

    def _columns(self, name: str) -> jax.Array:
        return jnp.asarray(self.golden.read(name), jnp.int32)

    def _first_prompt(self) -> np.ndarray:
        if "prompt0" in self.golden:
            return np.asarray(self.golden.read("prompt0"), np.int32)
        return np.asarray(self.golden.read("inp")[0], np.int32)

    def _compare(self, name: str, actual: Any) -> None:
        if name in self.golden:
            self.golden.compare(name, np.asarray(actual), FLOAT_TOLERANCE)


def _as_bfloat16(model: DualAR) -> DualAR:
    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state))
