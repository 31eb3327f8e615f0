"""The S2-Pro shapes of this op: one list for tests, tuning and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True)
class ConvSpec:
    """One convolution of the decoder: B slots, T steps a frame, I to O channels, its taps and their distance.

    `period` is the length of the bias; `snake` and `residual` say what follows.
    """

    name: str
    T: int
    I: int  # noqa: E741
    O: int  # noqa: E741
    taps: int = 7
    dilation: int = 1
    period: int = 0
    snake: bool = False
    residual: bool = False
    B: int = 64

    def arguments(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The operands by name, as shapes."""

        def bf16(*shape: int):
            return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

        operands = {
            "past_BPI": bf16(self.B, (self.taps - 1) * self.dilation, self.I),
            "x_BTI": bf16(self.B, self.T, self.I),
            "w_kIO": bf16(self.taps, self.I, self.O),
            "bias_O": bf16(self.period or self.O),
        }
        if self.snake:
            operands["alpha_O"] = bf16(self.O)
        if self.residual:
            operands["residual_BTO"] = bf16(self.B, self.T, self.O)
        return operands


_LEVELS = ((32, 768), (256, 384), (1024, 192), (2048, 96))
"""Steps a frame and channels behind each transposed convolution."""

SPECS = (
    *[ConvSpec(f"unit_{C}_{d}", T, C, C, dilation=d, snake=True) for T, C in _LEVELS for d in (1, 9)],
    *[ConvSpec(f"point_{C}", T, C, C, taps=1, residual=True) for T, C in _LEVELS],
    ConvSpec("up_384", 32, 768, 8 * 384, taps=2, period=384),
    ConvSpec("up_192", 256, 384, 4 * 192, taps=2, period=192),
    ConvSpec("up_96", 1024, 192, 2 * 96, taps=2, period=96),
)
