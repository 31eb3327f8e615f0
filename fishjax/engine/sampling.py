"""From logits to tokens: top-p and top-k judged at temperature 1, exponential race, repetition-aware second draw.

Pure functions, batched over slots, each slot with its own knobs and its own random numbers: a uniform belongs
to (seed, frame, codebook, candidate), never to the batch or the slot, so neighbours cannot change a draw.

Two modes. The engine uses the *fixed* one: float32 throughout, a lone survivor always wins, top_p = 1 keeps the
tail. `probabilities(..., reference=True)` and `draw` are the *reference* one, formula by formula, for `verify`.

Here a candidate is a column of the logits. For the slow head that the engine slices, the last column is the end
of speech and all others are semantic codes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from pallas_kernels import Draws

RAS_WINDOW = 10
"""Frames that the repetition-aware draw looks back on."""
RAS_TEMPERATURE = 1.0
RAS_TOP_P = 0.9
TOP_K_CAP = 64
"""Up to this top_k a partial ordering is enough; beyond it everything is sorted, with the same result."""

_MIN_TEMPERATURE = 1e-5
_SEMANTIC = 0  # the codebook number that keys the normal draw of a frame's token; codes use 1 .. C-1
_HIGH_DRAW = 1 << 16  # and that of its second, high draw: above every codebook

# ids_BJ of candidates -> their uniforms u_BJ in [0, 1)
UniformFn = Callable[[jax.Array], jax.Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Knobs:
    """Per slot: temperature float32, top_p float32, top_k int32, each (B,).

    `short`, which shapes the program: every top_k that counts is at most TOP_K_CAP. The host knows it; asking the
    device would stop the host in every draw.
    """

    temperature_B: jax.Array
    top_p_B: jax.Array
    top_k_B: jax.Array
    short: bool = field(default=False, metadata={"static": True})

    def high(self) -> Knobs:
        """The knobs of the second draw: fixed temperature and top_p, the request's own top_k."""
        return replace(
            self,
            temperature_B=jnp.full_like(self.temperature_B, RAS_TEMPERATURE),
            top_p_B=jnp.full_like(self.top_p_B, RAS_TOP_P),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ranking:
    """The best J candidates of each slot, best first (equal logits: lower id first)."""

    ids_BJ: jax.Array  # int32
    logits_BJ: jax.Array  # float32
    cumulative_BJ: jax.Array  # float32: probability of this one and all better ones, at temperature 1


def rank(logits_BN: jax.Array, num: int) -> Ranking:
    """Order the best `num` candidates. A slot's first entries are the same bits for every `num`."""
    logits_BN = logits_BN.astype(jnp.float32) + 0.0  # -0.0 and 0.0 are equal: make them one
    # The barrier keeps XLA from folding later slices into the partial sort, which would make it a full one.
    sorted_BJ, ids_BJ = jax.lax.optimization_barrier(jax.lax.top_k(logits_BN, num))
    probs_BJ = jnp.exp(sorted_BJ - jax.nn.logsumexp(logits_BN, axis=-1, keepdims=True))
    # A cumulative sum's rounding depends on its length, so the first TOP_K_CAP entries are always summed alone.
    cumulative_BJ = jnp.cumsum(probs_BJ[:, :TOP_K_CAP], axis=-1)
    if num > TOP_K_CAP:
        tail_BJ = cumulative_BJ[:, -1:] + jnp.cumsum(probs_BJ[:, TOP_K_CAP:], axis=-1)
        cumulative_BJ = jnp.concatenate([cumulative_BJ, tail_BJ], axis=-1)
    return Ranking(ids_BJ.astype(jnp.int32), sorted_BJ, cumulative_BJ)


def survivors(ranking: Ranking, knobs: Knobs, *, reference: bool = False) -> jax.Array:
    """Which ranked candidates may be drawn: keep_BJ bool. The entry that crosses top_p is dropped, the best never.

    In reference mode top_p = 1 too loses the tail where the rounded sum exceeds 1.
    """
    top_p_B1 = knobs.top_p_B[:, None]
    position_J = jnp.arange(ranking.ids_BJ.shape[1])
    over_BJ = ranking.cumulative_BJ > top_p_B1
    if not reference:
        over_BJ = over_BJ & (top_p_B1 < 1.0)
    return (~over_BJ & (position_J < knobs.top_k_B[:, None])) | (position_J == 0)


def race(ranking: Ranking, knobs: Knobs, uniform_of: UniformFn) -> jax.Array:
    """Draw one surviving candidate per slot, id_B int32.

    argmax(p / -log u) in logarithms, which needs no normalisation. A lone survivor wins whatever its u is.
    """
    temperature_B1 = jnp.maximum(knobs.temperature_B, _MIN_TEMPERATURE)[:, None]
    log_p_BJ = (ranking.logits_BJ - ranking.logits_BJ[:, :1]) / temperature_B1
    scores_BJ = log_p_BJ - jnp.log(-jnp.log(uniform_of(ranking.ids_BJ)))
    # If every score is -inf (u exactly 0), argmax gives rank 0: the best candidate.
    winner_B = jnp.argmax(jnp.where(survivors(ranking, knobs), scores_BJ, -jnp.inf), axis=-1)
    return jnp.take_along_axis(ranking.ids_BJ, winner_B[:, None], axis=-1)[:, 0]


def repetition_aware(
    normal_B: jax.Array, high_B: jax.Array, window_BW: jax.Array, is_semantic_B: jax.Array
) -> jax.Array:
    """The high draw where the normal one is semantic and occurred in the window; it is not checked again."""
    repeats_B = is_semantic_B & jnp.any(window_BW == normal_B[:, None], axis=-1)
    return jnp.where(repeats_B, high_B, normal_B)


def sample_semantic(
    logits_BN: jax.Array, window_BW: jax.Array, knobs: Knobs, seed_B: jax.Array, frame_B: jax.Array
) -> jax.Array:
    """A frame's token from the sliced head's logits: candidate_B int32, N - 1 being the end of speech.

    `window_BW` holds the candidates of the latest frames, negative where there was none.
    """
    normal_key_B, high_key_B = (draw_keys(seed_B, frame_B, number) for number in (_SEMANTIC, _HIGH_DRAW))
    ranking = _ranking(logits_BN, knobs)
    normal_B = race(ranking, knobs, keyed(normal_key_B))
    high_B = race(ranking, knobs.high(), keyed(high_key_B))
    return repetition_aware(normal_B, high_B, window_BW, normal_B < logits_BN.shape[1] - 1)


def sample_code(logits_BN: jax.Array, knobs: Knobs, seed_B: jax.Array, frame_B: jax.Array, codebook: int) -> jax.Array:
    """Code `codebook` (1 .. C-1) of a frame from the fast head's logits: code_B int32."""
    keys_B = draw_keys(seed_B, frame_B, codebook)
    return race(_ranking(logits_BN, knobs), knobs, keyed(keys_B))


def frame_draws(knobs: Knobs, seed_B: jax.Array, frame_B: jax.Array, num_codebooks: int, codebook_size: int) -> Draws:
    """The draws of codes 1 .. C-1 as `fast_frame` makes them: the same race, its random numbers made beforehand.

    For slots whose top_k is at most TOP_K_CAP; others get draws that nobody wants.
    """
    ids_BN = jnp.broadcast_to(jnp.arange(codebook_size), (len(seed_B), codebook_size))
    uniforms = [keyed(draw_keys(seed_B, frame_B, codebook))(ids_BN) for codebook in range(1, num_codebooks)]
    return Draws(
        temperature_B=jnp.maximum(knobs.temperature_B, _MIN_TEMPERATURE),
        top_p_B=knobs.top_p_B,
        top_k_B=jnp.minimum(knobs.top_k_B, TOP_K_CAP),
        gumbel_CBN=-jnp.log(-jnp.log(jnp.stack(uniforms))),
    )


def draw_keys(seed_B: jax.Array, frame_B: jax.Array, number: int) -> jax.Array:
    """One random key per slot for draw `number` of its frame; `seed_B` uint32, `frame_B` int32."""

    def one(seed: jax.Array, frame: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), frame), number)

    return jax.vmap(one)(seed_B, frame_B)


