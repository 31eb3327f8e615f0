"""What minnow learns to say: seeded closed-vocabulary prompts, and free English from WordNet's usage examples.

The vocabulary and the held-out prompts have their home in `fishjax.bench.gate.texts`. Knows words only: no audio, no
tokens. `python -m tools.minnow.texts DICT_DIR OUT` extracts the free sentences from an unpacked `wordnet-base` package
(`usr/share/wordnet`), one a line.
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

from fishjax.bench.gate.texts import CLOSED_VOCABULARY, command, digit_string, held_out


def word_list(rng: random.Random) -> str:
    """One to six words of the vocabulary in no order: teaches each word apart from its usual neighbours."""
    return " ".join(rng.choice(CLOSED_VOCABULARY) for _ in range(rng.randint(1, 6)))


def closed_prompt(rng: random.Random) -> str:
    """One training prompt of the closed vocabulary."""
    kind = rng.random()
    if kind < 0.4:
        return digit_string(rng)
    return command(rng) if kind < 0.9 else word_list(rng)


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
