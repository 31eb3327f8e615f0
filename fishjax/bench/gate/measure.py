"""One precision policy measured: it speaks the texts through the engine, and its row of figures.

A model is loaded in the formats of the device's baseline, its blocks spread (`spread.py`), then brought to the
policy's: what is measured is what the policy loses, and a scale in the wrong place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from fishjax.codec import Codec
from fishjax.engine.steps import bind
from fishjax.errors import FishjaxError
from fishjax.speech import assemble
from fishjax.weights.model_folder import LoadedModel, load_model
from fishjax.weights.precision import Precision
from fishjax.weights.quantize import apply_precision

from .forced import agreement, forced_logits
from .judge import hear, mel_distance, word_errors
from .speak import Spoken, speak_all
from .spread import spread
from .texts import FIXED_INPUT, NUM_CHOOSING, NUM_HELD_OUT

FIRST_FRAMES = 5
_MAX_SLOTS = 16
_MAX_LEN = 512
_CODEC_TEXTS = 8
_HONEST = NUM_HELD_OUT - NUM_CHOOSING
"""`gate_texts` has so many texts that never chose a checkpoint; the others follow."""


class Unsupported(Exception):
    """The engine cannot run this policy; the message is the engine's own."""


@dataclass(frozen=True)
class Measured:
    """What a policy said and computed, text by text.

    `fixed` is FIXED_INPUT; `errors` words wrong in each of `spoken`; `logits` as in `forced_logits`, fed the
    baseline's frames; `codec_mel` log10-mel L1 of the codec's round trip.
    """

    policy: str
    precision: Precision
    fixed: Spoken
    spoken: Sequence[Spoken]
    errors: Sequence[int]
    logits: Sequence[np.ndarray]
    codec_mel: float


def default_policies() -> list[str]:
    """What is compared with the baseline when nothing is named."""
    policies = ["slow=fp8", "slow=fp8,fast=fp8", "head=fp8", "kv=fp8", "slow=mxfp8", "mxfp8"]
    return policies if Precision.default().slow == "bf16" else ["bf16", *policies]


def read(folder: Path, policy: str) -> LoadedModel:
    """A model folder in a policy's formats, its blocks spread before.

    Raises Unsupported for a policy that does not fit the model, FishjaxError for a folder or a policy that cannot be.
    """
    precision = Precision.parse(policy)
    loaded = load_model(folder, dataclasses.replace(Precision.default(), codec=precision.codec))
    spread(loaded.dual_ar)
    try:
        apply_precision(loaded.dual_ar, precision)
    except FishjaxError as error:
        raise Unsupported(str(error)) from error
    return dataclasses.replace(loaded, precision=precision)


def measure(
    loaded: LoadedModel, policy: str, texts: Sequence[str], say: Callable[[str], None], baseline: Measured | None = None
) -> Measured:
    """Have a model speak, listen to it, and compute its logits over the baseline's frames (None: over its own).

    Raises Unsupported where the engine or XLA has no program for the policy.
    """
    try:
        say("compiling the engine")
        num_slots = min(_MAX_SLOTS, len(texts) + 1)
        max_len = min(_MAX_LEN, loaded.config.max_seq_len)
        speech = assemble(loaded, num_slots=num_slots, max_len=max_len, model_name=policy)
        fixed, *spoken = speak_all(speech, [FIXED_INPUT, *texts], say)
        say("computing the logits over the baseline's frames")
        forced = spoken if baseline is None else baseline.spoken
        logits = forced_logits(loaded, speech.prompter, forced)
        say("taking sound through the codec and back")
        codec_mel = _codec_mel(loaded.codec, [one.audio_T for one in forced[:_CODEC_TEXTS]])
    except (NotImplementedError, JaxRuntimeError) as error:
        if isinstance(error, JaxRuntimeError) and "UNIMPLEMENTED" not in str(error):
            raise
        raise Unsupported(str(error)) from error
    errors = []
    for one in spoken:
        say(f"listening: {len(errors)} of {len(spoken)} texts")
        # What never ended is mostly noise.
        heard = hear(one.audio_T, speech.engine.sample_rate_hz, second_search=one.ended)
        errors.append(word_errors(one.text.split(), heard.split()))
    return Measured(policy, loaded.precision, fixed, spoken, errors, logits, codec_mel)


def row(measured: Measured, baseline: Measured) -> dict[str, Any]:
    """The figures of a policy beside the baseline's: rates in 0..1, lengths in frames."""
    pairs = list(zip(baseline.spoken, measured.spoken, strict=True))
    prefix = identical_prefix(baseline.fixed.codes_KT, measured.fixed.codes_KT)
    starts = [identical_prefix(a.codes_KT, b.codes_KT) >= min(FIRST_FRAMES, a.num_frames) for a, b in pairs]
    ratios = [b.num_frames / max(a.num_frames, 1) for a, b in pairs]
    same, error = agreement(baseline.logits, measured.logits)
    words = [len(one.text.split()) for one in measured.spoken]
    return {
        "policy": measured.policy,
        "precision": str(measured.precision),
        "num_texts": len(pairs),
        "first_frames_equal": prefix >= min(FIRST_FRAMES, baseline.fixed.num_frames),
        "first_frames_equal_rate": float(np.mean(starts)),
        "identical_prefix_frames": prefix,
        "semantic_agreement": same,
        "logit_rel_err": error,
        "wer": word_error_rate(measured.errors[:_HONEST], words[:_HONEST]),
        "wer_choosing": word_error_rate(measured.errors[_HONEST:], words[_HONEST:]) if len(words) > _HONEST else None,
        "end_of_speech_rate": float(np.mean([one.ended for one in measured.spoken])),
        "length_ratio": sum(b.num_frames for _, b in pairs) / max(1, sum(a.num_frames for a, _ in pairs)),
        "longest_ratio": max(ratios),
        "codec_mel": measured.codec_mel,
        "texts": {
            "words": words,
            "errors": list(measured.errors),
            "frames": [one.num_frames for one in measured.spoken],
            "ended": [int(one.ended) for one in measured.spoken],
        },
    }


def identical_prefix(codes_KT: np.ndarray, other_KT: np.ndarray) -> int:
    """Frames from the start in which all codes agree."""
    length = min(codes_KT.shape[1], other_KT.shape[1])
    differs = np.flatnonzero(np.any(codes_KT[:, :length] != other_KT[:, :length], axis=0))
    return int(differs[0]) if differs.size else length


def word_error_rate(errors: Sequence[int], words: Sequence[int]) -> float:
    """Words wrong over words asked for."""
    return sum(errors) / sum(words)


def _codec_mel(codec: Codec, audios: Sequence[np.ndarray]) -> float:
    """Mean log10-mel L1 between sounds and what the codec makes of them."""
    lengths = [len(audio_T) for audio_T in audios]
    padded_BT = np.zeros((len(audios), max(lengths)), np.float32)
    for audio_T, padded_T in zip(audios, padded_BT, strict=True):
        padded_T[: len(audio_T)] = audio_T

    def round_trip(codec: Codec, audio_BT: jax.Array) -> jax.Array:
        return codec.decode(codec.encode(audio_BT)[0])

    made_BT = np.asarray(bind(codec, round_trip)(padded_BT), np.float32)
    rate_hz = codec.config.sample_rate_hz
    pairs = zip(audios, made_BT, strict=True)
    return float(np.mean([mel_distance(audio_T, made_T[: len(audio_T)], rate_hz) for audio_T, made_T in pairs]))
