"""The codec's training pass: quantiser with straight-through gradients, and spectral losses in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from fishjax.bench.gate.judge import mel_filters
from fishjax.codec import Codec

_SCALES = ((32, 5), (64, 10), (128, 20), (256, 40), (512, 80), (1024, 160), (2048, 320))  # window, mel bands
_LINEAR_SCALES = (512, 1024, 2048)
_MIN_USE = 0.1  # mean uses a step below which an entry is dead
_INERTIA = 10.0  # latents that an entry's present value counts for in its moving mean


def compute_dtype():
    """What convolutions and matmuls are trained in: bfloat16; float32 on a CPU, which emulates bfloat16."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def cast_for_compute(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """`compute_dtype` for everything but the books (projections and entries), which stay float32."""
    books = ("quantizer.semantic_quantizer.", "quantizer.quantizer.")
    return {name: p if name.startswith(books) else p.astype(compute_dtype()) for name, p in params.items()}


def reconstruct(codec: Codec, audio_BT: jax.Array, key: jax.Array, quantise: jax.Array) -> dict[str, jax.Array]:
    """One pass with gradients: sound, commitment and codebook losses, codes_KBT, latents_KBTE (unprojected).

    `quantise` (bool scalar) false runs the books as a plain linear bottleneck; later a quarter of the rows still
    go through unquantised, which keeps the gradient honest. Half of the rows use a random number of books, so that
    the first ones carry the most.
    """
    quantizer = codec.quantizer
    books = quantizer.books()
    rest = quantizer.pre_module(quantizer.shrink(codec.encoder(audio_BT[..., None]))).astype(jnp.float32)
    batch = audio_BT.shape[0]
    count_key, drop_key, plain_key = jax.random.split(key, 3)
    quantised_B11 = (quantise & (jax.random.uniform(plain_key, (batch,)) < 0.75))[:, None, None]
    used_B = jnp.where(
        jax.random.uniform(drop_key, (batch,)) < 0.5, jax.random.randint(count_key, (batch,), 1, len(books)), len(books)
    )
    total, commitment, size, codes, latents = jnp.zeros_like(rest), 0.0, 0.0, [], []
    for index, book in enumerate(books):
        on_B11 = (index < used_B)[:, None, None].astype(jnp.float32)
        latent = book.in_proj(rest)
        code = book.nearest(jax.lax.stop_gradient(latent))
        entry = jax.lax.stop_gradient(book.codebook(code))
        commitment += jnp.mean(on_B11 * jnp.square(latent - entry))
        size += jnp.mean(jnp.square(latent))
        straight = latent + jax.lax.stop_gradient(jnp.where(quantised_B11, entry - latent, 0.0))
        out = on_B11 * book.out_proj(straight)
        rest, total = rest - out, total + out
        codes.append(code)
        latents.append(jax.lax.stop_gradient(latent))
    hidden = quantizer.expand(quantizer.post_module(total.astype(compute_dtype())), None)[0]
    return {
        "audio_BT": codec.decoder(hidden)[..., 0].astype(jnp.float32),
        "commitment": commitment / len(books),
        "size": size / len(books),
        "codes_KBT": jnp.stack(codes),
        "latents_KBTE": jnp.stack(latents),
    }


def speak(codec: Codec, codes_BKT: jax.Array) -> jax.Array:
    """Codes to sound (B, T * samples_per_frame) float32, to train the decoder side: `compute_dtype` after the books."""
    quantizer = codec.quantizer
    z_q_BTC = quantizer.lookup(codes_BKT).astype(compute_dtype())
    hidden = quantizer.expand(quantizer.post_module(z_q_BTC), None)[0]
    return codec.decoder(hidden)[..., 0].astype(jnp.float32)


def complex_spectrum(audio_BT: jax.Array, window: int) -> jax.Array:
    """Bins (B, frames, window / 2 + 1) complex64, hop window / 4, Hann, scaled as if the window were 1,024 long."""
    hop, batch = window // 4, audio_BT.shape[0]
    blocks = audio_BT.reshape(batch, -1, hop)
    count = blocks.shape[1] - 3
    frames = jnp.concatenate([blocks[:, i : i + count] for i in range(4)], axis=-1)
    hann = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(window) / window)).astype(np.float32) * (1024 / window)
    return jnp.fft.rfft(frames * hann, axis=-1)


def spectrum(audio_BT: jax.Array, window: int) -> jax.Array:
    """Magnitudes of `complex_spectrum`."""
    bins = complex_spectrum(audio_BT, window)
    return jnp.sqrt(jnp.square(bins.real) + jnp.square(bins.imag) + 1e-8)


def spectral_losses(made_BT: jax.Array, wanted_BT: jax.Array, rate_hz: int, shortest: int = 0) -> dict[str, jax.Array]:
    """`mel`: log10-mel L1 summed over seven scales; `stft`: linear and log magnitude L1 over three.

    Windows of fewer than `shortest` samples are left out.
    """
    mel = stft = jnp.zeros(())
    for window, bands in _SCALES:
        if window < shortest:
            continue
        made, wanted = spectrum(made_BT, window), spectrum(wanted_BT, window)
        filters = jnp.asarray(mel_filters(rate_hz, window, bands).T)
        logs = [jnp.log10(jnp.maximum(s @ filters, 1e-2)) for s in (made, wanted)]
        mel += jnp.mean(jnp.abs(logs[0] - logs[1]))
        if window in _LINEAR_SCALES:
            stft += jnp.mean(jnp.abs(made - wanted)) / (jnp.mean(wanted) + 0.01)
            logs = [jnp.log10(jnp.maximum(s, 1e-2)) for s in (made, wanted)]
            stft += jnp.mean(jnp.abs(logs[0] - logs[1]))
    return {"mel": mel, "stft": stft}


def loss(
    codec: Codec, audio_BT: jax.Array, key: jax.Array, quantise: jax.Array, rate_hz: int
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(what is minimised, the parts and codes for the log and for `refresh_books`)."""
    parts = reconstruct(codec, audio_BT, key, quantise)
    parts |= spectral_losses(parts.pop("audio_BT"), audio_BT, rate_hz)
    on = quantise.astype(jnp.float32)
    total = 15 / 7 * parts["mel"] + parts["stft"] + on * 0.25 * parts["commitment"] + 0.01 * parts["size"]
    return total, {**parts, "loss": total}


