"""Makes the corpus: seeded, in many processes, in shards that appear as they are finished.

A shard is `NNNNN.npz`: `pcm` (all its utterances end to end, int16 at 22,050 Hz), `starts` (one more than the
utterances, samples) and `records` (JSON: text, voice, seed, kind). Shard 00000 holds the held-out prompts, spoken by
the default voice, and is for evaluation only. Every shard has the same mix, so training may begin with the first.
Which utterance is in which shard depends only on the arguments: a corpus is remade, never carried.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import time
from pathlib import Path

import numpy as np

from fishjax.bench.gate.texts import held_out
from tools.minnow import texts
from tools.minnow.voices import DEFAULT_VOICE, FLITE, SHIFTED, VOICES, Teachers

SHARD_ITEMS = 160
HELD_OUT_SHARD = 0


def plan(sentences: list[str], scale: float, voices: tuple[str, ...], seed: int = 1) -> list[dict]:
    """All training utterances in their order; `scale` 1.0 is about 48 hours.

    The default voice says seven tenths of the closed vocabulary and half of the free English.
    """
    rng = random.Random(seed)
    others = [voice for voice in voices if voice != DEFAULT_VOICE]
    items = []
    for text in texts.closed_prompts(int(36000 * scale), seed):
        items.append({"text": text, "voice": DEFAULT_VOICE, "kind": "closed"})
    for i, text in enumerate(texts.closed_prompts(int(16000 * scale), seed + 1)):
        items.append({"text": text, "voice": others[i % len(others)], "kind": "closed"})
    free = list(sentences)
    rng.shuffle(free)
    for i, text in enumerate(free[: int(25000 * scale)]):
        voice = DEFAULT_VOICE if i % 2 else others[(i // 2) % len(others)]
        items.append({"text": text, "voice": voice, "kind": "free"})
    rng.shuffle(items)
    for item in items:
        item["seed"] = rng.randrange(2**31)
        item["speed"] = round(rng.uniform(0.95, 1.05), 3)
    return items


def held_out_items(sentences: list[str], voices: tuple[str, ...]) -> list[dict]:
    """The evaluation shard: every held-out prompt by the default voice, then 24 free sentences by all voices."""
    items = [
        {"text": text, "voice": DEFAULT_VOICE, "kind": "closed", "seed": i, "speed": 1.0}
        for i, text in enumerate(held_out())
    ]
    rng = random.Random(7)
    for i, text in enumerate(rng.sample(sentences, min(24, len(sentences)))):
        items.append({"text": text, "voice": voices[i % len(voices)], "kind": "free", "seed": i, "speed": 1.0})
    return items


def write_shard(path: Path, items: list[dict], teachers: Teachers) -> float:
    """Speak the items into one shard (atomically); returns the seconds of sound. Skips what a teacher cannot say."""
    pcm, starts, records, skipped = [], [0], [], []
    for item in items:
        try:
            audio = teachers.speak(item["text"], item["voice"], seed=item["seed"], speed=item["speed"])
        except ValueError as error:
            skipped.append(f"{item['text']!r}: {error}")
            continue
        pcm.append(audio)
        starts.append(starts[-1] + len(audio))
        records.append(item)
    for line in skipped:
        print(f"{path.name}: skipped {line}", flush=True)
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as file:
        np.savez(file, pcm=np.concatenate(pcm), starts=np.array(starts, np.int64), records=json.dumps(records))
    partial.rename(path)
    return starts[-1] / 22050


def read_shard(path: Path) -> tuple[np.ndarray, np.ndarray, list[dict]]:
    """(pcm int16, starts int64, records) of one shard."""
    with np.load(path) as shard:
        return shard["pcm"], shard["starts"], json.loads(str(shard["records"]))


def finished_shards(folder: Path) -> list[Path]:
    """The training shards that are complete now, in order."""
    return [path for path in sorted(folder.glob("[0-9]*.npz")) if int(path.stem) != HELD_OUT_SHARD]


_teachers: Teachers | None = None


def _start(flite_root: Path | None) -> None:
    global _teachers
    os.nice(5)
    _teachers = Teachers(flite_root)


def _work(job: tuple[Path, list[dict]]) -> float:
    path, items = job
    if path.exists():
        return 0.0
    assert _teachers is not None
    return write_shard(path, items, _teachers)


def main() -> None:
    """Command line; see README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=Path, required=True, help="free English, one sentence a line")
    parser.add_argument("--flite-root", type=Path, help="folder of the unpacked flite packages; none: no flite voices")
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 3))
    parser.add_argument("--scale", type=float, default=1.0, help="size of the corpus; 1.0 is about 48 hours")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    sentences = texts.read_sentences(arguments.sentences)
    voices = VOICES if arguments.flite_root else (DEFAULT_VOICE, *SHIFTED)
    assert set(FLITE) < set(VOICES)
    evaluation = held_out_items(sentences, voices)
    spoken = {item["text"] for item in evaluation}
    items = [item for item in plan(sentences, arguments.scale, voices) if item["text"] not in spoken]
    # The evaluation shard is spoken by several processes too: it is wanted first.
    jobs = [(arguments.out / f"{HELD_OUT_SHARD:05d}.npz", evaluation)]
    for number, first in enumerate(range(0, len(items), SHARD_ITEMS), start=1):
        jobs.append((arguments.out / f"{number:05d}.npz", items[first : first + SHARD_ITEMS]))
    started, seconds = time.monotonic(), 0.0
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes, initializer=_start, initargs=(arguments.flite_root,)) as pool:
        for done, made in enumerate(pool.imap_unordered(_work, jobs), start=1):
            seconds += made
            if done % 20 == 0 or done == len(jobs):
                wall = time.monotonic() - started
                print(f"{done}/{len(jobs)} shards, {seconds / 3600:.2f} h in {wall:.0f} s", flush=True)
    (arguments.out / "done").touch()


if __name__ == "__main__":
    main()
