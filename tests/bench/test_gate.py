"""The gate: what it measures on minnow and on random weights, what figures mean, what it must not let through."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from fishjax.bench import __main__ as command_line
from fishjax.bench import report
from fishjax.bench.frozen import to_json
from fishjax.bench.gate import texts, verdict
from fishjax.bench.gate.forced import agreement, forced_logits
from fishjax.bench.gate.judge import hear, mel_distance, word_errors
from fishjax.bench.gate.measure import Measured, identical_prefix, measure, read, row
from fishjax.bench.gate.spread import spread
from fishjax.config import ModelConfig
from fishjax.errors import InvalidRequest
from fishjax.speech import MINNOW
from fishjax.text.prompt import Prompter
from fishjax.text.tokenizer import Tokenizer
from fishjax.weights.assign import parameters
from fishjax.weights.convert import convert
from fishjax.weights.load import public_shapes
from fishjax.weights.model_folder import LoadedModel, load_model
from fishjax.weights.precision import Precision
from fishjax.weights.prepare import prepare
from fishjax.weights.quantize import apply_precision, replace_values
from pallas_kernels import MxScaled
from tools.minnow.texts import closed_prompts

ROOT = Path(__file__).parents[2]
FROZEN = report.BASELINES / "cpu" / "gate.json"
runner = CliRunner()


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def baseline() -> Measured:
    return measure(read(MINNOW, "fp32"), "fp32", texts.gate_texts(2), quiet)


def logits_of(loaded: LoadedModel, baseline: Measured) -> list[np.ndarray]:
    config = loaded.config
    prompter = Prompter(Tokenizer.from_file(loaded.tokenizer), config.num_codebooks, config.prompt_layout)
    return forced_logits(loaded, prompter, baseline.spoken)


def transpose_scales(loaded: LoadedModel, path: str) -> None:
    """The planted bug: one weight's grid of scales, read column by column."""
    weight = parameters(loaded.dual_ar)[path].get_value()
    field = "scale_NKb" if isinstance(weight, MxScaled) else "scale_NbKb"
    scales = getattr(weight, field)
    replace_values(loaded.dual_ar, {path: dataclasses.replace(weight, **{field: scales.T.reshape(scales.shape)})})


# What it measures


def test_a_greedy_baseline_says_what_its_logits_say(baseline):
    for one, logits_TN in zip(baseline.spoken, baseline.logits, strict=True):
        assert one.ended and logits_TN.shape == (one.num_frames + 1, 513)
        np.testing.assert_array_equal(logits_TN.argmax(axis=1), [*one.codes_KT[0], 512])
        assert len(one.audio_T) == 1024 * one.num_frames
    figures = row(baseline, baseline)
    assert figures["first_frames_equal"] and figures["semantic_agreement"] == 1 and figures["logit_rel_err"] == 0
    assert figures["identical_prefix_frames"] == baseline.fixed.num_frames > 10
    assert 0.03 < figures["codec_mel"] < 0.2


def test_a_planted_transposed_scale_grid_fails_the_gate_and_rounding_does_not_fail_like_it(baseline):
    first = row(baseline, baseline)
    for path, caught in ((None, False), ("slow.layers.3.feed_forward.w2.weight", True)):
        loaded = read(MINNOW, "slow=fp8")
        if path:
            transpose_scales(loaded, path)
        measured = row(measure(loaded, "slow=fp8", texts.gate_texts(2), quiet, baseline), baseline)
        word, reason = verdict.judge(measured, first, ships=True)
        assert ("more than rounding" in reason) == caught, reason
        assert ("word error rate" in reason) == caught, reason
        assert word == verdict.FAIL or not caught


