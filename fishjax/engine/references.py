"""Reference clips to codes, a piece at a time: whoever speaks meanwhile waits for one piece, however long the clip is.

    cut(audio) -> Piece, Piece, ... -> encode(piece, after the one before) -> PendingCodes -> codes

Every piece has the same length, so there is one program, and a clip costs what it is long. The codes are those of the
whole clip (`fishjax.codec.encode_stream`), and the same whatever happens between two pieces.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np

from fishjax.codec import Codec
from fishjax.codec.encode_stream import EncodeStreamState, init_encode_stream, stream_encode
from fishjax.engine.ahead import Program
from fishjax.engine.steps import bind
from fishjax.errors import InvalidRequest

PIECE_FRAMES = 16
"""Some 0.7 s of sound: the longest that a step waits for somebody else's clip."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """`audio_1T` float32 of PIECE_FRAMES frames, silence behind the clip's end; the first `num_frames` count."""

    audio_1T: np.ndarray
    num_frames: int


class PendingCodes:
    """Codes of a piece that the device is encoding, and what the next piece follows."""

    def __init__(self, state: EncodeStreamState, codes_1KF: jax.Array, num_frames: int):
        self.state = state
        self._codes_1KF, self._num_frames = codes_1KF, num_frames
        codes_1KF.copy_to_host_async()

    def result(self) -> np.ndarray:
        """Block until they are on the host: int32 (codebooks, frames that count). In any thread."""
        return np.asarray(self._codes_1KF)[0, :, : self._num_frames]


class ReferenceEncoder:
    """Of one codec. At most `max_frames` frames of a clip are used. `encode` is for the thread that owns the engine."""

    def __init__(self, codec: Codec, max_frames: int):
        self.max_frames = max_frames
        self._samples_per_frame = codec.config.samples_per_frame
        self._encode = bind(codec, stream_encode)
        # Committed, as what the program returns is: see `Engine`.
        silence = init_encode_stream(codec, 1, -(-max_frames // PIECE_FRAMES) * PIECE_FRAMES)
        self._silence = jax.device_put(silence, jax.local_devices()[0])

    def cut(self, audio_T: np.ndarray) -> list[Piece]:
        """Mono float32 samples (T,) at the codec's rate, in pieces, up to `max_frames`.

        Raises InvalidRequest for none of them, more than one channel, and samples that are no numbers.
        """
        audio_T = np.asarray(audio_T, np.float32)
        if audio_T.ndim != 1:
            raise InvalidRequest(f"the reference audio must be one channel, shape (T,), not {audio_T.shape}")
        audio_T = audio_T[: self.max_frames * self._samples_per_frame]
        if not audio_T.size:
            raise InvalidRequest("the reference audio is empty")
        if not np.isfinite(audio_T).all():
            raise InvalidRequest("the reference audio has samples that are NaN or infinite")
        pieces, longest = [], PIECE_FRAMES * self._samples_per_frame
        for start in range(0, audio_T.size, longest):
            part_T = audio_T[start : start + longest]
            padded_T = np.pad(part_T, (0, longest - part_T.size))
            pieces.append(Piece(padded_T[None], -(-part_T.size // self._samples_per_frame)))
        return pieces

    def encode(self, piece: Piece, after: PendingCodes | None = None) -> PendingCodes:
        """Encode a clip's first piece, or the one `after` another; returns at once."""
        state, codes_1KF = self._encode(self._silence if after is None else after.state, piece.audio_1T)
        return PendingCodes(state, codes_1KF, piece.num_frames)

    def program(self) -> Program:
        """What `encode` calls."""
        audio_1T = np.zeros((1, PIECE_FRAMES * self._samples_per_frame), np.float32)
        return "reference encoder", self._encode, (self._silence, audio_1T)

    def encode_whole(self, audio_T: np.ndarray) -> np.ndarray:
        """A clip as `cut` takes it -> codes int32 (codebooks, frames), with nobody else to think of."""
        codes, pending = [], None
        for piece in self.cut(audio_T):
            pending = self.encode(piece, pending)
            codes.append(pending.result())
        return np.concatenate(codes, axis=1)
