"""The codec's training steps as jitted programs: all of it, or the decoder side alone with the codes as they are.

The corpus is a dict of row arrays on the device, a row a frame: `audio_RS` int16 and, for the decoder side, `codes_RK`
int16. The first `num_rows` rows are filled. A program makes several steps a call and shows the mean of their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fishjax.config import CodecConfig
from tools.minnow import codec_critics, codec_loss, training

Corpus = dict[str, jax.Array]
State = dict[str, Any]

_AVERAGE = 0.999  # of the decoder's averaged weights, a step; less in the first thousands, to forget where it began


def _several(step: Callable, steps: int):
    """The jitted `steps` times `step`: (state, corpus, *controls) -> (state, mean parts)."""

    def many(state: State, corpus: Corpus, *controls):
        state, shown = jax.lax.scan(lambda state, _: step(state, corpus, *controls), state, None, length=steps)
        return state, jax.tree.map(jnp.mean, shown)

    return jax.jit(many, donate_argnums=0)


def _crops(corpus: Corpus, key: jax.Array, num_rows: jax.Array, batch: int, frames: int) -> Corpus:
    """(batch, frames, ...) of each array, the same places in all."""
    first_B = jax.random.randint(key, (batch,), 0, num_rows - frames)
    return {
        name: jax.vmap(lambda first, rows=rows: jax.lax.dynamic_slice_in_dim(rows, first, frames))(first_B)
        for name, rows in corpus.items()
    }


def _sound(audio_BTS: jax.Array) -> jax.Array:
    return audio_BTS.reshape(len(audio_BTS), -1).astype(jnp.float32) / 32768


def make_steps(model: training.Model, optimiser, config: CodecConfig, batch: int, frames: int, steps: int):
    """All of the codec. Controls: num_rows, rate, quantise, refresh. State: params, opt, use_KN, key."""

    def step(state: State, corpus: Corpus, num_rows, rate, quantise, refresh):
        key, crop_key, gain_key, book_key, seed_key = jax.random.split(state["key"], 5)
        sound_BT = _sound(_crops(corpus, crop_key, num_rows, batch, frames)["audio_RS"])
        gain_key, which_key = jax.random.split(gain_key)
        gains = jax.random.uniform(gain_key, (batch, 1), minval=0.4, maxval=1.2)
        gains = jnp.where(jax.random.uniform(which_key, (batch, 1)) < 0.6, 1.0, gains)
        wanted_BT = jnp.clip(sound_BT * gains, -1, 1)

        def objective(params):
            codec = model.build(codec_loss.cast_for_compute(params))
            return codec_loss.loss(codec, wanted_BT, book_key, quantise, config.sample_rate_hz)

        grads, parts = jax.grad(objective, has_aux=True)(state["params"])
        updates, opt = optimiser.update(grads, state["opt"], state["params"])
        params = training.apply(state["params"], updates, rate)
        params, use_KN = codec_loss.refresh_books(params, state["use_KN"], parts, seed_key, refresh)
        shown = {name: part for name, part in parts.items() if part.ndim == 0}
        shown["least_used_book"] = jnp.min(jnp.mean(use_KN > 0.02, axis=1))
        return {"params": params, "opt": opt, "use_KN": use_KN, "key": key}, shown

    return _several(step, steps)


def decoder_side(params: training.Params) -> training.Params:
    """The parameters that make sound of codes and have no part in making the codes."""
    sides = ("decoder.", "quantizer.post_module.", "quantizer.upsample.")
    return {name: value for name, value in params.items() if name.startswith(sides)}


def decoder_state(params: training.Params, optimiser, seed: int, *, adversarial: bool) -> State:
    """What `make_decoder_steps` starts from; `average` is the moving mean of the trained parameters."""
    trained, start = decoder_side(params), jax.jit(optimiser.init)
    state = {"params": params, "average": trained, "opt": start(trained), "key": jax.random.key(seed)}
    state["averaged"] = jnp.zeros(())  # steps
    if adversarial:
        critics = codec_critics.init(seed)
        state |= {"critics": critics, "critics_opt": start(critics)}
    return jax.tree.map(jnp.array, state)  # its own buffers: they are donated


def make_decoder_steps(model: training.Model, optimiser, config: CodecConfig, batch: int, frames: int, steps: int):
    """The decoder side alone. Controls: num_rows, rate, critics_rate, critics_weight (in what the decoder minimises).

    Critics play if the state has them, and learn from the same look as the decoder does.
    """
    looked_at = codec_critics.FRAMES * config.samples_per_frame
    # The codes do not say where in its cycle a voice is. Shorter windows than these see that: the teacher's own sound,
    # shifted by 50 samples, is further off in them (log10-mel L1 0.12 to 0.15) than what a decoder makes of codes.
    shortest = 256 if config.decoder == "spectral" else 0

    def step(state: State, corpus: Corpus, num_rows, rate, critics_rate, critics_weight):
        key, crop_key = jax.random.split(state["key"])
        crops = _crops(corpus, crop_key, num_rows, batch, frames)
        wanted_BT, codes_BKT = _sound(crops["audio_RS"]), jnp.swapaxes(crops["codes_RK"], 1, 2).astype(jnp.int32)
        trained = decoder_side(state["params"])

        def speak(trained):
            codec = model.build(codec_loss.cast_for_compute({**state["params"], **trained}))
            return codec_loss.speak(codec, codes_BKT)

        def spectral(made_BT):
            parts = codec_loss.spectral_losses(made_BT, wanted_BT, config.sample_rate_hz, shortest)
            total = 15 / 7 * parts["mel"] + parts["stft"]
            return total, {**parts, "loss": total}

        made_BT, pull = jax.vjp(speak, trained)
        by_made_BT, shown = jax.grad(spectral, has_aux=True)(made_BT)
        shown["energy"] = jnp.sum(jnp.square(made_BT)) / jnp.sum(jnp.square(wanted_BT))
        moved: State = {"key": key, "averaged": state["averaged"] + 1}
        if "critics" in state:
            grads, by_end_BT, parts = codec_critics.play(
                state["critics"], made_BT[:, -looked_at:], wanted_BT[:, -looked_at:]
            )
            # How hard the critics push at a sample that they look at, against the spectra.
            parts["push"] = jnp.linalg.norm(by_end_BT) / jnp.linalg.norm(by_made_BT[:, -looked_at:])
            shown |= parts
            by_made_BT = by_made_BT.at[:, -looked_at:].add(critics_weight * by_end_BT)
            updates, moved["critics_opt"] = optimiser.update(grads, state["critics_opt"], state["critics"])
            moved["critics"] = training.apply(state["critics"], updates, critics_rate)
        updates, moved["opt"] = optimiser.update(pull(by_made_BT)[0], state["opt"], trained)
        trained = training.apply(trained, updates, rate)
        moved["params"] = {**state["params"], **trained}
        share = jnp.maximum(1 - _AVERAGE, 9 / (10 + state["averaged"]))
        moved["average"] = jax.tree.map(lambda a, p: a + share * (p - a), state["average"], trained)
        return moved, shown

    return _several(step, steps)
