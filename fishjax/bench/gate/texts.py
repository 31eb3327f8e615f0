"""What the gate has a voice say: held-out prompts of minnow's closed vocabulary, seeded. Knows words only.

The vocabulary has its home here, because training (`tools/minnow/texts.py`) must keep clear of these prompts.
"""

from __future__ import annotations

import random

from fishjax.errors import InvalidRequest

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VERBS = ("open", "close", "lock", "paint", "find", "move")
COLOURS = ("red", "blue", "green")
QUALITIES = ("old", "new", "small")
ADJECTIVES = COLOURS + QUALITIES
NOUNS = ("door", "window", "box", "gate", "table", "lamp", "chair", "garden")
TAILS = ("please", "now")
CLOSED_VOCABULARY = (*DIGITS, *VERBS, "the", *ADJECTIVES, *NOUNS, *TAILS)

NUM_HELD_OUT = 160
NUM_CHOOSING = 48
"""The first of them chose minnow's checkpoint while it trained; the others are the honest ones."""
FIXED_INPUT = "paint the window gate blue please"
"""Of 24 held-out prompts the one in whose first five frames minnow (float32) is surest of its least sure code."""
_HELD_OUT_SEED = 90210
_PLACES = ("garden", "window", "door", "table")  # nouns a person puts before another noun: "the garden gate"


def digit_string(rng: random.Random) -> str:
    """One to seven digits, as words; one in five strings repeats a digit on purpose (the hard case)."""
    count = rng.choices(range(1, 8), weights=(2, 3, 5, 5, 5, 3, 3))[0]
    digits = [rng.choice(DIGITS) for _ in range(count)]
    if count > 1 and rng.random() < 0.2:
        start = rng.randrange(count - 1)
        for i in range(start, min(count, start + rng.randint(2, 3))):
            digits[i] = digits[start]
    return " ".join(digits)


def _thing(rng: random.Random) -> list[str]:
    words = ["the"] if rng.random() < 0.9 else []
    kind = rng.random()
    if kind < 0.45:
        words.append(rng.choice(ADJECTIVES))
    elif kind < 0.6:
        words += [rng.choice(QUALITIES), rng.choice(COLOURS)]
    noun = rng.choice(NOUNS)
    if rng.random() < 0.3:
        words.append(rng.choice([place for place in _PLACES if place != noun]))
    return [*words, noun]


def command(rng: random.Random) -> str:
    """A command or a name of a thing: "please open the garden gate", "move the small blue box now"."""
    words = _thing(rng)
    form = rng.random()
    if form < 0.07:
        return " ".join(words)
    words.insert(0, rng.choice(VERBS))
    if words[0] == "paint" and rng.random() < 0.5:
        words.append(rng.choice(COLOURS))
    if rng.random() < 0.12:
        words += [rng.choice(DIGITS) for _ in range(rng.randint(1, 3))]
    if form < 0.22:
        words.insert(0, rng.choice(TAILS))
    elif form < 0.6:
        words.append(rng.choice(TAILS))
    elif form < 0.66:
        words += ["now", "please"]
    elif form < 0.72:
        words += [rng.choice(VERBS), *_thing(rng)]
    return " ".join(words)


def held_out() -> list[str]:
    """The test prompts, alternating digit strings (3 to 7) and commands (3 words or more); never in training."""
    rng = random.Random(_HELD_OUT_SEED)
    chosen: list[str] = []
    while len(chosen) < NUM_HELD_OUT:
        text = digit_string(rng) if len(chosen) % 2 else command(rng)
        if len(text.split()) >= 3 and text not in chosen:
            chosen.append(text)
    return chosen


def gate_texts(count: int) -> list[str]:
    """The first `count` test prompts, those that never chose a checkpoint before those that did.

    Raises InvalidRequest for a count that there is no such number of.
    """
    if not 1 <= count <= NUM_HELD_OUT:
        raise InvalidRequest(f"--texts must lie in 1..{NUM_HELD_OUT} (so many prompts are held out), not {count}")
    texts = held_out()
    return (texts[NUM_CHOOSING:] + texts[:NUM_CHOOSING])[:count]
