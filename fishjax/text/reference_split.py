"""Long text to batches as the original cuts it (reference mode), defects included: for `verify` and tests.

Users get `split.split_for_speech`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fishjax.text.split import MAX_TURNS, SPEAKER_TAG

_EMOJI = re.compile("[\U0001f600-\U0001f64f\U0001f300-\U0001f5ff\U0001f680-\U0001f6ff\U0001f1e0-\U0001f1ff]")


def split_text_by_speaker(text: str) -> list[str]:
    """Turns as the original cuts them: a speaker tag and what follows it. Text before the first tag is dropped."""
    starts = [match.start() for match in SPEAKER_TAG.finditer(text)]
    ends = [*starts, len(text)][1:]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def group_turns_into_batches(turns: Sequence[str], max_speakers: int = MAX_TURNS, max_bytes: int = 300) -> list[str]:
    """Join turns by newlines, greedily, as the original does.

    A batch is full at `max_speakers` turns (turns, not speakers) or when the next turn would take its UTF-8 bytes
    past `max_bytes`. Newlines are not counted, and one long turn makes one long batch.
    """
    batches: list[list[str]] = []
    num_bytes = 0
    for turn in turns:
        turn_bytes = len(turn.encode("utf-8"))
        if not batches or len(batches[-1]) >= max_speakers or num_bytes + turn_bytes > max_bytes:
            batches.append([])
            num_bytes = 0
        batches[-1].append(turn)
        num_bytes += turn_bytes
    return ["\n".join(batch) for batch in batches]


def clean_text(text: str) -> str:
    """The original's cleaning of training texts: trims, straightens single quotes, drops some emoji, joins commas."""
    text = text.strip().replace("\u2018", "'").replace("\u2019", "'")
    return re.sub(",{2,}", ",", _EMOJI.sub("", text))
