"""Latents to sound by way of spectra: ConvNeXt blocks at the encoder's rate, then an inverse STFT.

The other kind of decoder (`"decoder": "spectral"` in the codec's config), after Vocos (Siuzdak 2023): no layer runs
faster than the latents, a step makes `hop_length` samples at once.

    latents (B, T, C) -> blocks -> log magnitude and phase -> spectra -> windows of two hops, added -> sound

The window of step t covers hops t and t + 1, so that nothing is waited for: the sound of a hop is the first half of its
own window and the second half of the one before.
"""

from __future__ import annotations

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.codec.layers import CausalConv, ConvNeXt, LayerNorm, Tail, chain_silence, run_chain
from fishjax.config import CodecConfig
from fishjax.model.layers import Linear
from pallas_kernels.causal_conv.reference import convolve

_EXPANSION = 2  # of the blocks' hidden width
_LOUDEST = math.exp(5) / 256  # 0.58 of a hop, the largest magnitude; a full-scale tone in two hops' window has 0.64


class SpectralDecoder(nnx.Module):
    """(B, T, latent_dim) -> (B, T * hop_length, 1) float32 in -1..1; `decoder_layers` blocks of `decoder_dim`."""

    def __init__(self, config: CodecConfig, *, dtype=jnp.float32, rngs: nnx.Rngs):
        dim, make = config.decoder_dim, {"dtype": dtype, "rngs": rngs}
        self.hop_length = config.hop_length
        self.embed = CausalConv(config.latent_dim, dim, 3, **make)
        self.norm = LayerNorm(dim, 1e-6, dtype=dtype)
        self.blocks = nnx.List([ConvNeXt(dim, expansion=_EXPANSION, **make) for _ in range(config.decoder_layers)])
        self.last_norm = LayerNorm(dim, 1e-6, dtype=dtype)
        self.head = Linear(dim, 2 * (config.hop_length + 1), use_bias=True, **make)

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        """A whole signal."""
        return self.stream(x_BTC, None)[0]

    def silence(self, batch: int, dtype) -> Tail:
        """The tail before any signal: past inputs of the convolutions, and the spectrum of the step before."""
        spectrum_B1F = jnp.zeros((batch, 1, 2 * (self.hop_length + 1)), dtype)
        return self.embed.silence(batch, dtype), chain_silence(self.blocks, batch, dtype), spectrum_B1F

    def stream(self, x_BTC: jax.Array, tail: Tail) -> tuple[jax.Array, Tail]:
        """The next piece, of any length."""
        embed, blocks, past_B1F = self.silence(x_BTC.shape[0], x_BTC.dtype) if tail is None else tail
        x_BTC, embed = self.embed.stream(x_BTC, embed)
        x_BTC, blocks = run_chain(self.blocks, self.norm(x_BTC), blocks)
        spectrum_BTF = _spectrum(self.head(self.last_norm(x_BTC)))
        y_BTC = inverse_stft(past_B1F, spectrum_BTF, self.hop_length)
        audio_BT1 = jnp.clip(y_BTC.reshape(y_BTC.shape[0], -1, 1), -1, 1)
        return audio_BT1, (embed, blocks, spectrum_BTF[:, -1:])


def _spectrum(x_BTF: jax.Array) -> jax.Array:
    """Log magnitudes and phases side by side to real and imaginary parts side by side; the type is kept.

    Kept so that a spectrum that waits in the tail is the one that the whole signal sees.
    """
    log_magnitude, phase = jnp.split(x_BTF.astype(jnp.float32), 2, axis=-1)
    hop = log_magnitude.shape[-1] - 1
    magnitude = jnp.exp(jnp.minimum(log_magnitude, math.log(_LOUDEST * hop)))
    return jnp.concatenate([magnitude * jnp.cos(phase), magnitude * jnp.sin(phase)], axis=-1).astype(x_BTF.dtype)


def inverse_stft(past_B1F: jax.Array, spectrum_BTF: jax.Array, hop: int) -> jax.Array:
    """Spectra behind the one before them to samples: (B, T, 2 * (hop + 1)) -> (B, T, hop) float32.

    The transform, its window and the overlap-add are one linear map of two steps: a convolution of two taps, which a
    GPU runs as one matmul. (An FFT there is a library's call, which cannot be part of a captured graph.)
    """
    kernel_kFS = jnp.asarray(_kernel(hop))
    return convolve(past_B1F.astype(jnp.float32), spectrum_BTF.astype(jnp.float32), kernel_kFS)


@cache
def _kernel(hop: int) -> np.ndarray:
    """(2, 2 * (hop + 1), hop): what the step before and the step itself add to a hop's samples.

    Rows are the real, then the imaginary parts of the bins of 2 * hop samples. The window is a half sine: of two that
    overlap by a half the squares add up to one, so that nothing is divided out.
    """
    size = 2 * hop
    sample, bins = np.arange(size), np.arange(hop + 1)
    angle = 2 * np.pi * np.outer(bins, sample) / size
    twice = np.where((bins == 0) | (bins == hop), 1, 2)[:, None] / size  # all but the ends stand for two bins
    rows = np.concatenate([twice * np.cos(angle), -twice * np.sin(angle)]) * np.sin(np.pi * (sample + 0.5) / size)
    return np.stack([rows[:, hop:], rows[:, :hop]]).astype(np.float32)
