"""Keys and values of the columns that a prompt owes to its voice alone, kept on the device for the next one with it.

    columns of a voice -> digest -> blocks copied out of the slot that read them first -> into every slot after

Kept by content, so a voice is the same one whether it is the default, was stored, or came with the request. What was
used longest ago goes first when a budget of bytes is full. Knows nothing of slots or programs.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from fishjax.model.cache import KVCache

BLOCK_COLUMNS = 128
"""Columns of a block: snapshots are cut into these, so that two programs copy any of them."""


@dataclass(frozen=True, slots=True)
class VoiceKey:
    """The first `length` columns of a prompt, by their content."""

    digest: bytes
    length: int

    @classmethod
    def of(cls, columns_CT: np.ndarray) -> VoiceKey:
        """The key of these columns int32 (C+1, T)."""
        content = np.ascontiguousarray(columns_CT)
        return cls(hashlib.sha256(repr(content.shape).encode() + content.tobytes()).digest(), content.shape[1])


class Snapshots:
    """Blocks (one row, BLOCK_COLUMNS positions) of voices, at most `max_bytes` in all.

    `num_bytes` is what they take now; `hits` and `misses` count what was asked for.
    """

    def __init__(self, max_bytes: int, block_bytes: int, block_columns: int):
        self.num_bytes = self.hits = self.misses = 0
        self.block_columns = block_columns
        self._max_bytes = max_bytes
        self._block_bytes = block_bytes
        self._kept: OrderedDict[VoiceKey, tuple[KVCache, ...]] = OrderedDict()

    def find(self, key: VoiceKey) -> tuple[KVCache, ...] | None:
        """The blocks of a voice, if they are here."""
        if (blocks := self._kept.get(key)) is None:
            self.misses += 1
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return blocks

    def make_room(self, key: VoiceKey) -> list[int]:
        """Where the blocks of a voice that shall be added begin; none when it is here, or larger than all there is."""
        starts = list(range(0, key.length, self.block_columns))
        needed = len(starts) * self._block_bytes
        if key in self._kept or needed > self._max_bytes:
            return []
        while self.num_bytes + needed > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= len(oldest) * self._block_bytes
        return starts

    def add(self, key: VoiceKey, blocks: tuple[KVCache, ...]) -> None:
        """Keep the blocks of a voice that room was made for."""
        self._kept[key] = blocks
        self.num_bytes += len(blocks) * self._block_bytes
