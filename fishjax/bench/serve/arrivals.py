"""When callers of an open loop call: Poisson, or Poisson in bursts. Seeded; knows no clock."""

from __future__ import annotations

import random

PERIOD_S = 4.0
ON_SHARE = 0.5
"""Bursty traffic calls in the first half of each period, at twice its mean rate, and not at all in the second."""


def arrival_times(rate: float, seconds: float, seed: int, *, bursty: bool) -> list[float]:
    """Seconds from the start, ascending, `rate` a second in the mean (bursts included), all below `seconds`."""
    rng = random.Random(seed)
    share, period_s = (ON_SHARE, PERIOD_S) if bursty else (1.0, seconds)
    times, on_s = [], rng.expovariate(rate / share)  # on_s: seconds of the time in which anybody calls
    while (time_s := on_s // (share * period_s) * period_s + on_s % (share * period_s)) < seconds:
        times.append(time_s)
        on_s += rng.expovariate(rate / share)
    return times
