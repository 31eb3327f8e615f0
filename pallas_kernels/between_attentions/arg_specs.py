"""The S2-Pro shapes of this op: one list for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ..types import BLOCK, BlockScaled
from .reference import After, Before


@dataclass(frozen=True, slots=True)
class BetweenSpec:
    """M tokens, residual D, attention output K, wqkv rows N, inner width F; which part of the chain is there."""

    name: str
    M: int
    before: bool = True
    after: bool = True
    D: int = 2560
    K: int = 4096
    N: int = 6144
    F: int = 9728

    def arguments(self) -> tuple[jax.Array, jax.Array | None, Before | None, After | None]:
        """The operands as shapes: x, o, before, after."""
        return jax.eval_shape(self._zeros)

    def _zeros(self) -> tuple[jax.Array, jax.Array | None, Before | None, After | None]:
        def weight(N: int, K: int) -> BlockScaled:
            return BlockScaled(jnp.zeros((N, K), jnp.float8_e4m3fn), jnp.zeros((N // BLOCK, K // BLOCK)))

        norm = jnp.zeros(self.D)
        before = Before(weight(self.D, self.K), norm, weight(2 * self.F, self.D), weight(self.D, self.F))
        after = After(norm, weight(self.N, self.D))
        o = jnp.zeros((self.M, self.K), jnp.bfloat16)
        x = jnp.zeros((self.D, self.M))
        return x, o if self.before else None, before if self.before else None, after if self.after else None


ROWS = (1, 8, 16, 32, 64)
SPECS = (
    *[BetweenSpec(f"s2_pro_{M}", M) for M in (1, 16, 64)],
    BetweenSpec("s2_pro_first", 8, before=False),
    BetweenSpec("s2_pro_last", 8, after=False),
)
