"""Which loads are put on a server, by name: closed, poisson, bursty, crowd, overload, lane. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .arrivals import arrival_times
from .drive import Load
from .plan import CallersPlan, Requests

LANE_SHARE = 0.5
"""Real traffic of the batch lane's trace, of what the server can do: its bursts then just fill it."""
FILLERS_PER_SLOT = 2
CALLERS_PER_SLOT = 4
OVERLOAD = 2.0


@dataclass(frozen=True, slots=True)
class NamedLoad:
    """A load with what its row says of it; `width`: about so many callers at once."""

    about: dict[str, Any]
    load: Load
    width: int


def closed(requests: Requests, callers: int, seconds: float, first: int, loop: str = "closed") -> NamedLoad:
    """`callers` who call again as soon as their speech has arrived."""
    plan = CallersPlan("", "real", 0, 0, requests, callers=callers, first=first)
    return NamedLoad(_about(loop, callers, None), Load([plan], seconds), callers)


def opened(
    requests: Requests, rate: float, seconds: float, first: int, width: int, *, bursty: bool, loop: str = ""
) -> NamedLoad:
    """`rate` calls a second in the mean, whatever becomes of those before."""
    times = arrival_times(rate, seconds, requests.seed, bursty=bursty)
    plan = CallersPlan("", "real", 0, 0, requests, arrivals=times, first=first)
    return NamedLoad(_about(loop or ("bursty" if bursty else "poisson"), None, rate), Load([plan], seconds), width)


def lane(real: NamedLoad, fill: Requests, num_slots: int, first: int) -> NamedLoad:
    """The same real traffic, with BATCH requests enough to fill what it leaves."""
    plan = CallersPlan("", "batch", 0, 0, fill, callers=FILLERS_PER_SLOT * num_slots, first=first)
    return NamedLoad(
        real.about | {"loop": "lane, filled"}, Load([*real.load.plans, plan], real.load.seconds), real.width
    )


def _about(loop: str, concurrency: int | None, rate: float | None) -> dict[str, Any]:
    return {"loop": loop, "concurrency": concurrency, "rate": None if rate is None else round(rate, 3)}
