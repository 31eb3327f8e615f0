"""One request's state outside the slots: what `prefill` and `extract` make and `insert` takes."""

from __future__ import annotations

from dataclasses import dataclass

from fishjax.codec.stream import CodecStreamState
from fishjax.engine.chunks import Chunk
from fishjax.engine.state import DecodeState
from fishjax.model.cache import KVCache


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Enough to go on to the same codes in any slot.

    `unread`: chunks of its prompt, in order. `top_k`: the request's, for the host. `silent`: its sound starts from
    silence. `saved`: one row of all that its slot held; None: it goes on from what its slot holds. `voice`: blocks of
    keys and values that its slot gets first.
    """

    unread: tuple[Chunk, ...]
    top_k: int
    silent: bool = True
    saved: tuple[DecodeState, CodecStreamState] | None = None
    voice: tuple[KVCache, ...] = ()

    @property
    def num_chunks(self) -> int:
        """Chunks that are still to be read."""
        return len(self.unread)