def keyed(keys_B: jax.Array) -> UniformFn:
    """Uniforms of candidates under per-slot keys: each depends on (key, id) alone, so few are ever computed."""
    one_key = jax.vmap(lambda key, id_: jax.random.uniform(jax.random.fold_in(key, id_)), in_axes=(None, 0))
    return lambda ids_BJ: jax.vmap(one_key)(keys_B, ids_BJ)


def recorded(uniform_BN: jax.Array) -> UniformFn:
    """Uniforms given for every candidate."""
    return lambda ids_BJ: jnp.take_along_axis(uniform_BN, ids_BJ, axis=-1)


def probabilities(logits_BN: jax.Array, knobs: Knobs, *, reference: bool = False) -> jax.Array:
    """Probabilities after top-p, top-k and temperature, (B, N) float32 in the order of the logits."""
    ranking = rank(logits_BN, logits_BN.shape[1])
    temperature_B1 = jnp.maximum(knobs.temperature_B, _MIN_TEMPERATURE)[:, None]
    keep_BJ = survivors(ranking, knobs, reference=reference)
    probs_BJ = jax.nn.softmax(jnp.where(keep_BJ, ranking.logits_BJ / temperature_B1, -jnp.inf), axis=-1)
    slots_B1 = jnp.arange(logits_BN.shape[0])[:, None]
    return jnp.zeros(logits_BN.shape, jnp.float32).at[slots_B1, ranking.ids_BJ].set(probs_BJ)


def draw(probs_BN: jax.Array, uniform_BN: jax.Array) -> jax.Array:
    """The reference's race over all entries: argmax(p / -log u), id_B int32."""
    return jnp.argmax(probs_BN / -jnp.log(uniform_BN), axis=-1).astype(jnp.int32)


def _ranking(logits_BN: jax.Array, knobs: Knobs) -> Ranking:
    """The short ranking when every top_k allows, else the whole one: the same draws."""
    num_candidates = logits_BN.shape[1]
    return rank(logits_BN, min(num_candidates, TOP_K_CAP) if knobs.short else num_candidates)
