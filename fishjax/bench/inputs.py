"""Fresh random operands of a case, made on the device, and the float64 answer to them.

`make_x` and `make_w` are pure and traceable, so that a worker compiles them ahead and runs them when the GPU is its.
Weights have one magnitude 2^U(-4, 4) per 128 x 128 block: a kernel that reads a wrong scale cannot stay in tolerance.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import BlockScaled, MxScaled, ScaledKV, prepare_weights, quantize_blocks, quantize_kv, quantize_mx
from pallas_kernels import _testing as oracles
from pallas_kernels.types import BLOCK

from .cases import Case, lengths_of, matrices_of

REFERENCE = "reference"
EPS = 1e-6


def make_x(case: Case, seed: jax.Array) -> Any:
    """What each call of the chain reads: x (M, K), bfloat16 or quantised; q for attention.

    Between attentions: (residual (D, M), o (M, K), norm (D,)).
    """
    key = jax.random.key(seed)
    if case.op == "between_attentions":
        x, o, norm = jax.random.split(key, 3)
        D, K = case.shape["D"], case.shape["K"]
        return (
            2 * jax.random.normal(x, (D, case.m)),
            jax.random.normal(o, (case.m, K)).astype(jnp.bfloat16),
            1 + 0.3 * jax.random.normal(norm, (D,)),
        )
    if case.op == "decode_attention":
        q = 2 * jax.random.normal(key, (case.m, case.shape["H"], case.shape["d"]))
        return q.astype(jnp.bfloat16)
    x = jax.random.normal(key, (case.m, matrices_of(case)[0][1])).astype(jnp.bfloat16)
    if case.input == "bfloat16":
        return x
    quantise_mx = case.op == "mx_matmul"
    return quantize_mx(x, backend=REFERENCE) if quantise_mx else quantize_blocks(x, (1, BLOCK), backend=REFERENCE)


def make_dense(case: Case, seed: jax.Array) -> tuple[jax.Array, ...]:
    """One copy of the unquantised weights, float32: (w,), (w_gate_up, w_down) or (k, v)."""
    key, s = jax.random.key(seed), case.shape
    if case.op == "decode_attention":
        shape = (case.m, s["G"], s["S"], s["d"])
        keys = jax.random.split(key, 3)
        spread = 2.0 ** jax.random.uniform(keys[2], (case.m, s["G"], s["S"], 1), minval=-4.0, maxval=4.0)
        return jax.random.normal(keys[0], shape), spread * jax.random.normal(keys[1], shape)
    matrices = matrices_of(case)
    return tuple(_blocky(k, *shape) for k, shape in zip(jax.random.split(key, len(matrices)), matrices, strict=True))


def _blocky(key: jax.Array, N: int, K: int) -> jax.Array:
    values, blocks = jax.random.split(key)
    magnitude = 2.0 ** jax.random.uniform(blocks, (-(-N // BLOCK), K // BLOCK), minval=-4.0, maxval=4.0)
    magnitude = jnp.repeat(jnp.repeat(magnitude, BLOCK, axis=0)[:N], BLOCK, axis=1)
    return magnitude * jax.random.normal(values, (N, K)) * K**-0.5


def make_w(case: Case, seed: jax.Array) -> tuple[Any, ...]:
    """One copy of what the op reads: weights quantised and prepared, or keys, values and their lengths.

    Lengths are here because they are the same in all layers of a step, and so is what XLA makes of them, once.
    """
    dense = make_dense(case, seed)
    if case.op == "mx_matmul":
        return tuple(prepare_weights(quantize_mx(w, backend=REFERENCE), case.op) for w in dense)
    if case.op != "decode_attention":
        quantized = (quantize_blocks(w, (BLOCK, BLOCK), backend=REFERENCE) for w in dense)
        return tuple(prepare_weights(w, "block_scaled_matmul") for w in quantized)
    k, v = (quantize_kv(c) if case.shape["cache"] == "float8" else c.astype(jnp.bfloat16) for c in dense)
    return k, v, jnp.asarray(lengths_of(case))


def oracle(case: Case, x: Any, w: tuple[Any, ...]) -> np.ndarray:
    """The float64 result for operands fetched to the host."""
    if case.op == "decode_attention":
        k, v, lengths = w
        return oracles.attention_oracle(np.asarray(x), _host_kv(k), _host_kv(v), np.asarray(lengths))
    if case.op == "mx_matmul":
        x = _host_mx(x) if isinstance(x, MxScaled) else oracles.mx_rows(np.asarray(x))
        return oracles.mx_dequant(*x) @ oracles.mx_dequant(*_host_mx(w[0])).T
    weights = [_host_weight(item) for item in w]
    if case.op == "between_attentions":
        residual, o, norm = (np.asarray(item) for item in x)
        wo, gate_up, down, wqkv = (oracles.block_dequant(*item, (BLOCK, BLOCK)) for item in weights)
        return oracles.between_oracle(residual, o, (wo, norm, gate_up, down), (norm, wqkv), EPS)[1]
    if case.op == "swiglu_mlp":
        return oracles.swiglu_oracle(np.asarray(x), weights[0], weights[1])
    if isinstance(x, BlockScaled):
        values, scales = np.asarray(x.values_NK), np.asarray(x.scale_NbKb)
    else:
        values, scales = oracles.e4m3_rows(np.asarray(x))
    return oracles.block_dequant(values, scales, (1, BLOCK)) @ oracles.block_dequant(*weights[0], (BLOCK, BLOCK)).T


def _host_weight(w: BlockScaled) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales without the padding of a prepared weight."""
    N, K = w.shape
    return np.asarray(w.values_NK)[:N], np.asarray(w.scale_NbKb)[: -(-N // BLOCK), : K // BLOCK]


def _host_mx(w: MxScaled) -> tuple[np.ndarray, np.ndarray]:
    """Values and scale bytes (N, K / 32) without the padding of a prepared weight."""
    N, _ = w.shape
    return np.asarray(w.value_rows)[:N], np.asarray(w.scale_rows)[:N]


def _host_kv(cache: jax.Array | ScaledKV) -> np.ndarray:
    if isinstance(cache, ScaledKV):
        return np.asarray(cache.values_BGSd).astype(np.float32) * np.asarray(cache.scale_BGS)[..., None]
    return np.asarray(cache)
