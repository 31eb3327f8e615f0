"""What a process of callers is told to do: one JSON object on its stdin. See `callers.py`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass

LISTENS = "listens"


@dataclass(frozen=True, slots=True)
class Requests:
    """What all requests of a load have in common.

    `voice_id` is a stored voice; else `clip` is a WAV file with the words `transcript`, changed a little for each
    request. `priority` is a name of the proto's enum; `max_frames` None: as many as the text needs.
    """

    seed: int
    voice_id: str = ""
    clip: str = ""
    transcript: str = ""
    priority: str = "STANDARD"
    max_frames: int | None = None


@dataclass(frozen=True, slots=True)
class CallersPlan:
    """`callers` who call one after the other, or calls at the times `arrivals`; from `start_s` to `end_s`.

    Times are of the monotonic clock. Requests are numbered `first`, `first + stride`, ... `mischief`: callers do
    something else at each call (see `mischief.py`).
    """

    address: str
    lane: str
    start_s: float
    end_s: float
    requests: Requests
    callers: int = 0
    arrivals: Sequence[float] = ()
    first: int = 0
    stride: int = 1
    mischief: bool = False

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CallersPlan:
        """What `to_json` wrote."""
        fields = json.loads(text)
        return cls(**fields | {"requests": Requests(**fields["requests"])})


def split(plan: CallersPlan, processes: int) -> list[CallersPlan]:
    """The same load from several processes: callers and arrivals dealt out, no request number twice."""
    plans = []
    for i in range(processes):
        callers = plan.callers // processes + (i < plan.callers % processes)
        first, stride = plan.first + i * plan.stride, plan.stride * processes
        part = dataclasses.replace(
            plan, callers=callers, arrivals=plan.arrivals[i::processes], first=first, stride=stride
        )
        if part.callers or part.arrivals:
            plans.append(part)
    return plans
