"""What people read of the gate: a table of its rows, and what it says of the voice that ships."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..markdown import table
from .texts import NUM_CHOOSING, NUM_HELD_OUT
from .verdict import BASELINE

_HEAD = (
    *("policy", "verdict", "first frames", "of all texts", "agreement", "logit error", "word errors"),
    *("end by themselves", "length", "longest", "codec"),
)


def gate_table(document: Mapping[str, Any]) -> str:
    """One markdown table, and a line for each verdict that needs its reason."""
    rows = table(_HEAD, map(_cells, document["rows"]), words=(0, 1))
    reasons = [f"- `{row['policy']}`: {row['reason']}" for row in document["rows"] if row["reason"]]
    return rows + ("\n\n" + "\n".join(reasons) if reasons else "")


def _cells(row: Mapping[str, Any]) -> list[str]:
    start = [f"`{row['policy']}`", row["verdict"]]
    if "wer" not in row:
        return [*start, *["-"] * (len(_HEAD) - 2)]
    return [
        *start,
        f"{'equal' if row['first_frames_equal'] else 'differ'}, {row['identical_prefix_frames']} identical",
        f"{row['first_frames_equal_rate']:.0%}",
        f"{row['semantic_agreement']:.1%}",
        f"{row['logit_rel_err']:.2f}",
        f"{row['wer']:.1%}",
        f"{row['end_of_speech_rate']:.0%}",
        f"{row['length_ratio']:.2f}",
        f"{row['longest_ratio']:.2f}",
        f"{row['codec_mel']:.3f}",
    ]


def voice_table(document: Mapping[str, Any]) -> str:
    """Word error rates of the baseline: prompts that chose nothing, those that chose the checkpoint, all."""
    honest = NUM_HELD_OUT - NUM_CHOOSING
    parts = {
        f"**minnow, text to sound, {honest} prompts that chose nothing**": slice(0, honest),
        f"the {NUM_CHOOSING} that chose the checkpoint": slice(honest, None),
        f"all {NUM_HELD_OUT}": slice(None),
    }
    lines = ["| what is judged | word error rate |", "| --- | --- |"]
    for what, part in parts.items():
        lines.append(f"| {what} | {_words(document, part)} |")
    texts = baseline_row(document)["texts"]
    return "\n".join(lines) + f"\n\n{sum(texts['ended'])} of {len(texts['ended'])} ended by themselves."


def voice_sentence(document: Mapping[str, Any]) -> str:
    """How well the voice is understood, in a sentence."""
    honest = NUM_HELD_OUT - NUM_CHOOSING
    figures = _words(document, slice(0, honest))
    return f"On {honest} prompts that it was neither trained on nor chosen by, a recogniser gets {figures} wrong."


def baseline_row(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row of the baseline."""
    return next(row for row in document["rows"] if row["verdict"] == BASELINE)


def _words(document: Mapping[str, Any], part: slice) -> str:
    texts = baseline_row(document)["texts"]
    errors, words = sum(texts["errors"][part]), sum(texts["words"][part])
    return f"{100 * errors / words:.1f} % ({errors} of {words} words)"