@pytest.mark.parametrize(
    ("name", "word"),
    [
        *((name, "fp8") for name in ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2", "attention.wqkv")),
        *((name, "mxfp8") for name in ("feed_forward.w2", "attention.wqkv")),
    ],
)
def test_in_every_layer_that_can_be_spread_a_transposed_grid_shows_in_the_logits(baseline, name, word):
    loaded = read(MINNOW, f"slow={word}")
    transpose_scales(loaded, f"slow.layers.2.{name}.weight")
    _, error = agreement(baseline.logits, logits_of(loaded, baseline))
    assert error > verdict.MAX_LOGIT_ERR


@pytest.mark.parametrize("policy", ["fp32", "slow=fp8", "slow=mxfp8"])
def test_spreading_the_blocks_changes_no_bit_of_a_result(baseline, policy):
    loaded = load_model(MINNOW, policy)
    plain = logits_of(loaded, baseline)
    for a, b in zip(plain, logits_of(read(MINNOW, policy), baseline), strict=True):
        np.testing.assert_array_equal(a, b)


def test_mxfp8_from_a_converted_folder_to_the_gate(baseline, tmp_path):
    convert(MINNOW, tmp_path / "mx", Precision.for_checkpoint("mxfp8"))
    loaded = load_model(tmp_path / "mx")
    assert str(loaded.precision).startswith("slow=mxfp8,fast=mxfp8,head=mxfp8,")
    assert isinstance(parameters(loaded.dual_ar)["slow.layers.0.attention.wo.weight"].get_value(), MxScaled)
    measured = measure(loaded, "mxfp8", texts.gate_texts(2), quiet, baseline)
    assert all(one.ended for one in measured.spoken)
    direct = load_model(MINNOW, str(loaded.precision))
    prepare(direct.dual_ar)  # as the engine did with what was converted
    for a, b in zip(measured.logits, logits_of(direct, baseline), strict=True):
        np.testing.assert_array_equal(a, b)
    figures = row(measured, baseline)
    assert 0.8 < figures["semantic_agreement"] < 1 and 0 < figures["logit_rel_err"] < verdict.MAX_LOGIT_ERR


def test_spreading_makes_blocks_unlike(baseline):
    loaded = load_model(MINNOW)
    spread(loaded.dual_ar)
    apply_precision(loaded.dual_ar, Precision.parse("slow=fp8"))
    scales = parameters(loaded.dual_ar)["slow.layers.0.feed_forward.w3.weight"].get_value().scale_NbKb
    assert np.max(scales) / np.min(scales) > 16


def test_the_slots_do_not_change_what_is_said(baseline):
    again = measure(read(MINNOW, "fp32"), "fp32", texts.gate_texts(2)[::-1], quiet)
    for one, other in zip(baseline.spoken, again.spoken[::-1], strict=True):
        np.testing.assert_array_equal(one.codes_KT, other.codes_KT)


def test_identical_prefix_counts_frames_whose_codes_all_agree():
    codes = np.arange(12).reshape(2, 6)
    other = codes.copy()
    other[1, 4] += 1
    assert identical_prefix(codes, codes[:, :5]) == 5
    assert identical_prefix(codes, other) == 4


def test_agreement_is_the_share_of_best_candidates_and_the_worst_error():
    wanted = [np.array([[3.0, 4.0], [5.0, 0.0]])]
    assert agreement(wanted, [np.array([[3.0, 4.0], [0.0, 5.0]])]) == (0.5, pytest.approx(2**0.5))


# The judges and the texts


def test_words_wrong_are_counted_by_edits():
    assert word_errors(["open", "the", "red", "door"], ["open", "a", "door"]) == 2
    assert word_errors(["one"], []) == 1 and word_errors([], ["one", "two"]) == 2


def test_what_is_heard_does_not_depend_on_what_was_heard_before(baseline):
    silence = np.zeros(0, np.float32)
    first, second = (one.audio_T for one in baseline.spoken)
    alone = hear(first, 22050)
    assert alone and hear(silence, 22050) == ""
    hear(second, 22050)
    assert hear(first, 22050) == alone and hear(silence, 22050) == ""


def test_the_mel_distance_is_zero_for_the_same_sound_and_grows_with_the_level():
    tone = np.sin(np.arange(22050) / 10).astype(np.float32)
    assert mel_distance(tone, tone) == 0 < mel_distance(tone, 0.5 * tone) < mel_distance(tone, 0.1 * tone)


def test_prompts_that_chose_a_checkpoint_come_last_and_none_was_trained_on():
    all_of_them, held_out = texts.gate_texts(160), texts.held_out()
    assert all_of_them[112:] == held_out[:48] and all_of_them[:112] == held_out[48:]
    assert texts.gate_texts(24) == all_of_them[:24] and texts.FIXED_INPUT in held_out
    assert len(set(all_of_them)) == 160 and not set(all_of_them) & set(closed_prompts(4000, seed=5))
    for count in (0, 161):
        with pytest.raises(InvalidRequest, match=r"1\.\.160"):
            texts.gate_texts(count)


# What the figures mean


def figures(policy: str = "slow=fp8", errors: int = 0, ended: int = 100, **fields) -> dict:
    """A row of 100 texts of one word each."""
    return {
        "policy": policy,
        "num_texts": 100,
        "first_frames_equal": True,
        "identical_prefix_frames": 30,
        "semantic_agreement": 0.99,
        "logit_rel_err": 0.1,
        "wer": errors / 100,
        "end_of_speech_rate": ended / 100,
        "length_ratio": 1.0,
        "longest_ratio": 1.2,
        "texts": {
            "words": [1] * 100,
            "errors": [1] * errors + [0] * (100 - errors),
            "ended": [1] * ended + [0] * (100 - ended),
        },
        "verdict": verdict.PASS,
        "reason": "",
        **fields,
    }


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, ""),
        ({"errors": 11}, ""),
        ({"first_frames_equal": False, "identical_prefix_frames": 3}, "3 of the first 5 frames"),
        ({"semantic_agreement": 0.97}, "semantic agreement 97.0%"),
        ({"logit_rel_err": 0.53}, "off by 53%: more than rounding"),
        ({"logit_rel_err": float("nan")}, "more than rounding"),
        ({"errors": 13}, "word error rate 13.0% against 10.0%"),
        ({"ended": 95}, "95% end by themselves against 98%"),
        ({"length_ratio": 1.2}, "1.20 times as long"),
        ({"length_ratio": 0.8}, "0.80 times as long"),
        ({"longest_ratio": 3.1}, "one text is 3.1 times"),
    ],
)
def test_a_policy_is_judged_beside_the_baseline(fields, says):
    baseline = figures("fp32", errors=10, ended=98)
    word, reason = verdict.judge(figures(**{"errors": 10, "ended": 98, **fields}), baseline, ships=False)
    assert word == (verdict.FAIL if says else verdict.PASS)
    assert says in reason and bool(reason) == bool(says)
    assert verdict.judge(baseline, baseline, ships=False) == (verdict.BASELINE, "")


