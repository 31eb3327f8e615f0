"""A prompt cut into chunks: what the engine reads at a time, so that running slots wait for one of them and no longer.

The cut depends on the prompt alone, never on what else the engine does: the same programs run in the same order, so
the same codes come out, bit for bit, alone or beside others. NumPy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fishjax.engine.snapshots import VoiceKey
from fishjax.engine.state import SlotState

SMALLEST_CHUNK = 16


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """`columns_1KT` int32 (1, C+1, T) for positions `start` .. of a slot, filled up to one of `widths`.

    `slots` is how the prompt leaves its slot; it holds once the last chunk is read. `voice`: that of the prompt, where
    this chunk is the last one of it.
    """

    columns_1KT: np.ndarray
    start: int
    slots: SlotState
    voice: VoiceKey | None = None


def widths(max_len: int, chunk_columns: int) -> list[int]:
    """Every width that a chunk can have: powers of two, none above `chunk_columns`, none that a slot does not need."""
    found = [SMALLEST_CHUNK]
    while 2 * found[-1] <= chunk_columns and found[-1] < max_len:
        found.append(2 * found[-1])
    return found


def cut(
    columns_CT: np.ndarray, start: int, slots: SlotState, widths: list[int], voice: VoiceKey | None = None
) -> tuple[Chunk, ...]:
    """Columns (C+1, T) for positions `start` .., in chunks of the largest width and one that holds the rest.

    Nothing to read is a chunk of filling, which the slot does not see. `voice`: the columns are all of a voice.
    """
    chunks, largest = [], widths[-1]
    for done in range(0, max(columns_CT.shape[1], 1), largest):
        part_CT = columns_CT[:, done : done + largest]
        width = next(width for width in widths if width >= part_CT.shape[1])
        columns_1KT = np.zeros((1, columns_CT.shape[0], width), np.int32)
        columns_1KT[0, :, : part_CT.shape[1]] = part_CT
        last = done + largest >= columns_CT.shape[1]
        chunks.append(Chunk(columns_1KT, start + done, slots, voice if last else None))
    return tuple(chunks)
