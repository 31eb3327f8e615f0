"""Building blocks shared by the slow and fast transformers and the codec.

Shape key, used in every suffix of this project: B slot or batch, T tokens or frames, S cache length,
D model width, H query heads, G key/value heads, d head width, K codebooks (or the summed axis of a matmul),
V vocabulary, L layers, C channels, M/N rows and columns of a matmul.

Attribute paths are the published parameter names, so a checkpoint loads by path. Linear weights keep the
published (out, in) order: it is also what the kernels take as `w_NK`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from pallas_kernels import BlockScaled, MxScaled, matmul, swiglu_mlp

# Traced and lowered once for all layers of a shape: a Mosaic kernel costs 0.14 s to lower, and a frame has hundreds.
_matmul, _swiglu_mlp = jax.jit(matmul), jax.jit(swiglu_mlp)


class Linear(nnx.Module):
    """y = x w^T (+ bias). `weight` is an array (N, K) or one of `pallas_kernels`' quantised pytrees."""

    def __init__(
        self, in_features: int, out_features: int, *, use_bias: bool = False, dtype=jnp.float32, rngs: nnx.Rngs
    ):
        scale = in_features**-0.5
        self.weight = nnx.Param((scale * jax.random.normal(rngs.params(), (out_features, in_features))).astype(dtype))
        self.bias = nnx.Param(jnp.zeros((out_features,), dtype)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., K) -> (..., N), in the type of `x`."""
        y = _matmul(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """A table of `num_rows` vectors: `weight` (rows, width)."""

    def __init__(self, num_rows: int, width: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.weight = nnx.Param((width**-0.5 * jax.random.normal(rngs.params(), (num_rows, width))).astype(dtype))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Rows of integer ids (...) -> (..., width)."""
        return self.weight[...][ids]


class RMSNorm(nnx.Module):
    """Block norm: normalise in float32, cast to the activation dtype, *then* multiply by the weight."""

    def __init__(self, width: int, eps: float, *, dtype=jnp.float32):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Any shape (..., width); the type is kept."""
        return _normalise(x, self.eps).astype(x.dtype) * self.weight[...]


class HeadRMSNorm(nnx.Module):
    """q/k norm over the head width: the weight multiplies in float32, *before* the cast."""

    def __init__(self, width: int, eps: float, *, dtype=jnp.float32):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Any shape (..., head width); the type is kept."""
        return head_rms_norm(x, self.weight[...], self.eps)


def head_rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """The same as a function: `weight` (..., head width)."""
    return (_normalise(x, eps) * weight.astype(jnp.float32)).astype(x.dtype)


def _normalise(x: jax.Array, eps: float) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def rope_table(num_positions: int, head_dim: int, base: float) -> np.ndarray:
    """Rotary table (positions, head_dim / 2, 2): cos and sin, float32 angles rounded to bfloat16.

    Built with NumPy on the host on purpose: angles must be float32 products (float64 angles change
    thousands of entries) and the table bfloat16 even in a float32 model (the reference's precision).
    The powers are rounded to float32 from float64: NumPy's float32 power is a last bit off the reference's,
    and one changed frequency moves every later angle.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32)[: head_dim // 2] / np.float32(head_dim)
    freqs = np.float32(1.0) / np.power(float(base), exponents.astype(np.float64)).astype(np.float32)
    angles = np.outer(np.arange(num_positions, dtype=np.float32), freqs).astype(np.float32)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(ml_dtypes.bfloat16)


def apply_rope(x_BTHd: jax.Array, table_BTd2: jax.Array) -> jax.Array:
    """Rotate adjacent pairs (2i, 2i+1) by the table rows of each position; float32 inside, dtype kept.

    `table_BTd2` is (B or 1, T, head_dim / 2, 2), the rows of `rope_table` at the wanted positions.
    """
    pairs = x_BTHd.astype(jnp.float32).reshape(*x_BTHd.shape[:-1], -1, 2)
    table = table_BTd2.astype(jnp.float32)[:, :, None]
    cos, sin = table[..., 0], table[..., 1]
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return rotated.reshape(x_BTHd.shape).astype(x_BTHd.dtype)


class FeedForward(nnx.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x). The published form, which training and checkpoints have."""

    def __init__(self, dim: int, ffn_dim: int, *, dtype=jnp.float32, rngs: nnx.Rngs):
        self.w1 = Linear(dim, ffn_dim, dtype=dtype, rngs=rngs)
        self.w3 = Linear(dim, ffn_dim, dtype=dtype, rngs=rngs)
        self.w2 = Linear(ffn_dim, dim, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., dim) -> (..., dim)."""
        return self.w2(jax.nn.silu(self.w1(x)) * self.w3(x))


class FusedFeedForward(nnx.Module):
    """The same in the form that decoding reads: `w_gate_up` (2F, dim) is w1's rows and then w3's, `w_down` is w2."""

    def __init__(self, w_gate_up: jax.Array | BlockScaled | MxScaled, w_down: jax.Array | BlockScaled | MxScaled):
        self.w_gate_up = nnx.Param(w_gate_up)
        self.w_down = nnx.Param(w_down)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., dim) -> (..., dim). Plain weights round the inner activations to the type of `x`, as `FeedForward`."""
        w_gate_up, w_down = self.w_gate_up[...], self.w_down[...]
        if isinstance(w_gate_up, BlockScaled | MxScaled):
            return _swiglu_mlp(x.reshape(-1, x.shape[-1]), w_gate_up, w_down).reshape(x.shape)
        gate, up = jnp.split(_matmul(x, w_gate_up), 2, axis=-1)
        return _matmul(jax.nn.silu(gate) * up, w_down)
