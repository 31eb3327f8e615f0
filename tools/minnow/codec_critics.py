"""The critics that the codec's decoder learns against, and the game: what they and the decoder minimise.

Five critics look at the waveform folded by a period (as in HiFi-GAN, a quarter as wide), nine at three bands of a
complex spectrogram of three windows (as in DAC, bins four at a time). All are plain functions of flat parameters.
Every convolution is a matmul over shifted copies: cuDNN would tune about four hundred small shapes first.
bfloat16 inside, verdicts and losses in float32. Knows nothing of the codec.
"""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np

from tools.minnow.codec_loss import complex_spectrum
from tools.minnow.training import Params

FRAMES = 16
"""Frames at the end of a crop that the critics look at: texture needs less of it than the mel does."""

_PERIODS = (2, 3, 5, 7, 11)
_WINDOWS = (512, 1024, 2048)
_BAND_EDGES = (0, 1 / 8, 3 / 8, 1)  # of the bins
# (taps along, taps across, stride along, channels out) of each layer; along is time / period, or frequency.
_PERIOD_LAYERS = ((5, 1, 3, 32), (5, 1, 3, 64), (5, 1, 3, 128), (5, 1, 3, 256), (3, 1, 1, 256), (3, 1, 1, 1))
_BAND_LAYERS = ((8, 3, 4, 32), (4, 3, 2, 32), (4, 3, 2, 64), (3, 3, 1, 64), (3, 3, 1, 1))
_LOUDNESS = 10.0  # the corpus has an RMS of 0.09

Seen = dict[str, list[jax.Array]]  # critic -> the output of each layer; the last is the verdict, near 1 for real sound


def _views(sound_BT: jax.Array) -> dict[str, jax.Array]:
    """What each critic looks at, (B, along, across, channels)."""
    views = {}
    for period in _PERIODS:
        padded = jnp.pad(_LOUDNESS * sound_BT, ((0, 0), (0, -sound_BT.shape[1] % period)))
        views[f"period{period}"] = padded.reshape(len(sound_BT), -1, period, 1)
    for window in _WINDOWS:
        bins_BTF = complex_spectrum(sound_BT, window)
        # The root of the magnitude, the phase kept: weak bands are seen as well as loud ones.
        size = jnp.sqrt(jnp.square(bins_BTF.real) + jnp.square(bins_BTF.imag) + 1e-6)
        parts = jnp.stack([bins_BTF.real, bins_BTF.imag], axis=-1) * jax.lax.rsqrt(size + 0.01)[..., None]
        parts = jnp.swapaxes(parts, 1, 2)
        for index, (low, high) in enumerate(pairwise(int(edge * parts.shape[1]) for edge in _BAND_EDGES)):
            views[f"window{window}.band{index}"] = parts[:, low:high]
    return views


def _layers(critic: str) -> tuple[tuple[int, int, int, int], ...]:
    return _PERIOD_LAYERS if critic.startswith("period") else _BAND_LAYERS


def init(seed: int) -> dict[str, np.ndarray]:
    """Random critics, float32: `period2.0.weight` (along, across, in, out), `period2.0.bias`, ..."""
    rng, params = np.random.default_rng(seed), {}
    views = jax.eval_shape(_views, jax.ShapeDtypeStruct((1, 4096), jnp.float32))
    for critic, view in views.items():
        channels = view.shape[-1]
        for index, (along, across, _, out) in enumerate(_layers(critic)):
            weight = rng.standard_normal((along, across, channels, out), np.float32)
            params[f"{critic}.{index}.weight"] = weight * np.float32((2 / (along * across * channels)) ** 0.5)
            params[f"{critic}.{index}.bias"] = np.zeros(out, np.float32)
            channels = out
    return params


def _convolve(x_BLAC: jax.Array, weight: jax.Array, stride: int) -> jax.Array:
    """(B, along, across, in) -> (B, along / stride, across, out), as one matmul."""
    along, across = weight.shape[:2]
    width = x_BLAC.shape[2]
    x_BLAC = jnp.pad(x_BLAC, ((0, 0), ((along - 1) // 2, along // 2), (across // 2, across // 2), (0, 0)))
    last = x_BLAC.shape[1] - along + 1
    copies = [x_BLAC[:, i : i + last : stride, j : j + width] for i in range(along) for j in range(across)]
    return jnp.concatenate(copies, axis=-1) @ weight.reshape(-1, weight.shape[-1])


def look(params: Params, sound_BT: jax.Array) -> Seen:
    """All critics on sounds in -1..1; samples a multiple of 512, at least 2,048."""
    seen: Seen = {}
    for critic, view in _views(sound_BT).items():
        x, outputs, layers = view.astype(jnp.bfloat16), [], _layers(critic)
        for index, (_, _, stride, _) in enumerate(layers):
            weight, bias = (params[f"{critic}.{index}.{part}"].astype(jnp.bfloat16) for part in ("weight", "bias"))
            x = _convolve(x, weight, stride) + bias
            if index < len(layers) - 1:
                x = jax.nn.leaky_relu(x, 0.1)
            outputs.append(x)
        seen[critic] = outputs
    return seen


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    made, wanted = jnp.split(x.astype(jnp.float32), 2)
    return made, wanted


def critics_loss(seen: Seen) -> jax.Array:
    """Least squares, mean over the critics: 1 for wanted sound, 0 for made. Rows of `seen`: made, then wanted."""
    total = jnp.zeros(())
    for outputs in seen.values():
        made, wanted = _halves(outputs[-1])
        total += jnp.mean(jnp.square(made)) + jnp.mean(jnp.square(wanted - 1))
    return total / len(seen)


def decoder_loss(seen: Seen) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`fooling`: verdicts on made sound should be 1. `matching`: L1 of layers' outputs, relative to wanted sound's."""
    fooling = matching = jnp.zeros(())
    for outputs in seen.values():
        fooling += jnp.mean(jnp.square(_halves(outputs[-1])[0] - 1)) / len(seen)
        for output in outputs[:-1]:
            made, wanted = _halves(output)
            wanted = jax.lax.stop_gradient(wanted)
            distance = jnp.mean(jnp.abs(made - wanted)) / jnp.mean(jnp.abs(wanted))
            matching += distance / (len(outputs) - 1) / len(seen)
    return fooling + 2 * matching, {"fooling": fooling, "matching": matching}


def play(params: Params, made_BT: jax.Array, wanted_BT: jax.Array) -> tuple[Params, jax.Array, dict[str, jax.Array]]:
    """One look for both sides: (gradients of the critics, gradient by `made_BT`, the parts for the log)."""
    seen, pull = jax.vjp(lambda params, made: look(params, jnp.concatenate([made, wanted_BT])), params, made_BT)
    loss, by_critics = jax.value_and_grad(critics_loss)(seen)
    (_, parts), by_decoder = jax.value_and_grad(decoder_loss, has_aux=True)(seen)
    return pull(by_critics)[0], pull(by_decoder)[1], {"critics": loss, **parts}
