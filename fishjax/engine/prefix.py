"""One request's state outside the slots: what `prefill` and `extract` make and `insert` takes."""

from __future__ import annotations

from dataclasses import dataclass

from fishjax.engine.chunks import Chunk
from fishjax.engine.steps import Rows
from fishjax.model.cache import KVCache


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Enough to go on to the same codes in any slot.

    `unread`: chunks of its prompt, in order. `top_k`: the request's, for the host. `num_made`: frames since its sound
    began from silence; `num_held`: those at their end whose sound is not made yet. `saved`: one row of all that its
    slot held; None: it goes on from what its slot holds. `voice`: blocks of keys and values that its slot gets first.
    """

    unread: tuple[Chunk, ...]
    top_k: int
    num_made: int = 0
    num_held: int = 0
    saved: Rows | None = None
    voice: tuple[KVCache, ...] = ()

    @property
    def num_chunks(self) -> int:
        """Chunks that are still to be read."""
        return len(self.unread)
