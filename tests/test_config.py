"""Config files with wrong values: one sentence each, which names the file, the field and the value."""

from __future__ import annotations

import json

import pytest

from fishjax.config import CodecConfig, ModelConfig, SpeechProfile
from fishjax.errors import WeightsError

NAN = float("nan")


def at(path: str):
    """Sets the value at a dotted path of a parsed file."""

    def change(raw: dict, value: object) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            raw = raw[parent]
        raw[last] = value

    return change


@pytest.fixture
def write(golden, tmp_path):
    def written(source: str | None, field: str, value: object):
        raw = json.loads((golden / source).read_text()) if source else {}
        at(field)(raw, value)
        path = tmp_path / "config.json"
        path.write_text(json.dumps(raw))
        return path

    return written


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("dim", "twelve", "dim must be a whole number of at least 1, not 'twelve'"),
        ("n_layer", 10**9, "num_layers must be at most 1,024, not 1,000,000,000"),
        ("dim", 256.5, "dim must be .* not 256.5"),
        ("dim", True, "dim must be .* not True"),
        ("n_head", 0, "n_head must be .* not 0"),
        ("vocab_size", [1], r"vocab_size must be .* not \[1\]"),
        ("semantic_begin_id", "x", "semantic_begin_id must be a whole number"),
        ("norm_eps", "small", "norm_eps must be a number above 0, not 'small'"),
        ("norm_eps", NAN, "norm_eps must be .* not nan"),
        ("rope_base", {}, "rope_base must be a number above 0, not {}"),
        ("tie_word_embeddings", "no", "tie_word_embeddings must be true or false, not 'no'"),
        ("attention_qk_norm", 1, "qk_norm must be true or false, not 1"),
        ("prompt_layout", 7, "prompt_layout must be one of chat, interleave, not 7"),
    ],
)
def test_a_wrong_value_of_a_model_is_named_with_its_file(write, field, value, says):
    path = write("dualar_tiny/s1_layout/config.json", field, value)
    with pytest.raises(WeightsError, match=f"config.json: {says}"):
        ModelConfig.from_file(path)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("sample_rate", "x", "sample_rate_hz must be a whole number of at least 1, not 'x'"),
        ("encoder_rates", "2,4", "each of encoder_rates must be .* not '2,4'"),
        ("decoder_rates", [2, 0], "each of decoder_rates must be .* not 0"),
        ("downsample_factor", 4.0, "each of downsample_factors must be .* not 4.0"),
        ("n_codebooks", -1, "num_residual_codebooks must be .* not -1"),
        ("module", 3, "module must be an object, not 3"),
        ("module.n_head", "x", "num_heads must be .* not 'x'"),
        ("module.window_size", 0, "window must be .* not 0"),
    ],
)
def test_a_wrong_value_of_a_codec_is_named_with_its_file(write, field, value, says):
    path = write("codec_tiny/config.json", field, value)
    with pytest.raises(WeightsError, match=f"config.json: {says}"):
        CodecConfig.from_file(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", 2),
        ("temperature", NAN),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_k", 0),
        ("segment_bytes", "60"),
        ("segment_bytes", 0),
        ("max_segment_frames", 1.5),
        ("max_history_segments", -3),
        ("max_reference_s", -1),
        ("keep_tags", "no"),
        ("vocabulary", "open"),
    ],
)
def test_a_wrong_default_of_a_model_is_named_with_its_file(write, field, value):
    with pytest.raises(WeightsError, match=f"config.json: {field} must be .* not {value!r}"):
        SpeechProfile.from_file(write(None, field, value))


def test_words_that_a_voice_was_not_taught(write):
    profile = SpeechProfile.from_file(write(None, "vocabulary", ["open", "the", "door"]))
    assert profile.untaught("Open the DOOR. [laugh] <|speaker:0|> Don't open the other door, other!") == [
        "don't",
        "other",
    ]
    assert SpeechProfile().untaught("anything at all") == []
    with pytest.raises(WeightsError, match="lower case"):
        SpeechProfile.from_file(write(None, "vocabulary", ["Open"]))


def test_the_limits_themselves_are_allowed(write):
    assert SpeechProfile.from_file(write(None, "top_p", 1)).top_p == 1
    assert SpeechProfile.from_file(write(None, "max_history_segments", None)).max_history_segments is None
    assert SpeechProfile.from_file(write(None, "max_history_segments", 0)).max_history_segments == 0