def refresh_books(
    params: dict[str, jax.Array], use_KN: jax.Array, parts: dict[str, jax.Array], key: jax.Array, refresh: jax.Array
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Moves each entry toward the mean of the latents that chose it; dead entries become latents of the batch.

    The books learn by this moving mean alone: Adam's steps are too small to follow latents whose scale changes.
    `refresh` 2: all entries are drawn anew (no quantising yet), 1: dead ones (moving mean of uses over 100 steps),
    0: none. Returns (params, use_KN).
    """
    size = use_KN.shape[1]
    codes_KN = parts["codes_KBT"].reshape(use_KN.shape[0], -1)
    counts_KN = jax.vmap(lambda codes: jnp.zeros((size,)).at[codes].add(1.0))(codes_KN)
    use_KN = 0.99 * use_KN + 0.01 * counts_KN
    dead_KN = jnp.where(refresh == 2, True, (use_KN < _MIN_USE) & (refresh == 1))
    names = [name for name in params if name.endswith("codebook.weight")]
    names.sort(key=lambda name: (0 if "semantic" in name else 1, int(name.split(".")[-3])))
    params = dict(params)
    for index, name in enumerate(names):
        latents = parts["latents_KBTE"][index].reshape(-1, params[name].shape[1])
        chosen = codes_KN[index]
        sums = jnp.zeros_like(params[name]).at[chosen].add(latents)
        weight = (counts_KN[index] / (counts_KN[index] + _INERTIA))[:, None]
        mean = sums / jnp.maximum(counts_KN[index], 1.0)[:, None]
        moved = params[name] + weight * (mean - params[name])
        rows = jax.random.randint(jax.random.fold_in(key, index), (size,), 0, latents.shape[0])
        params[name] = jnp.where(dead_KN[index][:, None], latents[rows], moved)
    return params, jnp.where(dead_KN, 1.0, use_KN)