def test_what_nobody_understands_is_not_judged_unless_it_ships():
    baseline, bad = figures("fp32", errors=90), figures(errors=90, semantic_agreement=0.5)
    word, reason = verdict.judge(bad, baseline, ships=False)
    assert word == verdict.NOT_JUDGED and "prove nothing" in reason
    assert verdict.judge(bad, baseline, ships=True)[0] == verdict.FAIL


@pytest.mark.parametrize(
    ("now", "before", "says"),
    [
        (figures(errors=13), figures(errors=10), None),
        (figures(errors=14), figures(errors=10), "word error rate 14.0%; it was 10.0%"),
        (figures(ended=96), figures(ended=98), None),
        (figures(ended=95), figures(ended=98), "95.0% of the texts end by themselves; it was 98.0%"),
        (figures(verdict="fail", reason="why"), figures(), "fails, and did not when it was frozen: why"),
        (figures(verdict="fail", reason="why"), figures(verdict="fail"), None),
        (figures(verdict="fail", logit_rel_err=0.5), figures(verdict="fail"), "off by 50%; it was 10%"),
        (figures("new", verdict="fail", reason="why"), figures(), "no frozen row says that it may: why"),
        (figures("new"), figures(), None),
        ({"policy": "slow=fp8", "verdict": "unsupported", "reason": "why"}, figures(), "and now: why"),
        (figures(), {"policy": "slow=fp8", "verdict": "unsupported", "reason": "why"}, None),
    ],
)
def test_a_run_is_compared_with_its_frozen_self(now, before, says):
    found = verdict.worse({"rows": [now]}, {"rows": [before]})
    assert len(found) == (says is not None)
    assert says is None or says in found[0]


