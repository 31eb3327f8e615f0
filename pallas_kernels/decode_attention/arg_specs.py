"""The S2-Pro shapes of this op: one list for tests, tuning and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's cache: B slots, H query heads, G kv heads, S positions, head width d."""

    name: str
    B: int
    H: int
    G: int
    S: int
    d: int


SPECS = (
    AttentionSpec("slow_1", 1, 32, 8, 1024, 128),
    AttentionSpec("slow_64", 64, 32, 8, 1024, 128),
    AttentionSpec("slow_64_long", 64, 32, 8, 2048, 128),
    AttentionSpec("s1_mini_fast", 64, 16, 8, 128, 64),
)
CACHES = ("bfloat16", "float8")
BENCHMARKED = tuple(AttentionSpec(f"slow_{B}x{S}", B, 32, 8, S, 128) for B in (1, 16, 64) for S in (128, 1024, 4096))
"""S2-Pro's slow transformer over slots and cache lengths."""
