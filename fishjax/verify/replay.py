"""Reference mode of one utterance: frame by frame with the full head, every detail of the original's loop.

Place in the flow: `verify.dualar_runs` compares what this returns with recorded runs. The engine does not use it.
The loop keeps the original's habits: the first frame may be the end of speech without stopping anything and
never enters the repetition window; a second draw is made on every frame; the token after the last frame is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.engine import sampling
from fishjax.engine.sampling import Knobs
from fishjax.errors import WeightsError
from fishjax.model.cache import KVCache, init_cache
from fishjax.model.dual_ar import DualAR, candidate_ids

_BUCKET = 64


@dataclass(frozen=True, slots=True)
class RunSettings:
    """How one recorded run was sampled."""

    im_end_id: int
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    ras_window: int = sampling.RAS_WINDOW
    ras_temperature: float = sampling.RAS_TEMPERATURE
    ras_top_p: float = sampling.RAS_TOP_P
    use_ras: bool = True

    def knobs(self) -> Knobs:
        """Knobs of the normal draw, one row."""
        return _knobs(self.temperature, self.top_p, self.top_k)

    def high_knobs(self) -> Knobs:
        """Knobs of the second draw, one row."""
        return _knobs(self.ras_temperature, self.ras_top_p, self.top_k)


@dataclass(slots=True)
class Run:
    """What a replay produced: `seq` (C+1, T + frames), the logits of each frame, and what RAS did."""

    seq: np.ndarray
    num_prompt_columns: int
    slow_logits: np.ndarray
    fast_logits: np.ndarray
    ras_fired_at: list[int] = field(default_factory=list)
    ras_changed_at: list[int] = field(default_factory=list)

    @property
    def num_frames(self) -> int:
        """Columns generated, the last one included."""
        return self.seq.shape[1] - self.num_prompt_columns

    @property
    def codes(self) -> np.ndarray:
        """Codes (C, frames - 1): the last generated column is dropped, as the original does."""
        return self.seq[1:, self.num_prompt_columns : -1]


class Replayer:
    """A model, split once, driven by two jitted programs: prefill of a prompt, and one frame."""

    def __init__(self, model: DualAR):
        self.config = model.config
        self._graph, self._state = nnx.split(model)

    def prefill(self, columns_KT: np.ndarray, max_len: int | None = None) -> tuple[jax.Array, KVCache]:
        """Columns (C+1, T) -> (hidden_TD pre-norm of all positions, cache of one slot)."""
        length = columns_KT.shape[1]
        padded = np.zeros((columns_KT.shape[0], _round_up(length)), np.int32)
        padded[:, :length] = columns_KT
        max_len = _round_up(max(max_len or 0, length))
        hidden_TD, cache = _prefill(self._graph, max_len, self._state, padded)
        return hidden_TD[:length], cache

    def generate(
        self,
        prompt_KT: np.ndarray,
        settings: RunSettings,
        *,
        slow_uniform: np.ndarray | None = None,
        fast_uniform: np.ndarray | None = None,
    ) -> Run:
        """Replay a run from its prompt (C+1, T).

        `slow_uniform` (frames, 2, V) and `fast_uniform` (frames, C-1, K) are the recorded uniforms; without them
        the run must be greedy. Raises WeightsError when it is not, or when the prompt leaves no room.
        """
        config = self.config
        prompt_KT = np.asarray(prompt_KT, np.int32)
        start = prompt_KT.shape[1]
        if start >= config.max_seq_len:
            raise WeightsError(f"a prompt of {start} columns does not fit max_seq_len {config.max_seq_len}")
        recorded = slow_uniform is not None and fast_uniform is not None
        if not recorded and settings.top_k != 1:
            raise WeightsError(f"a run with top_k {settings.top_k} needs recorded uniforms")
        limit = config.max_seq_len - start
        limit = min(settings.max_new_tokens or limit, limit)
        if slow_uniform is not None and fast_uniform is not None:
            limit = min(limit, len(slow_uniform), len(fast_uniform))

        hidden_TD, cache = self.prefill(prompt_KT, start + limit)
        hidden_D = hidden_TD[-1]
        bias_V = np.full(config.vocab_size, -np.inf, np.float32)
        bias_V[candidate_ids(config, settings.im_end_id)] = 0.0
        # A lone survivor wins against any uniform.
        slow_u = np.full((2, config.vocab_size), 0.5, np.float32)
        fast_u = np.full((config.num_codebooks - 1, config.codebook_size), 0.5, np.float32)
        window = np.zeros(settings.ras_window, np.int32)
        knobs, high_knobs = settings.knobs(), settings.high_knobs()
        columns, slow_logits, fast_logits, fired, changed = [prompt_KT], [], [], [], []
        for frame in range(limit):
            if slow_uniform is not None and fast_uniform is not None:
                slow_u, fast_u = slow_uniform[frame], fast_uniform[frame]
            first = frame == 0
            ras_window = np.full_like(window, -1) if first or not settings.use_ras else window
            position = np.array([start + frame], np.int32)
            out, hidden_D, cache = _frame(
                self._graph,
                self._state,
                hidden_D,
                cache,
                position,
                knobs,
                high_knobs,
                bias_V,
                ras_window,
                slow_u,
                fast_u,
            )
            out = jax.device_get(out)
            columns.append(out["column_K1"])
            slow_logits.append(out["slow_logits"])
            fast_logits.append(out["fast_logits"])
            if out["fired"]:
                fired.append(frame)
            if out["changed"]:
                changed.append(frame)
            token = int(out["column_K1"][0, 0])
            if not first:
                window = np.append(window[1:], np.int32(token))
                if token == settings.im_end_id:
                    break
        return Run(
            seq=np.concatenate(columns, axis=1),
            num_prompt_columns=start,
            slow_logits=np.stack(slow_logits),
            fast_logits=np.stack(fast_logits),
            ras_fired_at=fired,
            ras_changed_at=changed,
        )


@partial(jax.jit, static_argnums=(0, 1))
def _prefill(graph: nnx.GraphDef, max_len: int, state: nnx.State, columns_KT: jax.Array):
    """Columns (C+1, T) into a new cache of one slot -> (hidden_TD, cache)."""
    model: DualAR = nnx.merge(graph, state)
    cache = init_cache(model.config, 1, max_len, model.slow.norm.weight[...].dtype)
    x_BTD = model.slow.embed(columns_KT[None], generation=True)
    hidden_BTD, cache = model.slow.extend(x_BTD, jnp.zeros(1, jnp.int32), cache)
    return hidden_BTD[0], cache


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def _frame(
    graph: nnx.GraphDef,
    state: nnx.State,
    hidden_D: jax.Array,
    cache: KVCache,
    position_B: jax.Array,
    knobs: Knobs,
    high_knobs: Knobs,
    bias_V: jax.Array,
    window_W: jax.Array,
    slow_u_2V: jax.Array,
    fast_u_KN: jax.Array,
) -> tuple[dict[str, Any], jax.Array, KVCache]:
    """Sample the frame that `hidden_D` predicts and read it into the cache at its position."""
    model: DualAR = nnx.merge(graph, state)
    config = model.config
    logits_BV = model.slow.logits(hidden_D[None]) + bias_V
    normal_B, high_B = (
        sampling.draw(sampling.probabilities(logits_BV, k, reference=True), u[None])
        for k, u in ((knobs, slow_u_2V[0]), (high_knobs, slow_u_2V[1]))
    )
    is_semantic_B = (normal_B >= config.semantic_begin_id) & (normal_B <= config.semantic_end_id)
    fired = jnp.any(window_W == normal_B[0]) & is_semantic_B[0]
    token_B = sampling.repetition_aware(normal_B, high_B, window_W[None], is_semantic_B)
    fast_logits = []

    def pick(codebook: int, logits_BN: jax.Array) -> jax.Array:
        fast_logits.append(logits_BN[0])
        probs_BN = sampling.probabilities(logits_BN, knobs, reference=True)
        return sampling.draw(probs_BN, fast_u_KN[codebook - 1][None])

    codes_BK = model.fast.frame(model.fast_input(hidden_D[None]), model.semantic_code(token_B), pick)
    column_BK1 = jnp.concatenate([token_B[:, None], codes_BK], axis=1)[:, :, None]
    hidden_B1D, cache = model.slow.extend(model.slow.embed(column_BK1, generation=True), position_B, cache)
    out = {
        "column_K1": column_BK1[0],
        "slow_logits": logits_BV[0],
        "fast_logits": jnp.stack(fast_logits),
        "fired": fired,
        "changed": fired & (token_B[0] != normal_B[0]),
    }
    return out, hidden_B1D[0, 0], cache


def _knobs(temperature: float, top_p: float, top_k: int) -> Knobs:
    return Knobs(jnp.full(1, temperature, jnp.float32), jnp.full(1, top_p, jnp.float32), jnp.full(1, top_k, jnp.int32))


def _round_up(length: int) -> int:
    return -(-length // _BUCKET) * _BUCKET
