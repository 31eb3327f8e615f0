"""The judges in worker processes, for trainers; and the ceilings: what they hear in the teachers' own sound.

The judges themselves are `fishjax.bench.gate.judge`.
`python -m tools.minnow.judge CORPUS_DIR [--out ceilings.json]` measures the ceilings.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from fishjax.bench.gate.judge import hear, word_errors
from fishjax.bench.gate.texts import held_out
from tools.minnow.voices import VOICES, Teachers


def _judge_one(job: tuple[str, np.ndarray, int]) -> tuple[int, int, str]:
    text, audio_T, rate_hz = job
    heard = hear(audio_T, rate_hz)
    wanted = text.split()
    return word_errors(wanted, heard.split()), len(wanted), heard


class Judges:
    """pocketsphinx in worker processes, started once: `wer` may be called from a thread while training goes on."""

    def __init__(self, processes: int):
        self._pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))

    def wer(self, texts: Sequence[str], audios: Sequence[np.ndarray], rate_hz: int) -> tuple[float, list[str]]:
        """(word error rate over all the words, what was heard in each); texts are closed-vocabulary words."""
        jobs = [(text, audio, rate_hz) for text, audio in zip(texts, audios, strict=True)]
        results = list(self._pool.map(_judge_one, jobs))
        errors, words = sum(r[0] for r in results), sum(r[1] for r in results)
        return errors / max(words, 1), [r[2] for r in results]

    def close(self) -> None:
        """Ends the worker processes."""
        self._pool.shutdown()


def main() -> None:
    """Measures the ceilings: what the judge hears in the teachers' own sound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flite-root", type=Path)
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    teachers, judges = Teachers(arguments.flite_root), Judges(1)
    ceilings = {}
    for voice in teachers.voices:
        prompts = held_out()[: arguments.items]
        audios = [teachers.speak(text, voice, seed=i) / np.float32(32768) for i, text in enumerate(prompts)]
        wer, heard = judges.wer(prompts, audios, 22050)
        ceilings[voice] = round(100 * wer, 2)
        wrong = [f"{t} -> {h}" for t, h in zip(prompts, heard, strict=True) if t != h]
        print(voice, ceilings[voice], "%", wrong[:4], flush=True)
    if arguments.out:
        document = {"judge": "pocketsphinx, JSGF loop over the closed vocabulary", "items": arguments.items}
        arguments.out.write_text(json.dumps({**document, "wer_percent": ceilings}, indent=1) + "\n", encoding="utf-8")
    assert set(ceilings) <= set(VOICES)
    judges.close()


if __name__ == "__main__":
    main()
