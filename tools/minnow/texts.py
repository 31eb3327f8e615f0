"""What minnow learns to say: seeded closed-vocabulary prompts, and free English from WordNet's usage examples.

Knows words only: no audio, no tokens. `python -m tools.minnow.texts DICT_DIR OUT` extracts the free sentences
from an unpacked `wordnet-base` package (`usr/share/wordnet`), one a line.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
VERBS = ("open", "close", "lock", "paint", "find", "move")
COLOURS = ("red", "blue", "green")
QUALITIES = ("old", "new", "small")
ADJECTIVES = COLOURS + QUALITIES
NOUNS = ("door", "window", "box", "gate", "table", "lamp", "chair", "garden")
TAILS = ("please", "now")
CLOSED_VOCABULARY = (*DIGITS, *VERBS, "the", *ADJECTIVES, *NOUNS, *TAILS)

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


def word_list(rng: random.Random) -> str:
    """One to six words of the vocabulary in no order: teaches each word apart from its usual neighbours."""
    return " ".join(rng.choice(CLOSED_VOCABULARY) for _ in range(rng.randint(1, 6)))


def closed_prompt(rng: random.Random) -> str:
    """One training prompt of the closed vocabulary."""
    kind = rng.random()
    if kind < 0.4:
        return digit_string(rng)
    return command(rng) if kind < 0.9 else word_list(rng)


def held_out(count: int = 160) -> list[str]:
    """The test prompts, alternating digit strings (3 to 7) and commands (3 words or more); never in training."""
    rng = random.Random(_HELD_OUT_SEED)
    chosen: list[str] = []
    while len(chosen) < count:
        text = digit_string(rng) if len(chosen) % 2 else command(rng)
        if len(text.split()) >= 3 and text not in chosen:
            chosen.append(text)
    return chosen


def closed_prompts(count: int, seed: int) -> list[str]:
    """`count` training prompts (repeats allowed: short ones are few), none of them held out."""
    rng, forbidden = random.Random(seed), set(held_out())
    prompts: list[str] = []
    while len(prompts) < count:
        text = closed_prompt(rng)
        if text not in forbidden:
            prompts.append(text)
    return prompts


def read_sentences(path: Path) -> list[str]:
    """Free English sentences, one a line, held-out prompts dropped (by text)."""
    forbidden = set(held_out())
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and line.lower() not in forbidden]


_QUOTED = re.compile(r'"([^"]+)"')
_PLAIN = re.compile(r"[A-Za-z][A-Za-z ',;!?.-]*")


def wordnet_sentences(folder: Path) -> list[str]:
    """Clean usage examples of three to fourteen words from WordNet's `data.*` files, sorted, each once."""
    found: set[str] = set()
    for part in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{part}").read_text(encoding="latin-1").splitlines():
            for quoted in _QUOTED.findall(line):
                text = re.sub(r"\s+", " ", quoted).strip(" -;,'")
                if _PLAIN.fullmatch(text) and 3 <= len(text.split()) <= 14 and len(text) <= 90 and "--" not in text:
                    found.add(text)
    return sorted(found)


if __name__ == "__main__":
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    sentences = wordnet_sentences(source)
    target.write_text("\n".join(sentences) + "\n", encoding="utf-8")
    print(f"{len(sentences)} sentences, {sum(len(s.split()) for s in sentences)} words -> {target}")
