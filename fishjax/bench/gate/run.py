"""The gate from end to end: the baseline, every policy beside it, the document, its frozen self."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fishjax.bench.header import make_header, see_gpu
from fishjax.bench.measure_jax import hello
from fishjax.speech import MINNOW
from fishjax.weights.precision import Precision

from .measure import FIRST_FRAMES, Unsupported, measure, read, row
from .texts import FIXED_INPUT, NUM_CHOOSING, NUM_HELD_OUT, gate_texts
from .verdict import UNSUPPORTED, judge

METHOD = (
    "Greedy, through the engine; held-out prompts of a closed vocabulary of 33 words. wer: pocketsphinx with a grammar "
    f"of any of them in any order, over the first {NUM_HELD_OUT - NUM_CHOOSING} texts, which never chose a checkpoint; "
    f"wer_choosing: over the {NUM_CHOOSING} that did. first_frames_equal: the first {FIRST_FRAMES} frames of "
    f"'{FIXED_INPUT}', all codes; first_frames_equal_rate: the same of all texts. semantic_agreement, logit_rel_err: "
    "the model fed the baseline's frames, share of semantic tokens with the same argmax, worst ||error|| / ||logits|| "
    "of a frame. length_ratio, longest_ratio: frames over the baseline's, of all texts and the worst text. codec_mel: "
    "log10-mel L1 of the codec's round trip on the baseline's speech. Blocks of weights are spread by powers of two "
    "before they are quantised, which changes no result but that of a misplaced scale."
)


def run(folder: Path, policies: Sequence[str], num_texts: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Rows of the baseline and of every other policy, judged; `say` hears what is being done.

    Raises InvalidRequest for a policy or a number of texts that cannot be, WeightsError for a folder that is not whole.
    """
    texts = gate_texts(num_texts)
    default = Precision.default()
    others = [policy for policy in policies if Precision.parse(policy) != default]
    name = default.slow
    baseline = measure(read(folder, name), name, texts, _prefixed(say, name))
    first = row(baseline, baseline)
    rows = [first]
    for policy in others:
        try:
            rows.append(row(measure(read(folder, policy), policy, texts, _prefixed(say, policy), baseline), baseline))
        except Unsupported as error:
            rows.append({"policy": policy, "verdict": UNSUPPORTED, "reason": str(error).strip()})
    for one in rows:
        if "verdict" not in one:
            one["verdict"], one["reason"] = judge(one, first, folder.samefile(MINNOW))
    return rows


def make_document(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What a file of the gate holds."""
    seen = hello()
    gpu = see_gpu() if seen["platform"] == "gpu" else None
    header = make_header("gate", seen["device"], seen["versions"], gpu, [], METHOD)
    return {"header": header, "model": folder.resolve().name, "rows": rows}


def _prefixed(say: Callable[[str], None], policy: str) -> Callable[[str], None]:
    return lambda what: say(f"{policy}: {what}")
