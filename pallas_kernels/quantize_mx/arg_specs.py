"""The S2-Pro shapes of this op: one list for tests, tuning and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QuantizeSpec:
    """One activation width: what the matmuls of a layer read."""

    name: str
    K: int


SPECS = (QuantizeSpec("hidden", 2560), QuantizeSpec("attention", 4096), QuantizeSpec("ffn", 9728))
ROWS = (1, 8, 16, 32, 64, 128)