def test_a_short_run_is_compared_over_the_texts_that_it_has():
    few = figures(errors=4) | {"num_texts": 20}
    few["texts"] = {name: values[:20] for name, values in few["texts"].items()}
    before = figures(errors=4)
    assert verdict.rates(before, 20) == (0.2, 1.0)
    assert verdict.worse({"rows": [few]}, {"rows": [before]}) == []
    before["texts"]["errors"] = before["texts"]["errors"][::-1]
    assert len(verdict.worse({"rows": [few]}, {"rows": [before]})) == 1


# The command


@pytest.fixture(scope="module")
def random_model(tmp_path_factory) -> Path:
    """minnow's tokenizer and codec under two random layers, whose inner width is no multiple of 128."""
    folder = shutil.copytree(MINNOW, tmp_path_factory.mktemp("model") / "random")
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= {"n_layer": 2, "intermediate_size": 576}
    (folder / "config.json").write_text(json.dumps(raw))
    rng = np.random.default_rng(0)
    shapes = public_shapes(ModelConfig.from_dict(raw))
    tensors = {name: rng.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_random_weights_are_measured_and_not_judged_and_what_cannot_run_says_why(random_model, tmp_path):
    out = tmp_path / "gate.json"
    options = ["--texts", "2", "--policy", "slow=bf16", "--policy", "fp32", "--policy", "slow=fp8"]
    result = runner.invoke(
        command_line.app, ["gate", "--model", str(random_model), *options, "--json", "--out", str(out)]
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    assert document == json.loads(out.read_text()) and document["model"] == "random"
    baseline, bf16, fp8 = document["rows"]
    assert (baseline["policy"], baseline["verdict"]) == ("fp32", "baseline")
    assert bf16["verdict"] == "not judged" and "prove nothing" in bf16["reason"] and bf16["semantic_agreement"] <= 1
    assert fp8["verdict"] == "unsupported" and "needs a multiple of 128" in fp8["reason"]
    assert "prove nothing" in result.stderr and "listening" in result.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--texts", "161"], "1..160"),
        (["--policy", "slow=fp4"], "slow=fp4 does not exist"),
        (["--freeze"], "--texts 160"),
        (["--freeze", "--texts", "160", "--policy", "kv=fp8"], "all policies"),
        (["--model", "nowhere"], "no model folder"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_runs(options, says):
    assert says in str(runner.invoke(command_line.app, ["gate", *options]).exception)


# The frozen figures, and the pages that quote them


def test_the_frozen_file_is_whole_and_passes_beside_itself():
    document = json.loads(FROZEN.read_text())
    assert document["model"] == "minnow" and document["header"]["suite"] == "gate" and document["header"]["commit"]
    assert [one["policy"] for one in document["rows"]][:2] == ["fp32", "bf16"]
    assert all(one["num_texts"] == 160 for one in document["rows"] if one["verdict"] != verdict.UNSUPPORTED)
    assert document["rows"][0]["wer"] == pytest.approx(verdict.rates(document["rows"][0], 112)[0])
    assert verdict.worse(document, document) == []
    assert to_json(document) == FROZEN.read_text()


def test_a_worse_voice_is_told():
    document = json.loads(FROZEN.read_text())
    document["rows"][0]["texts"]["errors"] = [1] * 160
    (problem,) = verdict.worse(document, json.loads(FROZEN.read_text()))
    assert problem.startswith("fp32: word error rate")


@pytest.mark.parametrize("page", ["docs/benchmarks.md", "README.md", "fishjax/minnow/MODEL_CARD.md"])
def test_pages_quote_the_frozen_figures(page):
    text = (ROOT / page).read_text()
    assert report.rewrite(text) == text


def test_a_device_without_frozen_figures_is_said_so(tmp_path):
    assert "No figures are frozen yet" in report.gate_markdown(tmp_path)
    assert jax.default_backend() != "cpu" or "## Gate on cpu: minnow, 160 texts" in report.gate_markdown()
