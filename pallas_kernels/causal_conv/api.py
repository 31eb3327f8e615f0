"""causal_conv: the public call."""

from __future__ import annotations

import jax

from .. import _dispatch
from . import mosaic_sm90, reference

OP = "causal_conv"
KERNELS = {_dispatch.HOPPER: mosaic_sm90}


def causal_conv(
    past_BPI: jax.Array,
    x_BTI: jax.Array,
    w_kIO: jax.Array,
    bias_O: jax.Array,
    *,
    stride: int = 1,
    dilation: int = 1,
    alpha_O: jax.Array | None = None,
    residual_BTO: jax.Array | None = None,
    backend: _dispatch.Backend | str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Convolve the next piece of a signal behind its past; then add to it, then bend it (snake), as asked.

    Args:
      past_BPI: (B, P, I), P = (k - 1) * dilation + 1 - stride: the steps before x, of x's type.
      x_BTI: (B, T, I) floating point; T is a multiple of the stride.
      w_kIO: (k, I, O), the oldest tap first, of x's type.
      bias_O: (O,), or (O / n,): it repeats.
      stride: steps from one output to the next.
      dilation: steps from one tap to the next.
      alpha_O: (O,), of the snake x + sin(alpha x)^2 / (alpha + 1e-9) that bends the result; None leaves it.
      residual_BTO: (B, T / stride, O), added before that.
      backend: None, "reference" or "mosaic" (bfloat16, stride 1, B a multiple of 8, channels of 32, B T of 64).

    Returns:
      y, (B, T / stride, O), and the past of the next piece, (B, P, I), both of x's type. The kernel rounds y once, at
      the end; the reference also between the steps. The kernel's sine is off by up to 2^-20 and by |alpha x| 2^-24.

    Raises:
      ValueError: shapes or types do not fit.
      NotImplementedError: the back end asked for cannot run.
    """
    check_operands(past_BPI, x_BTI, w_kIO, bias_O, stride, dilation, alpha_O, residual_BTO)

    def why_not(kernel) -> str | None:
        return kernel.why_not(x_BTI, w_kIO, bias_O, stride, residual_BTO is not None)

    kernel = _dispatch.choose(OP, backend, KERNELS, why_not)
    if kernel:
        return kernel.causal_conv(past_BPI, x_BTI, w_kIO, bias_O, dilation, alpha_O, residual_BTO)
    return reference.causal_conv(past_BPI, x_BTI, w_kIO, bias_O, stride, dilation, alpha_O, residual_BTO)


def check_operands(past_BPI, x_BTI, w_kIO, bias_O, stride, dilation, alpha_O=None, residual_BTO=None) -> None:
    """Raise ValueError naming shapes and types unless they fit."""
    if x_BTI.ndim != 3 or w_kIO.ndim != 3 or w_kIO.shape[1] != x_BTI.shape[2] or 0 in w_kIO.shape:
        raise ValueError(f"{OP}: x must be (B, T, I) and w (k, I, O), none of them 0, got {x_BTI.shape}, {w_kIO.shape}")
    (B, T, I), (taps, _, O) = x_BTI.shape, w_kIO.shape  # noqa: E741
    if stride < 1 or dilation < 1 or T % stride:
        raise ValueError(f"{OP}: stride {stride} and dilation {dilation} must be positive, and T = {T} whole strides")
    past = (taps - 1) * dilation + 1 - stride
    if past < 0:
        raise ValueError(f"{OP}: {taps} taps {dilation} apart do not reach over a stride of {stride}")
    for name, array, shape in (
        ("past", past_BPI, (B, past, I)),
        ("alpha", alpha_O, (O,)),
        ("residual", residual_BTO, (B, T // stride, O)),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"{OP}: {name} must be {shape}, got {array.shape}")
    if bias_O.ndim != 1 or bias_O.shape[0] == 0 or O % bias_O.shape[0]:
        raise ValueError(f"{OP}: bias must be ({O},) or a whole part of it, got {bias_O.shape}")
    given = [a for a in (past_BPI, x_BTI, w_kIO, bias_O, alpha_O, residual_BTO) if a is not None]
    if len({a.dtype for a in given}) > 1:
        raise ValueError(f"{OP}: all operands must be of one type, got {', '.join(str(a.dtype) for a in given)}")
