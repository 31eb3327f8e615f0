"""The spectral decoder: its inverse STFT, streaming that equals the whole, a codec that has it in the engine."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from fishjax.codec import Codec
from fishjax.codec.decoder import Decoder
from fishjax.codec.spectral_decoder import SpectralDecoder, inverse_stft
from fishjax.codec.stream import init_stream, stream_decode
from fishjax.config import CodecConfig
from fishjax.engine.engine import Engine
from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import WeightsError
from fishjax.weights.codec_names import assign_public, codec_to_public, public_shapes
from fishjax.weights.load import load_dual_ar
from fishjax.weights.load_codec import abstract_codec, load_codec

FRAMES = 50
HOP = 24  # of the golden codec


def raw_config(golden) -> dict:
    raw = json.loads((golden / "codec_tiny" / "config.json").read_text())
    return raw | {"decoder": "spectral", "decoder_dim": 20, "decoder_rates": [HOP], "decoder_layers": 3}


@pytest.fixture(scope="module")
def folder(golden, tiny, tmp_path_factory):
    """The golden codec with a spectral decoder of random weights, as a published folder."""
    folder, raw = tmp_path_factory.mktemp("spectral"), raw_config(golden)
    rng, kept = np.random.default_rng(3), codec_to_public(tiny)
    tensors = {
        name: kept[name]
        if not name.startswith("decoder.")
        else (0.15 * rng.standard_normal(shape) + name.endswith("norm.weight")).astype(np.float32)
        for name, shape in public_shapes(abstract_codec(CodecConfig.from_dict(raw))).items()
    }
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def codec(folder) -> Codec:
    return load_codec(folder)[1]


@pytest.fixture(scope="module")
def codes():
    rng = np.random.default_rng(7)
    return rng.integers(0, 32, (3, 4, FRAMES)).astype(np.int32)


def pieces(codec: Codec, codes, chunk: int) -> np.ndarray:
    graph, weights = nnx.split(codec)
    step = jax.jit(lambda weights, *rest: stream_decode(nnx.merge(graph, weights), *rest))
    state, run, sounds = init_stream(codec, len(codes), FRAMES), jnp.ones(len(codes), bool), []
    for at in range(0, FRAMES, chunk):
        state, sound = step(weights, state, jnp.asarray(codes[:, :, at : at + chunk]), run, ~run)
        sounds.append(np.asarray(sound))
    return np.concatenate(sounds, axis=1)


def whole(codec: Codec, codes) -> np.ndarray:
    graph, weights = nnx.split(codec)
    return np.asarray(jax.jit(lambda weights, codes: nnx.merge(graph, weights).decode(codes))(weights, codes))


# --- the inverse STFT


@pytest.mark.parametrize("hop", [4, 256])
def test_the_inverse_stft_is_windowed_inverse_transforms_added(hop):
    rng = np.random.default_rng(hop)
    spectra = rng.standard_normal((7, hop + 1)) + 1j * rng.standard_normal((7, hop + 1))
    window = np.sin(np.pi * (np.arange(2 * hop) + 0.5) / (2 * hop))
    wanted = np.zeros(8 * hop)
    for step, spectrum in enumerate(spectra):
        wanted[step * hop : (step + 2) * hop] += window * np.fft.irfft(spectrum)
    side_by_side = jnp.asarray(np.concatenate([spectra.real, spectra.imag], axis=1)[None], jnp.float32)
    made = inverse_stft(jnp.zeros((1, 1, 2 * hop + 2)), side_by_side, hop)
    np.testing.assert_allclose(np.asarray(made).reshape(-1), wanted[: 7 * hop], atol=1e-5)


def test_the_spectra_of_a_sound_give_the_sound_back():
    rng, hop = np.random.default_rng(0), 16
    sound = rng.standard_normal(9 * hop)
    window = np.sin(np.pi * (np.arange(2 * hop) + 0.5) / (2 * hop))
    spectra = np.array([np.fft.rfft(window * sound[i * hop : (i + 2) * hop]) for i in range(8)])
    side_by_side = jnp.asarray(np.concatenate([spectra.real, spectra.imag], axis=1)[None], jnp.float32)
    made = np.asarray(inverse_stft(side_by_side[:, :1], side_by_side[:, 1:], hop)).reshape(-1)
    np.testing.assert_allclose(made, sound[hop : 8 * hop], atol=1e-5)


def test_silence_before_the_first_step_adds_nothing(codec):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, codec.config.latent_dim)), jnp.float32)
    graph, weights = nnx.split(codec.decoder)
    stream = jax.jit(lambda weights, *rest: nnx.merge(graph, weights).stream(*rest))
    sound, tail = stream(weights, x, codec.decoder.silence(1, jnp.float32))
    np.testing.assert_allclose(sound, stream(weights, x, None)[0], atol=1e-6)
    assert sound.shape == (1, 3 * HOP, 1) and sound.dtype == jnp.float32
    assert jax.tree.map(jnp.shape, tail) == jax.tree.map(jnp.shape, codec.decoder.silence(1, jnp.float32))


# --- pieces and the whole


@pytest.mark.parametrize("chunk", [1, 2, 5, 25])
def test_pieces_are_the_whole(codec, codes, chunk):
    wanted = whole(codec, codes)
    assert wanted.shape == (3, FRAMES * codec.config.samples_per_frame)
    assert wanted.std() > 0.01 and np.mean(np.abs(wanted) == 1) < 0.01  # a sound, and hardly clipped
    np.testing.assert_allclose(pieces(codec, codes, chunk), wanted, atol=1e-5)


@pytest.mark.parametrize("chunk", [5])
def test_pieces_in_bfloat16(folder, codes, chunk):
    codec, full = load_codec(folder, jnp.bfloat16)[1], load_codec(folder)[1]
    wanted, made = whole(codec, codes), pieces(codec, codes, chunk)
    assert made.dtype == jnp.float32
    size, rounding = np.sqrt(np.mean(wanted**2)), np.sqrt(np.mean((wanted - whole(full, codes)) ** 2))
    assert 0 < rounding < 0.05 * size  # 1 % measured
    assert np.sqrt(np.mean((made - wanted) ** 2)) < 0.1 * rounding


def test_a_row_that_waits_or_starts_anew(codec, codes):
    graph, weights = nnx.split(codec)
    step = jax.jit(lambda weights, *rest: stream_decode(nnx.merge(graph, weights), *rest))
    wanted, spf = whole(codec, codes), codec.config.samples_per_frame
    state = init_stream(codec, 3, FRAMES)
    for frame in range(6):
        # Row 1 waits at frames 2 and 3; row 2 starts anew at frame 4.
        at = np.array([frame, frame if frame < 2 else max(2, frame - 2), frame % 4])
        run, reset = jnp.array([True, frame not in (2, 3), True]), jnp.array([False, False, frame == 4])
        fed = np.stack([codes[row, :, place : place + 1] for row, place in enumerate(at)])
        state, sound = step(weights, state, jnp.asarray(fed), run, reset)
        for row in np.flatnonzero(run):
            expected = wanted[row, at[row] * spf : (at[row] + 1) * spf]
            np.testing.assert_allclose(np.asarray(sound)[row], expected, atol=1e-5, err_msg=f"row {row}, {frame}")


def test_a_slot_of_the_engine_speaks_as_the_whole_decode(codec, golden):
    model = load_dual_ar(golden / "dualar_tiny" / "s2_layout")[1]
    engine = Engine(model, codec, im_end_id=422, num_slots=2, max_len=64)
    prompt = np.zeros((model.config.num_codebooks + 1, 5), np.int32)
    prompt[0] = 3, 1, 4, 1, 5
    engine.insert(engine.prefill(prompt, SamplingParams(seed=3, temperature=1.3)), 1)
    frames = [engine.step([1]).result() for _ in range(8)]
    assert not any(frame.is_end_B[1] for frame in frames)
    made = np.concatenate([frame.audio_Bs[1] for frame in frames])
    codes = np.stack([frame.codes_BK[1] for frame in frames], axis=1)[None]
    np.testing.assert_allclose(made, whole(codec, codes)[0], atol=1e-5)


# --- config and weights


def test_the_config_says_which_decoder(golden, codec, tiny):
    assert isinstance(codec.decoder, SpectralDecoder) and isinstance(tiny.decoder, Decoder)
    assert CodecConfig().decoder == "waveform"
    raw = raw_config(golden)
    for field, value, says in (
        ("decoder", "other", "decoder must be one of waveform, spectral, not 'other'"),
        ("decoder", ["spectral"], "decoder must be one of"),
        ("decoder_layers", 0, "decoder_layers must be a whole number of at least 1, not 0"),
        ("decoder_layers", 10**9, "decoder_layers must be at most 1,024"),
        ("decoder_rates", [4, 6], r"decoder_rates must be one number in a spectral decoder, not \(4, 6\)"),
        ("decoder_rates", [HOP + 1], "differ in hop"),
    ):
        with pytest.raises(WeightsError, match=says):
            CodecConfig.from_dict(raw | {field: value})


def test_missing_and_misshapen_tensors_are_named(codec):
    tensors = codec_to_public(codec)
    del tensors["decoder.blocks.1.gamma"]
    tensors["decoder.head.weight"] = tensors["decoder.head.weight"][1:]
    tensors["decoder.model.0.conv.bias"] = np.zeros(3, np.float32)
    with pytest.raises(WeightsError) as caught:
        assign_public(abstract_codec(codec.config), tensors, source="here")
    message = str(caught.value)
    assert "1 missing: decoder.blocks.1.gamma" in message and "1 extra: decoder.model.0.conv.bias" in message
    bins = HOP + 1
    assert f"decoder.head.weight is ({2 * bins - 1}, 20), should be ({2 * bins}, 20)" in message
