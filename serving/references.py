"""Clips to references: decode (in a pool), encode (in the loop's thread), and remember the codes by the clip's content.

The codes belong to the sound alone, so a known clip with another transcript is not encoded again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import Executor
from functools import partial

import numpy as np

from fishjax.audio.read import read_reference
from fishjax.errors import InvalidRequest
from fishjax.text.prompt import Reference

from .contract import Speech
from .loop import SynthesisLoop
from .mailbox import Mailbox
from .request import Clip

_ENTRY_BYTES = 256  # of an entry beside its codes


class ReferenceReader:
    """Reads clips; keeps the codes of the latest ones, `max_bytes` in all. Belongs to one asyncio loop."""

    def __init__(self, speech: Speech, loop: SynthesisLoop[Mailbox], executor: Executor, max_bytes: int):
        self.num_bytes = 0
        self._speech = speech
        self._loop = loop
        self._executor = executor
        self._max_bytes = max_bytes
        self._codes: OrderedDict[bytes, np.ndarray] = OrderedDict()

    async def read(self, clips: tuple[Clip, ...]) -> list[Reference]:
        """References of clips, in order. Raises InvalidRequest, naming the clip, NotReady, EngineFailed."""
        return [await self._read(number, clip) for number, clip in enumerate(clips, start=1)]

    async def _read(self, number: int, clip: Clip) -> Reference:
        in_pool = partial(asyncio.get_running_loop().run_in_executor, self._executor)
        key = await in_pool(_digest, clip.audio)
        if (codes_KT := self._codes.get(key)) is not None:
            self._codes.move_to_end(key)
            return Reference(clip.transcript, codes_KT)
        try:
            audio_T = await in_pool(read_reference, clip.audio, self._speech.engine.sample_rate_hz)
        except InvalidRequest as error:
            raise InvalidRequest(f"reference {number}: {error}") from error
        encode = partial(self._speech.reference, audio_T, clip.transcript)
        reference = await asyncio.wrap_future(self._loop.run(encode))
        self._remember(key, reference.codes_KT)
        return reference

    def _remember(self, key: bytes, codes_KT: np.ndarray) -> None:
        if key not in self._codes:
            self._codes[key] = codes_KT
            self.num_bytes += codes_KT.nbytes + _ENTRY_BYTES
        while self.num_bytes > self._max_bytes:
            _, oldest_KT = self._codes.popitem(last=False)
            self.num_bytes -= oldest_KT.nbytes + _ENTRY_BYTES


def _digest(audio: bytes) -> bytes:
    return hashlib.sha256(audio).digest()
