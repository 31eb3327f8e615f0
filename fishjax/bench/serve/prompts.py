"""What callers say: each text once, so that no cache can help. Seeded; in minnow's vocabulary, which is English."""

from __future__ import annotations

import random

from fishjax.bench.gate.texts import CLOSED_VOCABULARY, command

_TAIL_WORDS = 4
NUM_PROMPTS = len(CLOSED_VOCABULARY) ** _TAIL_WORDS


def prompt(seed: int, number: int) -> str:
    """The text of request `number`, 0 to NUM_PROMPTS: a command, then four words that no other number has."""
    size = len(CLOSED_VOCABULARY)
    tail = [CLOSED_VOCABULARY[number // size**i % size] for i in range(_TAIL_WORDS)]
    return f"{command(random.Random(f'{seed} {number}'))} {' '.join(tail)}"
