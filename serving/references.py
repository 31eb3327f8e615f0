"""Clips to references: decode (in a pool), encode (in the loop's thread, a piece between two steps), and remember the
codes by the clip's content.

The codes belong to the sound alone, so a known clip with another transcript is not encoded again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

import numpy as np

from fishjax.audio.read import read_reference
from fishjax.errors import InvalidRequest
from fishjax.text.prompt import Reference

from .contract import Engine
from .desk import Desk
from .mailbox import Mailbox
from .request import Clip

logger = logging.getLogger(__name__)
T = TypeVar("T")
_ENTRY_BYTES = 256  # of an entry beside its codes


class ReferenceReader:
    """Reads clips, `num_at_once` at a time; keeps the codes of the latest ones, `max_bytes` in all.

    Belongs to one asyncio loop.
    """

    def __init__(self, engine: Engine, desk: Desk[Mailbox], executor: Executor, *, num_at_once: int, max_bytes: int):
        self.num_bytes = 0
        self._engine = engine
        self._desk = desk
        self._executor = executor
        self._turns = asyncio.Semaphore(num_at_once)  # clips that wait for theirs are neither decoded nor on the device
        self._max_bytes = max_bytes
        self._codes: OrderedDict[bytes, np.ndarray] = OrderedDict()

    async def read(self, clips: tuple[Clip, ...]) -> list[Reference]:
        """References of clips, in order. Raises InvalidRequest, naming the clip, NotReady, EngineFailed."""
        return [await self._read(number, clip) for number, clip in enumerate(clips, start=1)]

    async def _read(self, number: int, clip: Clip) -> Reference:
        key = await self._in_pool(_digest, clip.audio)
        if (codes_KT := self._known(key)) is None:
            async with self._turns:
                if (codes_KT := self._known(key)) is None:  # another request may have brought it meanwhile
                    codes_KT = await self._encode(number, clip.audio)
                    self._remember(key, codes_KT)
        return Reference(clip.transcript, codes_KT)

    def _known(self, key: bytes) -> np.ndarray | None:
        if key in self._codes:
            self._codes.move_to_end(key)
        return self._codes.get(key)

    async def _encode(self, number: int, audio: bytes) -> np.ndarray:
        engine = self._engine
        try:
            audio_T = await self._in_pool(read_reference, audio, engine.sample_rate_hz)
        except InvalidRequest as error:
            raise InvalidRequest(f"reference {number}: {error}") from error
        clip_s, used_s = (
            samples / engine.sample_rate_hz
            for samples in (audio_T.size, engine.references.max_frames * engine.samples_per_frame)
        )
        if clip_s > used_s:
            logger.warning(
                "reference %d: of %.1f s the first %.1f s are used, the model's longest", number, clip_s, used_s
            )
        codes, pending = [], None
        for piece in await self._in_pool(engine.references.cut, audio_T):
            pending = await asyncio.wrap_future(self._desk.run(partial(engine.references.encode, piece, pending)))
            codes.append(await self._in_pool(pending.result))
        return np.concatenate(codes, axis=1)

    async def _in_pool(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def _remember(self, key: bytes, codes_KT: np.ndarray) -> None:
        if key not in self._codes:
            self._codes[key] = codes_KT
            self.num_bytes += codes_KT.nbytes + _ENTRY_BYTES
        while self.num_bytes > self._max_bytes:
            _, oldest_KT = self._codes.popitem(last=False)
            self.num_bytes -= oldest_KT.nbytes + _ENTRY_BYTES


def _digest(audio: bytes) -> bytes:
    return hashlib.sha256(audio).digest()
