"""One call as its caller saw it: when sound came, whether a listener ran dry, whether all of it came. Knows no gRPC."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

OK = "OK"


@dataclass(slots=True)
class Call:
    """Times are seconds of the monotonic clock, which all processes of a machine share.

    `lane` says whose traffic it is, `does` what its caller does ("listens" is the honest one). `status` is a gRPC
    status' name; `arrivals` are (when, how many frames) of each audio message. `promised`: the server sent a header.
    `problem` says in a sentence what was wrong with the messages, or "".
    """

    lane: str
    does: str
    called_s: float
    ended_s: float = math.nan
    status: str = ""
    detail: str = ""
    retry_ms: int | None = None
    promised: bool = False
    frame_s: float = math.nan
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    problem: str = ""

    @property
    def ttfa_s(self) -> float:
        """From the call to the first byte of sound; nan without sound."""
        return self.arrivals[0][0] - self.called_s if self.arrivals else math.nan

    @property
    def underrun_s(self) -> float:
        """How long a listener was without sound who plays it as it arrives, from the first byte on."""
        return underrun_s(self.arrivals, self.frame_s)


def underrun_s(arrivals: Sequence[tuple[float, int]], frame_s: float) -> float:
    """Seconds of silence inside a stream whose messages are (when, how many frames of `frame_s` seconds)."""
    silent_s = 0.0
    dry_s = math.inf  # when the sound at hand is played; nobody plays before the first message
    for now_s, num_frames in arrivals:
        silent_s += max(0.0, now_s - dry_s)
        dry_s = (now_s if dry_s == math.inf else max(dry_s, now_s)) + num_frames * frame_s
    return silent_s
