"""Training batches of the DualAR, made in worker processes: the very prompts that serving makes, then the speech.

Pure NumPy and the project's own `fishjax.text.prompt`; no JAX arrays. Rules of what is trained:

- without a reference the default voice speaks, always;
- with one (up to 4 s), the voice of the reference speaks;
- some items have one or two finished segments before, as long texts do;
- texts are varied as people type them (full stops, digits), the sound stays.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fishjax.bench.gate.texts import DIGITS
from fishjax.text.prompt import Conversation, Prompter, Reference
from fishjax.text.tokenizer import Tokenizer
from tools.minnow.codes import read_codes
from tools.minnow.voices import DEFAULT_VOICE

MAX_REFERENCE_FRAMES = 86  # 4 s: longer references are trimmed when served
_DIGIT_OF = {word: str(i) for i, word in enumerate(DIGITS)}


@dataclass(frozen=True)
class Bucket:
    """Batches of one shape: `rows` prompts of at most `length` columns."""

    length: int
    rows: int


@dataclass(frozen=True)
class Recipe:
    """Where batches come from."""

    codes: Path
    tokenizer: Path
    num_codebooks: int
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class Batch:
    """`columns_BKT` int16 (B, C+1, T), zero columns at the end; `labelled_BT` bool: the next column is to be learnt."""

    columns_BKT: np.ndarray
    labelled_BT: np.ndarray


def as_typed(text: str, rng: random.Random) -> str:
    """The text as somebody might type it: digits as figures, a comma before please, a full stop."""
    words = text.split()
    if all(word in _DIGIT_OF for word in words):
        if rng.random() < 0.12:
            text = " ".join(_DIGIT_OF[word] for word in words)
    elif words[-1] == "please" and len(words) > 2 and rng.random() < 0.2:
        text = " ".join(words[:-1]) + ", please"
    if text[-1].isalnum() and rng.random() < 0.25:
        text += "."
    return text


class Builder:
    """Draws items from the codes that exist so far and turns them into prompts with speech."""

    def __init__(self, recipe: Recipe, seed: int):
        self._recipe, self.rng = recipe, random.Random(seed)
        self._prompter = Prompter(Tokenizer.from_file(recipe.tokenizer), recipe.num_codebooks)
        self._seen: set[Path] = set()
        self._items: dict[tuple[str, str], list] = defaultdict(list)

    def refresh(self) -> int:
        """Takes in new codes files; returns the number of utterances known."""
        for path in sorted(self._recipe.codes.glob("[0-9]*.npz")):
            if path not in self._seen:
                self._seen.add(path)
                for record, codes_KT in read_codes(path):
                    self._items[record["voice"], record["kind"]].append((record["text"], codes_KT))
        return sum(map(len, self._items.values()))

    def _draw(self, voice: str, closed: float) -> tuple[str, np.ndarray]:
        kind = "closed" if self.rng.random() < closed else "free"
        pool = self._items.get((voice, kind)) or self._items[voice, "free" if kind == "closed" else "closed"]
        text, codes_KT = self.rng.choice(pool)
        return as_typed(text, self.rng), codes_KT

    def item(self) -> tuple[np.ndarray, np.ndarray]:
        """(columns (C+1, T) int32, labelled (T,) bool) of one prompt with its speech and its end."""
        conversation = Conversation(self._prompter)
        voice, references = DEFAULT_VOICE, []
        if self.rng.random() < 0.3:
            voices = sorted({voice for voice, _ in self._items})
            voice = self.rng.choice([*voices, DEFAULT_VOICE])
            text, codes_KT = self._draw(voice, 0.5)
            if codes_KT.shape[1] <= MAX_REFERENCE_FRAMES:
                references.append(Reference(text, codes_KT))
            else:
                voice = DEFAULT_VOICE
        conversation.system(references)
        segments = self.rng.choices((1, 2, 3), weights=(86, 11, 3))[0]
        spans = []
        for _ in range(segments):
            text, codes_KT = self._draw(voice, 0.85)
            conversation.user(text)
            conversation.assistant_header()
            start = conversation.columns_CT.shape[1]
            conversation.assistant_history(codes_KT)
            spans.append((start - 1, start + codes_KT.shape[1]))
        columns_CT = conversation.columns_CT
        labelled_T = np.zeros(columns_CT.shape[1], bool)
        for first, end in spans:
            labelled_T[first:end] = True
        return columns_CT, labelled_T

    def batches(self):
        """Endless batches: an item goes to the shortest bucket that holds it; too long ones are dropped."""
        waiting: dict[Bucket, list] = {bucket: [] for bucket in self._recipe.buckets}
        refreshed = time.monotonic()
        while True:
            if time.monotonic() - refreshed > 10:
                self.refresh()
                refreshed = time.monotonic()
            columns_CT, labelled_T = self.item()
            fitting = [bucket for bucket in self._recipe.buckets if columns_CT.shape[1] <= bucket.length]
            if not fitting:
                continue
            bucket = fitting[0]
            waiting[bucket].append((columns_CT, labelled_T))
            if len(waiting[bucket]) == bucket.rows:
                yield self._stack(bucket, waiting[bucket])
                waiting[bucket] = []

    def _stack(self, bucket: Bucket, items: list) -> Batch:
        columns = np.zeros((bucket.rows, self._recipe.num_codebooks + 1, bucket.length), np.int16)
        labelled = np.zeros((bucket.rows, bucket.length), bool)
        for at, (columns_CT, labelled_T) in enumerate(items):
            columns[at, :, : columns_CT.shape[1]] = columns_CT
            labelled[at, : len(labelled_T)] = labelled_T
        return Batch(columns, labelled)


def _work(recipe: Recipe, seed: int, queue) -> None:
    builder = Builder(recipe, seed)
    while builder.refresh() < 100:
        time.sleep(0.5)
    for batch in builder.batches():
        queue.put(batch)


def start_workers(recipe: Recipe, processes: int, seed: int):
    """Starts daemon processes; returns (the queue that they put `Batch`es into, the processes, to be terminated)."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue(maxsize=3 * processes)
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"  # workers must not take the accelerator's memory
    try:
        workers = [
            context.Process(target=_work, args=(recipe, 1000 * seed + index, queue), daemon=True)
            for index in range(processes)
        ]
        for worker in workers:
            worker.start()
    finally:
        if before is None:
            del os.environ["JAX_PLATFORMS"]
        else:
            os.environ["JAX_PLATFORMS"] = before
    return queue, workers
