"""The corpus on its way to the device: shards are cut to rows of a frame in a thread, and added to arrays there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tools.minnow.codes import MAX_FRAMES, Encoder, write_codes
from tools.minnow.make_corpus import finished_shards, read_shard

Rows = dict[str, np.ndarray]  # as many rows in each: "audio_RS" (rows, samples_per_frame) and so on
Cut = Callable[[Path], Rows]


def cut_audio(row: int) -> Cut:
    """A shard's utterances end to end: `audio_RS`."""

    def cut(path: Path) -> Rows:
        pcm, _, _ = read_shard(path)
        return {"audio_RS": pcm[: len(pcm) // row * row].reshape(-1, row)}

    return cut


def cut_audio_and_codes(row: int, encoder: Encoder, kept: Path | None) -> Cut:
    """Each utterance starts a row: `audio_RS`, and `codes_RK` made of it alone, as the DualAR learns them.

    Codes files in the folder `kept` are taken as they are, and new ones are put there.
    """

    def codes_of(path: Path, pcm: np.ndarray, starts: np.ndarray, records: list[dict]) -> np.ndarray:
        if kept is None:
            return encoder.shard(pcm, starts, records)[0]
        if not (kept / path.name).exists():
            kept.mkdir(parents=True, exist_ok=True)
            write_codes(kept / path.name, *encoder.shard(pcm, starts, records))
        with np.load(kept / path.name) as file:
            return file["codes"]

    def cut(path: Path) -> Rows:
        pcm, starts, records = read_shard(path)
        clips = [pcm[a:b] for a, b in pairwise(starts) if b - a <= MAX_FRAMES * row]
        audio_RS = np.concatenate([np.pad(clip, (0, -len(clip) % row)) for clip in clips]).reshape(-1, row)
        codes_KR = codes_of(path, pcm, starts, records)
        return {"audio_RS": audio_RS, "codes_RK": np.ascontiguousarray(codes_KR.T)}

    return cut


class Feeder:
    """Cuts finished shards in a thread until there are `max_rows`; `arrays` on the device hold `num_rows` so far."""

    def __init__(self, folder: Path, cut: Cut, chunk_rows: int, max_rows: int):
        self._folder, self._cut, self._chunk_rows = folder, cut, chunk_rows
        self._max_rows = max_rows // chunk_rows * chunk_rows
        self._chunks: queue.Queue[Rows | None] = queue.Queue(maxsize=8)
        self._put = jax.jit(
            lambda arrays, chunk, at: {
                name: jax.lax.dynamic_update_slice_in_dim(rows, chunk[name], at, 0) for name, rows in arrays.items()
            },
            donate_argnums=0,
        )
        self.arrays: dict[str, jax.Array] = {}
        self.num_rows, self.done = 0, False
        threading.Thread(target=self._run, daemon=True).start()

    def feed(self) -> None:
        """Adds what is ready; `done` once nothing more comes."""
        while not self._chunks.empty():
            chunk = self._chunks.get()
            if chunk is None:
                self.done = True
                return
            if not self.arrays:
                self.arrays = {n: jnp.zeros((self._max_rows, rows.shape[1]), rows.dtype) for n, rows in chunk.items()}
            self.arrays = self._put(self.arrays, chunk, self.num_rows)
            self.num_rows += self._chunk_rows

    def _run(self) -> None:
        seen: set[Path] = set()
        held: list[Rows] = []
        held_rows = sent = 0
        while sent < self._max_rows:
            last = (self._folder / "done").exists()
            for path in finished_shards(self._folder):
                if path in seen:
                    continue
                seen.add(path)
                held.append(self._cut(path))
                held_rows += len(held[-1]["audio_RS"])
                while held_rows >= self._chunk_rows and sent < self._max_rows:
                    joined = {name: np.concatenate([rows[name] for rows in held]) for name in held[0]}
                    self._chunks.put({name: rows[: self._chunk_rows] for name, rows in joined.items()})
                    held = [{name: rows[self._chunk_rows :] for name, rows in joined.items()}]
                    held_rows, sent = held_rows - self._chunk_rows, sent + self._chunk_rows
            if last:
                break
            time.sleep(1.0)
        self._chunks.put(None)
