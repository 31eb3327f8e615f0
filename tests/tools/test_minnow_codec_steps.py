"""The codec's decoder side learns against spectra and critics; the codes stay as they are."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fishjax.config import CodecConfig
from fishjax.weights.load_codec import abstract_codec
from tools.minnow import codec_critics, codec_loss, codec_steps, training
from tools.minnow.convs import convolutions
from tools.minnow.shapes import CODEC
from tools.minnow.train_codec import fresh_spectral_decoder

RAW = {
    **CODEC,
    **{"encoder_dim": 8, "encoder_rates": [16], "decoder_dim": 16, "decoder_rates": [16], "downsample_factor": [4]},
    **{"encoder_transformer_layers": [0], "decoder_transformer_layers": [0], "latent": 16, "n_codebooks": 1},
    **{"semantic_codebook_size": 16, "codebook_size": 16},
    "module": {**CODEC["module"], "dim": 16, "n_head": 1, "head_dim": 16, "intermediate_size": 16},
}
CONFIG = CodecConfig.from_dict(RAW)


class Run:
    """Two steps of one crop of 32 frames, 2,048 samples."""

    def __init__(self):
        model, self.optimiser = training.Model(abstract_codec(CONFIG)), training.adamw(0.8, 0.99, 1e-2)
        rng = np.random.default_rng(0)
        self.params = {
            name: (0.1 * rng.standard_normal(leaf.shape)).astype(np.float32) for name, leaf in model.params.items()
        }
        audio_RS = (3000 * rng.standard_normal((40, CONFIG.samples_per_frame))).astype(np.int16)
        codes_RK = rng.integers(0, 16, (40, CONFIG.num_codebooks)).astype(np.int16)
        self.corpus = {"audio_RS": jnp.asarray(audio_RS), "codes_RK": jnp.asarray(codes_RK)}
        self.step = codec_steps.make_decoder_steps(model, self.optimiser, CONFIG, 1, 32, 1)

    def start(self, *, adversarial: bool):
        return codec_steps.decoder_state(self.params, self.optimiser, 0, adversarial=adversarial)

    def two_steps(self, state, critics_weight: float):
        shown = []
        with convolutions({}, "im2col"):
            for _ in range(2):
                controls = jnp.int32(40), jnp.float32(1e-4), jnp.float32(1e-4), jnp.float32(critics_weight)
                state, parts = self.step(state, self.corpus, *controls)
                shown.append({name: float(part) for name, part in parts.items()})
        return jax.tree.map(np.asarray, {n: state[n] for n in state if n != "key"}), shown


@pytest.fixture(scope="module")
def run():
    with pytest.MonkeyPatch.context() as patch:  # the rest would compile for minutes
        patch.setattr(codec_loss, "_SCALES", ((512, 80),))
        patch.setattr(codec_critics, "_PERIOD_LAYERS", codec_critics._PERIOD_LAYERS[::5])
        patch.setattr(codec_critics, "_BAND_LAYERS", codec_critics._BAND_LAYERS[::4])
        patch.setattr(codec_critics, "_PERIODS", (5,))
        patch.setattr(codec_critics, "_WINDOWS", (512,))
        patch.setattr(codec_critics, "_BAND_EDGES", (1 / 8, 3 / 8))
        yield Run()


@pytest.fixture(scope="module")
def against_critics(run):
    return run.two_steps(run.start(adversarial=True), 1.0)


def test_the_decoder_side_moves_and_all_else_stays_bit_identical(run, against_critics):
    state, _ = against_critics
    trained = codec_steps.decoder_side(run.params)
    assert 0 < len(trained) < len(run.params)
    for name, before in run.params.items():
        after = state["params"][name]
        assert np.array_equal(before, after) == (name not in trained), name
        if name in trained:  # the averaged weights follow slowly
            assert 0 < np.abs(state["average"][name] - before).max() < np.abs(after - before).max()


def test_critics_learn_from_the_same_look(run, against_critics):
    state, (first, second) = against_critics
    for name, before in run.start(adversarial=True)["critics"].items():
        assert not np.array_equal(before, state["critics"][name]), name
    assert second["critics"] < first["critics"]
    assert second["loss"] != first["loss"] and second["fooling"] != first["fooling"]
    assert first["push"] > 0 and np.isfinite(list(second.values())).all()


def test_critics_of_no_weight_leave_the_decoder_what_spectra_alone_make_of_it(run, against_critics):
    silent, _ = run.two_steps(run.start(adversarial=True), 0.0)
    alone, _ = run.two_steps(run.start(adversarial=False), 1.0)
    for name, value in alone["params"].items():
        np.testing.assert_allclose(silent["params"][name], value, rtol=0, atol=1e-6, err_msg=name)
    weight = "decoder.model.0.conv.weight"  # felt critics move it elsewhere
    assert np.abs(against_critics[0]["params"][weight] - alone["params"][weight]).max() > 1e-5


def test_a_new_spectral_decoder_learns_and_all_else_of_the_codec_is_kept(run):
    model = training.Model(abstract_codec(CONFIG))
    model.params = run.params
    config, made, raw = fresh_spectral_decoder(model, RAW, seed=0)
    assert config == CodecConfig.from_dict(raw) and config.hop_length == CONFIG.hop_length
    assert not any(name.startswith("decoder.model.") for name in made.params)
    for name, value in made.params.items():
        if not name.startswith("decoder."):
            np.testing.assert_array_equal(value, run.params[name])
    step = codec_steps.make_decoder_steps(made, run.optimiser, config, 1, 32, 2)
    state = codec_steps.decoder_state(made.params, run.optimiser, 0, adversarial=False)
    controls = jnp.int32(40), jnp.float32(1e-3), jnp.float32(0), jnp.float32(0)
    losses = []
    for _ in range(5):
        state, shown = step(state, run.corpus, *controls)
        losses.append(float(shown["loss"]))
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    # The average has forgotten where it began.
    name = "decoder.head.bias"
    now, average = np.asarray(state["params"][name]), np.asarray(state["average"][name])
    assert np.abs(average - now).max() < 0.5 * np.abs(now).max()


def test_short_windows_see_where_in_its_cycle_a_sound_is_and_can_be_left_out(monkeypatch):
    monkeypatch.setattr(codec_loss, "_SCALES", ((32, 5), (512, 80)))
    times = np.arange(8192) / 22050
    pulses = (0.5 * sum(np.cos(2 * np.pi * 196 * n * times) for n in range(1, 40)) / 40).astype(np.float32)[None]
    near, far = pulses[:, :4096], pulses[:, 50 : 50 + 4096]  # a pulse every 112 samples
    every = codec_loss.spectral_losses(far, near, 22050)["mel"]
    long = codec_loss.spectral_losses(far, near, 22050, shortest=256)["mel"]
    assert 0 < float(long) < 0.2 * float(every)


def test_least_squares_by_hand():
    verdicts = jnp.asarray([0.5, 0.0, 1.0, 0.5]).reshape(4, 1)  # two made, two wanted
    hidden = jnp.asarray([1.0, 2.0, 2.0, 2.0]).reshape(4, 1)
    seen = {"one": [hidden, verdicts], "other": [hidden, verdicts]}
    assert float(codec_critics.critics_loss(seen)) == pytest.approx(0.125 + 0.125)
    total, parts = codec_critics.decoder_loss(seen)
    assert float(parts["fooling"]) == pytest.approx((0.25 + 1) / 2)
    assert float(parts["matching"]) == pytest.approx(0.5 / 2)
    assert float(total) == pytest.approx(0.625 + 2 * 0.25)


def test_a_critics_convolution_is_a_convolution():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((2, 9, 4, 3)), jnp.float32)
    for along, across, stride in ((5, 1, 3), (8, 3, 4), (3, 3, 1)):
        w = jnp.asarray(rng.standard_normal((along, across, 3, 6)), jnp.float32)
        pads = (((along - 1) // 2, along // 2), (across // 2, across // 2))
        wanted = jax.lax.conv_general_dilated(x, w, (stride, 1), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        np.testing.assert_allclose(codec_critics._convolve(x, w, stride), wanted, atol=1e-5)
