"""How time is taken: how many calls and weight copies a chain has, and what a replay costs on the host's clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

MIN_CALLS, MAX_CALLS = 50, 256
CHAIN_US = 2000.0
"""A chain should run about this long: longer than its start costs the host (some 0.5 ms for a JAX program)."""
COLD_BYTES = 2 * 60_000_000
"""Twice the L2: rotating over more than this finds every weight cold."""
MIN_REPLAYS, MAX_REPLAYS = 20, 100
WARM_S, MEASURE_S = 0.05, 0.1
METHOD = (
    f"host_us: wall clock from the end of one replay of a chain of at least {MIN_CALLS} calls to the end of the next, "
    "each call ordered after the one before, divided by the calls; the next replay is started before one is awaited, "
    f"as a step is; median of at least {MIN_REPLAYS} replays; spread (p90 - p10) / median. JAX: one jitted program; "
    "torch: one CUDA graph. Weights (keys and values) rotate over copies of more than "
    f"{COLD_BYTES // 1_000_000} MB together; one element of every output is returned. kernel_us: sum of the device "
    "times of all kernels of one replay (CUPTI) over the calls. Inputs are random. No other measurement uses the GPU "
    "meanwhile."
)


@dataclass(frozen=True, slots=True)
class Plan:
    """A chain: call i reads weight copy i % copies and input i // copies, so that no two calls are alike."""

    calls: int
    copies: int

    @property
    def num_inputs(self) -> int:
        """Inputs of the chain."""
        return -(-self.calls // self.copies)


def plan(bytes_per_call: int, floor_us: float) -> Plan:
    """Enough copies to be cold, every copy read at least once, and enough calls to run about CHAIN_US."""
    copies = max(2, math.floor(COLD_BYTES / bytes_per_call) + 1)
    wanted = math.ceil(CHAIN_US / (2 * floor_us + 2))
    return Plan(max(MIN_CALLS, copies, min(wanted, MAX_CALLS)), copies)


def time_replays(start: Callable[[], Callable[[], object]], calls: int) -> dict[str, float]:
    """host_us and host_us_spread of one call; `start` starts the whole chain and returns what waits for its end.

    One replay is always under way when another one is started: what it costs the host to start a program (about
    half a millisecond on an H200's machine, `docs/kernels.md`) is not a call's.
    """
    ends: list[float] = []
    warm_until = time.perf_counter() + WARM_S
    measure_until = warm_until + MEASURE_S
    running, num_warm = start(), 0
    while len(ends) <= num_warm + MIN_REPLAYS or (
        len(ends) <= num_warm + MAX_REPLAYS and time.perf_counter() < measure_until
    ):
        following = start()
        running()
        ends.append(time.perf_counter())
        running = following
        if ends[-1] < warm_until:
            num_warm = len(ends)
    running()
    seconds = np.diff(ends[num_warm:])
    low, median, high = np.percentile(seconds, (10, 50, 90))
    return {"host_us": float(median) / calls * 1e6, "host_us_spread": float((high - low) / median)}
