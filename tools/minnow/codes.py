"""The corpus as codes: shards go through the codec's encoder on the device, and come to lie beside their texts.

A codes file is `NNNNN.npz`: `codes` (C, all frames) int16, `starts` (frames), `records` (JSON), as in the shards.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fishjax.codec import Codec
from tools.minnow.convs import convolutions, plain_kind
from tools.minnow.make_corpus import finished_shards, read_shard
from tools.minnow.training import Model

_FRAMES = (48, 80, 160)  # lengths that utterances are padded to
MAX_FRAMES = _FRAMES[-1]
"""Longer utterances are left out."""


class Encoder:
    """Fixed shapes, `rows` utterances a call: three compiled programs for any corpus."""

    def __init__(self, codec: Codec, rows: int = 64):
        model = Model(codec)
        self._rows, self._row, self._params = rows, codec.config.samples_per_frame, model.params

        def encode(params, pcm_BT):
            with convolutions({}, plain_kind()):
                return model.build(params).encode(pcm_BT.astype(jnp.float32) / 32768)[0].astype(jnp.int16)

        self._encode = jax.jit(encode)

    def shard(self, pcm: np.ndarray, starts: np.ndarray, records: list[dict]):
        """(codes (C, frames) int16, starts in frames, records) of one shard; utterances over 7.4 s are left out."""
        frames = -(-np.diff(starts) // self._row)
        found: dict[int, np.ndarray] = {}
        for index, size in enumerate(_FRAMES):
            shortest = _FRAMES[index - 1] if index else 0
            members = np.flatnonzero((frames <= size) & (frames > shortest))
            for first in range(0, len(members), self._rows):
                rows = members[first : first + self._rows]
                batch = np.zeros((self._rows, size * self._row), np.int16)
                for at, item in enumerate(rows):
                    clip = pcm[starts[item] : starts[item + 1]]
                    batch[at, : len(clip)] = clip
                codes_BKT = np.asarray(self._encode(self._params, batch))
                found |= {int(item): codes_BKT[at, :, : frames[item]] for at, item in enumerate(rows)}
        kept = sorted(found)
        ends = np.cumsum([0, *(found[i].shape[1] for i in kept)])
        return np.concatenate([found[i] for i in kept], axis=1), ends, [records[i] for i in kept]


def encode_corpus(encoder: Encoder, corpus: Path, out: Path, stop: threading.Event, limit: int | None = None) -> None:
    """Encodes shards (at most `limit`) as they appear, until the corpus is done or `stop`; meant for a thread."""
    out.mkdir(parents=True, exist_ok=True)
    made = 0
    while not stop.is_set():
        last = (corpus / "done").exists()
        for path in finished_shards(corpus):
            target = out / path.name
            if target.exists():
                continue
            write_codes(target, *encoder.shard(*read_shard(path)))
            made += 1
            if stop.is_set() or made == limit:
                return
        if last:
            (out / "done").touch()
            return
        time.sleep(1.0)


def write_codes(path: Path, codes_KR: np.ndarray, starts: np.ndarray, records: list[dict]) -> None:
    """A codes file, whole or not at all."""
    partial = path.with_suffix(".tmp")
    with partial.open("wb") as file:
        np.savez(file, codes=codes_KR, starts=starts, records=json.dumps(records))
    partial.rename(path)


def read_codes(path: Path) -> list[tuple[dict, np.ndarray]]:
    """(record, codes (C, T) int16) of every utterance of a codes file."""
    with np.load(path) as file:
        codes, starts, records = file["codes"], file["starts"], json.loads(str(file["records"]))
    return [(record, codes[:, a:b]) for record, a, b in zip(records, starts[:-1], starts[1:], strict=True)]
