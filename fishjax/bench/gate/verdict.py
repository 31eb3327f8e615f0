"""What figures mean: a policy against the baseline of its run, and a run against the frozen one. Rows in, words out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .measure import FIRST_FRAMES

MIN_AGREEMENT = 0.98
"""Share of semantic tokens, each fed what the baseline said before."""
MAX_LOGIT_ERR = 0.35
"""The worst of 5,490 frames of minnow is off by 0.23 in FP8 and 0.29 in MXFP8; two texts are enough for a transposed
grid of scales in one layer to make 0.43 (wqkv of layer 2) to 1.5."""
MAX_WER_OVER_BASELINE = 0.02
MAX_ENDS_UNDER_BASELINE = 0.02
MAX_LENGTH_CHANGE = 0.1
MAX_LONGEST_RATIO = 3.0
MAX_WER_UNDERSTOOD = 0.5
"""A baseline of which a recogniser gets less than half of the words does not speak the closed vocabulary."""
MAX_WER_OVER_FROZEN = 0.03
MAX_ENDS_UNDER_FROZEN = 0.02
BASELINE, PASS, FAIL, NOT_JUDGED, UNSUPPORTED = "baseline", "pass", "fail", "not judged", "unsupported"


def judge(row: Mapping[str, Any], baseline: Mapping[str, Any], ships: bool) -> tuple[str, str]:
    """(verdict, reason) of a policy's row. `ships`: it is the voice that ships, which is judged however bad it is."""
    if row is baseline:
        return BASELINE, ""
    if baseline["wer"] > MAX_WER_UNDERSTOOD and not ships:
        return NOT_JUDGED, (
            f"the baseline itself is not understood ({baseline['wer']:.0%} of the words are wrong): "
            "figures of a model that does not speak the closed vocabulary prove nothing"
        )
    reasons = list(_against_baseline(row, baseline))
    return (FAIL, "; ".join(reasons)) if reasons else (PASS, "")


def _against_baseline(row: Mapping[str, Any], baseline: Mapping[str, Any]) -> Iterable[str]:
    if not row["logit_rel_err"] <= MAX_LOGIT_ERR:
        yield f"logits are off by {row['logit_rel_err']:.0%}: more than rounding, so a scale or a layout is wrong"
    if not row["first_frames_equal"]:
        yield f"{row['identical_prefix_frames']} of the first {FIRST_FRAMES} frames are the baseline's"
    if row["semantic_agreement"] < MIN_AGREEMENT:
        yield f"semantic agreement {row['semantic_agreement']:.1%} is under {MIN_AGREEMENT:.0%}"
    if row["wer"] > baseline["wer"] + MAX_WER_OVER_BASELINE:
        yield f"word error rate {row['wer']:.1%} against {baseline['wer']:.1%}"
    if row["end_of_speech_rate"] < baseline["end_of_speech_rate"] - MAX_ENDS_UNDER_BASELINE:
        yield f"{row['end_of_speech_rate']:.0%} end by themselves against {baseline['end_of_speech_rate']:.0%}"
    if abs(row["length_ratio"] - 1) > MAX_LENGTH_CHANGE:
        yield f"speech is {row['length_ratio']:.2f} times as long"
    if row["longest_ratio"] > MAX_LONGEST_RATIO:
        yield f"one text is {row['longest_ratio']:.1f} times as long"


def worse(document: Mapping[str, Any], frozen: Mapping[str, Any]) -> list[str]:
    """One sentence for each policy that is worse than it was frozen, over the texts that both have."""
    before = {row["policy"]: row for row in frozen["rows"]}
    return [
        f"{row['policy']}: {sentence}"
        for row in document["rows"]
        for sentence in _against_frozen(row, before.get(row["policy"]))
    ]


def _against_frozen(row: Mapping[str, Any], before: Mapping[str, Any] | None) -> Iterable[str]:
    if before is None:
        if row["verdict"] == FAIL:
            yield f"fails, and no frozen row says that it may: {row['reason']}"
        return
    if before["verdict"] == UNSUPPORTED:
        return
    if row["verdict"] == UNSUPPORTED:
        yield f"ran when it was frozen, and now: {row['reason']}"
        return
    if row["verdict"] == FAIL and before["verdict"] != FAIL:
        yield f"fails, and did not when it was frozen: {row['reason']}"
    elif row["logit_rel_err"] > MAX_LOGIT_ERR >= before["logit_rel_err"]:
        yield f"logits are off by {row['logit_rel_err']:.0%}; it was {before['logit_rel_err']:.0%}"
    common = min(row["num_texts"], before["num_texts"])
    (wer, ends), (wer_before, ends_before) = rates(row, common), rates(before, common)
    if wer > wer_before + MAX_WER_OVER_FROZEN:
        yield f"word error rate {wer:.1%}; it was {wer_before:.1%}"
    if ends < ends_before - MAX_ENDS_UNDER_FROZEN:
        yield f"{ends:.1%} of the texts end by themselves; it was {ends_before:.1%}"


def rates(row: Mapping[str, Any], count: int) -> tuple[float, float]:
    """(word error rate, share that ended by itself) over the first `count` texts of a row that ran."""
    texts = row["texts"]
    return sum(texts["errors"][:count]) / sum(texts["words"][:count]), sum(texts["ended"][:count]) / count
