"""What XLA makes of the same work: bfloat16, and FP8 with one scale per tensor (which XLA may hand to cuBLASLt)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import ScaledKV
from pallas_kernels.prepare import ROW_MULTIPLE
from pallas_kernels.types import E4M3_MAX

from .cases import Case, lengths_of, matrices_of
from .chain import Call
from .inputs import EPS, make_dense, make_w, make_x

CUBLASLT_FP8 = "__cublas$lt$matmul$f8"


def operands(case: Case, peer: str) -> tuple[Any, Any]:
    """(make_x, make_w) of a peer, each a function of (case, seed)."""
    if case.op == "decode_attention":
        return make_x, _bf16_w if peer == "xla_bf16" else make_w
    if peer == "xla_bf16":
        return _bf16_x, _bf16_w
    return _fp8_x if case.input == "quantized" else make_x, _fp8_w


def why_not(case: Case, peer: str) -> str | None:
    """None when the peer has a meaning for the case, else the reason."""
    if peer == "xla_fp8" and case.op == "decode_attention" and case.shape["cache"] == "bfloat16":
        return "the cache is bfloat16: see xla_bf16"
    if peer == "xla_fp8" and case.op == "between_attentions":
        return "see its matmuls"
    if peer == "xla_fp8" and case.op == "mx_matmul":
        return "one scale per tensor either way: see block_scaled_matmul"
    return None


def call(case: Case, peer: str) -> Call:
    """call(x, w) of "xla_bf16" or "xla_fp8"."""
    if case.op == "decode_attention":
        return lambda x, w: attention(x, *w)
    if case.op == "between_attentions":
        return _between_bf16
    if case.op == "swiglu_mlp":
        return _mlp_bf16 if peer == "xla_bf16" else _mlp_fp8
    return _matmul_bf16 if peer == "xla_bf16" else _matmul_fp8


def why_not_fp8(case: Case, hlo: str) -> str | None:
    """None when the compiled program multiplies FP8 in cuBLASLt (or has no matmul of weights), else what it does."""
    if case.op == "decode_attention" or CUBLASLT_FP8 in hlo:
        return None
    return "XLA did not rewrite the FP8 dot to cuBLASLt's FP8 matmul"


def _bf16_x(case: Case, seed: jax.Array) -> Any:
    if case.op == "between_attentions":
        residual, o, norm = make_x(case, seed)
        return residual.T.astype(jnp.bfloat16), o, norm.astype(jnp.bfloat16)
    return jax.random.normal(jax.random.key(seed), (case.m, matrices_of(case)[0][1])).astype(jnp.bfloat16)


def _bf16_w(case: Case, seed: jax.Array) -> tuple[jax.Array, ...]:
    if case.op == "decode_attention":
        return (*(c.astype(jnp.bfloat16) for c in make_dense(case, seed)), jnp.asarray(lengths_of(case)))
    return tuple(_padded(w).astype(jnp.bfloat16) for w in make_dense(case, seed))


def _fp8_x(case: Case, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
    return quantize_tensor(_bf16_x(case, seed))


def _fp8_w(case: Case, seed: jax.Array) -> tuple[tuple[jax.Array, jax.Array], ...]:
    return tuple(quantize_tensor(_padded(w)) for w in make_dense(case, seed))


def _padded(w_NK: jax.Array) -> jax.Array:
    """Rows to a multiple of 64, as our own weights have them: the head's 4,097 would cost a peer its alignment."""
    return jnp.pad(w_NK, ((0, -w_NK.shape[0] % ROW_MULTIPLE), (0, 0)))


def quantize_tensor(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(e4m3 values, one float32 scale) of a whole array."""
    scale = jnp.max(jnp.abs(x.astype(jnp.float32))) / E4M3_MAX
    return jnp.clip(x.astype(jnp.float32) / scale, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn), scale


def _matmul_bf16(x: jax.Array, w: tuple[jax.Array]) -> jax.Array:
    return x @ w[0].T


def _mlp_bf16(x: jax.Array, w: tuple[jax.Array, ...]) -> jax.Array:
    gate, up = jnp.split(x @ w[0].T, 2, axis=1)
    return (jax.nn.silu(gate) * up) @ w[1].T


def _between_bf16(x: tuple[jax.Array, ...], w: tuple[jax.Array, ...]) -> jax.Array:
    residual, o, norm = x
    residual += o @ w[0].T
    residual += _mlp_bf16(_normed(residual, norm), w[1:3])
    return _normed(residual, norm) @ w[3].T


def _normed(x_MD: jax.Array, weight_D: jax.Array) -> jax.Array:
    wide = x_MD.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + EPS)).astype(x_MD.dtype) * weight_D


def _matmul_fp8(x: Any, w: tuple[Any]) -> jax.Array:
    return _dot_fp8(x if isinstance(x, tuple) else quantize_tensor(x), w[0])


def _mlp_fp8(x: jax.Array, w: tuple[Any, Any]) -> jax.Array:
    gate, up = jnp.split(_dot_fp8(quantize_tensor(x), w[0]), 2, axis=1)
    return _dot_fp8(quantize_tensor(jax.nn.silu(gate) * up), w[1])


def _dot_fp8(x: tuple[jax.Array, jax.Array], w: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The pattern that XLA knows: both operands widened and scaled, then a bfloat16 dot."""
    x_MK, w_NK = (values.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16) for values, scale in (x, w))
    return jax.lax.dot_general(x_MK, w_NK, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def attention(q_BHd: jax.Array, k: Any, v: Any, lengths_B: jax.Array) -> jax.Array:
    """Plain grouped-query softmax attention: bfloat16 operands, float32 logits and sums."""
    k, v = (c.dequantize().astype(jnp.bfloat16) if isinstance(c, ScaledKV) else c for c in (k, v))
    B, H, d = q_BHd.shape
    G, S = k.shape[1:3]
    q_BGRd = q_BHd.reshape(B, G, H // G, d)
    logits = jnp.einsum("bgrd,bgsd->bgrs", q_BGRd, k, preferred_element_type=jnp.float32) * np.float32(d**-0.5)
    live_BS = jnp.arange(S) < lengths_B[:, None]
    p = jax.nn.softmax(jnp.where(live_BS[:, None, None], logits, -jnp.inf), axis=-1).astype(jnp.bfloat16)
    o = jnp.einsum("bgrs,bgsd->bgrd", p, v, preferred_element_type=jnp.float32)
    return o.reshape(B, H, d).astype(jnp.bfloat16)
