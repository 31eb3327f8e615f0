"""Random arrays in the shapes and formats of described ones, each made where it stays: no second copy, no file.

Matrices have elements of about 1 / sqrt(width), FP8 ones as e4m3 values and scales drawn directly; norms are near one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import BlockScaled, MxScaled, ScaledKV
from pallas_kernels.types import E4M3_MAX

ON_DEVICE = 1 << 22
"""Elements from which an array is drawn on the device: below, compiling its maker costs more than copying it."""
ON_HOST = 1 << 22
_STRIDE = 7919
_SIGMAS = 5.0
"""Standard deviations that e4m3's largest value stands for."""


def random_like(described: Any, seed: int) -> Any:
    """A pytree of arrays on the default device for one of arrays or shapes, every leaf its own memory."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(described, is_leaf=_is_quantised)
    made = [_made(jax.tree_util.keystr(path), leaf, seed + i) for i, (path, leaf) in enumerate(leaves)]
    return jax.tree_util.tree_unflatten(tree, made)


def _is_quantised(x: Any) -> bool:
    return isinstance(x, BlockScaled | MxScaled | ScaledKV)


def _made(name: str, leaf: Any, seed: int) -> Any:
    if isinstance(leaf, ScaledKV):
        scale = jnp.full(leaf.scale_BGS.shape, _SIGMAS / E4M3_MAX, jnp.float32)
        return ScaledKV(_normal(leaf.values_BGSd, seed, E4M3_MAX / _SIGMAS), scale)
    if isinstance(leaf, BlockScaled):
        size = leaf.shape[1] ** -0.5 * _SIGMAS / E4M3_MAX
        scale = jnp.full(leaf.scale_NbKb.shape, size, jnp.float32)
        return BlockScaled(_normal(leaf.values_NK, seed, E4M3_MAX / _SIGMAS), scale, leaf.num_rows)
    if isinstance(leaf, MxScaled):
        exponent = round(math.log2(leaf.shape[1] ** -0.5 * _SIGMAS / E4M3_MAX))
        scale = jnp.full(leaf.scale_NKb.shape, 127 + exponent, jnp.uint8)
        values = _normal(leaf.values_NK, seed, E4M3_MAX / _SIGMAS)
        return dataclasses.replace(leaf, values_NK=values, scale_NKb=scale)
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.zeros(leaf.shape, leaf.dtype)
    if leaf.ndim < 2:
        return _normal(leaf, seed, 0.02, shift=0.0 if "bias" in name else 1.0)
    # A matrix is (out, in), a convolution (taps, in, out), keys and values (..., positions, width) of size one.
    fan_in = {2: leaf.shape[1], 3: leaf.shape[0] * leaf.shape[1]}.get(leaf.ndim, 1)
    return _normal(leaf, seed, fan_in**-0.5)


def _normal(like: Any, seed: int, size: float, shift: float = 0.0) -> jax.Array:
    if math.prod(like.shape) >= ON_DEVICE:
        return _maker(tuple(like.shape), jnp.dtype(like.dtype))(np.uint32(seed), np.float32(size), np.float32(shift))
    drawn = np.resize(_pool()[seed * _STRIDE % ON_HOST :], like.shape) * np.float32(size) + np.float32(shift)
    return jax.device_put(np.clip(drawn, -E4M3_MAX, E4M3_MAX).astype(like.dtype))


@functools.cache
def _pool() -> np.ndarray:
    """Normal numbers that arrays of the host are cut from, each somewhere else: drawing each anew took ten seconds."""
    return np.random.default_rng(0).standard_normal(2 * ON_HOST, np.float32)


@functools.cache
def _maker(shape: tuple[int, ...], dtype: jnp.dtype) -> Any:
    """One program for all arrays of a shape and type."""

    def make(seed: jax.Array, size: jax.Array, shift: jax.Array) -> jax.Array:
        drawn = size * jax.random.normal(jax.random.key(seed), shape) + shift
        return jnp.clip(drawn, -E4M3_MAX, E4M3_MAX).astype(dtype)

    return jax.jit(make)
