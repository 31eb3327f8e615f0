"""The S2-Pro shape of this op: one list for tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from .._mosaic import LINE
from ..types import BLOCK
from .reference import Draws
from .weights import FastWeights, Stack


@dataclass(frozen=True, slots=True)
class FrameSpec:
    """B slots; L layers of width D, H query and G kv heads of 128, F; C codebooks of `codes`."""

    name: str
    B: int
    D: int = 2560
    H: int = 32
    G: int = 8
    F: int = 9728
    L: int = 4
    C: int = 10
    codes: int = 4096

    def arguments(self) -> tuple[jax.Array, jax.Array, FastWeights, Draws]:
        """The operands as shapes: hidden, semantic, weights, draws."""
        return jax.eval_shape(self._zeros)

    def _zeros(self) -> tuple[jax.Array, jax.Array, FastWeights, Draws]:
        def stack(L: int, N: int, K: int) -> Stack:
            scales = jnp.zeros((L, N // BLOCK, -(-K // BLOCK // LINE) * LINE))
            return Stack(jnp.zeros((L, N, K), jnp.float8_e4m3fn), scales)

        weights = FastWeights(
            embeddings_ND=jnp.zeros((self.codes, self.D), jnp.bfloat16),
            norms_ID=jnp.zeros((2 * self.L + 1, self.D)),
            rope_C2h=jnp.zeros((self.C, 2, BLOCK // 2)),
            wqkv=stack(self.L, (self.H + 2 * self.G) * BLOCK, self.D),
            wo=stack(self.L, self.D, self.H * BLOCK),
            w_gate_up=stack(self.L, 2 * self.F, self.D),
            w_down=stack(self.L, self.D, self.F),
            head=stack(1, self.codes, self.D),
            num_codes=self.codes,
            eps=1e-6,
        )
        draws = Draws(
            temperature_B=jnp.zeros(self.B),
            top_p_B=jnp.zeros(self.B),
            top_k_B=jnp.zeros(self.B, jnp.int32),
            gumbel_CBN=jnp.zeros((self.C - 1, self.B, self.codes)),
        )
        return jnp.zeros((self.B, self.D), jnp.bfloat16), jnp.zeros(self.B, jnp.int32), weights, draws


SPECS = tuple(FrameSpec(f"s2_pro_{B}", B) for B in (1, 4, 16, 64))
