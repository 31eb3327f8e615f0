"""The S2-Pro shapes of this op: one list for tests, tuning and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..types import ScaledKV


@dataclass(frozen=True, slots=True)
class AppendSpec:
    """One layer's cache: B slots, G kv heads, S positions, head width d."""

    name: str
    B: int
    G: int = 8
    S: int = 4096
    d: int = 128

    def arguments(self) -> tuple[jax.Array, jax.Array, ScaledKV, ScaledKV, jax.Array]:
        """The operands as shapes: k, v, both caches, positions."""
        return jax.eval_shape(self._zeros)

    def _zeros(self) -> tuple[jax.Array, jax.Array, ScaledKV, ScaledKV, jax.Array]:
        rows = jnp.zeros((self.B, self.G, self.d), jnp.bfloat16)
        shape = (self.B, self.G, self.S)
        cache = ScaledKV(jnp.zeros((*shape, self.d), jnp.float8_e4m3fn), jnp.zeros(shape))
        return rows, rows, cache, cache, jnp.zeros(self.B, jnp.int32)


SPECS = (
    *[AppendSpec(f"s2_pro_{B}", B) for B in (1, 16, 64)],
    AppendSpec("heads_of_64", 64, S=1024, d=64),
    AppendSpec("most_heads", 2, G=32, S=100),
)
