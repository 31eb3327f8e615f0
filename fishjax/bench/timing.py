"""How time is taken: how many calls and weight copies a chain has, and what a replay costs on the host's clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

MIN_CALLS, MAX_CALLS = 50, 256
CHAIN_US = 2000.0
"""A chain should run about this long, so that the cost of starting and awaiting it (some 50 us) is small per call."""
COLD_BYTES = 2 * 60_000_000
"""Twice the L2: rotating over more than this finds every weight cold."""
MIN_REPLAYS, MAX_REPLAYS = 20, 100
WARM_S, MEASURE_S = 0.05, 0.1
METHOD = (
    f"host_us: wall clock of one blocked replay of a chain of at least {MIN_CALLS} calls, each ordered after the one "
    f"before, divided by the calls; median of at least {MIN_REPLAYS} replays; spread (p90 - p10) / median. JAX: one "
    "jitted program; torch: one CUDA graph. Weights (keys and values) rotate over copies of more than "
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


def time_replays(replay: Callable[[], object], calls: int) -> dict[str, float]:
    """host_us and host_us_spread of one call; `replay` runs the whole chain and returns when it has ended."""
    warm_until = time.perf_counter() + WARM_S
    replay()
    while time.perf_counter() < warm_until:
        replay()
    seconds: list[float] = []
    measure_until = time.perf_counter() + MEASURE_S
    while len(seconds) < MIN_REPLAYS or (len(seconds) < MAX_REPLAYS and time.perf_counter() < measure_until):
        started = time.perf_counter()
        replay()
        seconds.append(time.perf_counter() - started)
    low, median, high = np.percentile(seconds, (10, 50, 90))
    return {"host_us": float(median) / calls * 1e6, "host_us_spread": float((high - low) / median)}
