"""block_scaled_matmul and decode_attention on PyTorch tensors: the same Hopper kernels, by `plgpu.as_torch_kernel`.

JAX compiles a kernel once per shape; PyTorch owns the memory and launches it. JAX passes on one launch and nothing
around it, so what is XLA's in the JAX calls (quantising, padding) is PyTorch's here, and attention has one split.
`BlockScaled` and `ScaledKV` hold tensors as they hold arrays. PyTorch is imported when a function is called; JAX needs
its CUDA plugin, and takes most of the GPU's memory unless XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _dispatch
from .block_scaled_matmul import api as matmul_api
from .block_scaled_matmul import config as matmul_config
from .block_scaled_matmul import mosaic_sm90 as matmul
from .decode_attention import api as attention_api
from .decode_attention import config as attention_config
from .decode_attention import mosaic_sm90 as attention
from .prepare import LINE, ROW_MULTIPLE
from .quantize_blocks.reference import INVERSE_MAX, SMALLEST_SCALE
from .types import BLOCK, E4M3_MAX, BlockScaled, ScaledKV

if TYPE_CHECKING:
    from torch import Tensor  # pyright: ignore[reportMissingImports]
else:
    Tensor = Any


def block_scaled_matmul(
    x_MK: Tensor | BlockScaled, w_NK: BlockScaled, *, config: matmul_config.Config | None = None
) -> Tensor:
    """y = x w^T with FP8 operands, as `pallas_kernels.block_scaled_matmul`; y_MN is bfloat16.

    Args:
      x_MK: (M, K) floating point CUDA tensor, quantised by `quantize_rows`, or what that returns.
      w_NK: CUDA tensors, one scale per 128 x 128; from `prepare_weight`, else it is padded at every call.
      config: tile choices; None takes the measured ones, or the default for the shape.

    Raises:
      ImportError: PyTorch is not installed.
      ValueError: kinds or shapes do not fit, or a tensor is not on a CUDA device.
      NotImplementedError: this JAX or this GPU cannot; the message says which.
    """
    torch = _torch("block_scaled_matmul")
    matmul_api.check_operands("block_scaled_matmul", x_MK, w_NK)
    x_MK = x_MK if isinstance(x_MK, BlockScaled) else quantize_rows(x_MK)
    w_NK = prepare_weight(w_NK)
    _check_cuda("block_scaled_matmul", x_MK.values_NK, x_MK.scale_NbKb, w_NK.values_NK, w_NK.scale_NbKb)
    (M, K), rows = x_MK.shape, w_NK.values_NK.shape[0]
    config = config or matmul.pick(M, rows, K)
    tile_m = matmul_config.tile_of(M, config)
    if reason := matmul_config.can_run(config, tile_m, rows, K):
        raise NotImplementedError(f"block_scaled_matmul: {reason}")
    padding = -M % tile_m
    values_MK = _pad(torch, x_MK.values_NK, (0, 0, 0, padding))
    scale_KbM = _pad(torch, x_MK.scale_NbKb.T, (0, padding, 0, -(K // BLOCK) % 4))
    w_TnK = w_NK.values_NK.reshape(-1, config.tile_n, K)
    y = matmul_kernel(M, tile_m, config)(values_MK, scale_KbM, w_TnK, w_NK.scale_NbKb)
    return y[:M, : w_NK.shape[0]]


def decode_attention(
    q_BHd: Tensor,
    k_cache: Tensor | ScaledKV,
    v_cache: Tensor | ScaledKV,
    lengths_B: Tensor,
    *,
    scale: float | None = None,
    config: attention_config.Config | None = None,
) -> Tensor:
    """Attention of one query position per slot, as `pallas_kernels.decode_attention`; o_BHd is bfloat16.

    Args:
      q_BHd: (B, H, d) bfloat16 CUDA tensor.
      k_cache: (B, G, S, d) bfloat16, or ScaledKV of e4m3 values and float32 scales (B, G, S).
      v_cache: like k_cache.
      lengths_B: (B,) int32.
      scale: factor on the logits; None means d ** -0.5.
      config: tile choices, of which all parts meet in one launch; None takes the measured ones, or the default.

    Raises:
      ImportError, ValueError, NotImplementedError: as `block_scaled_matmul`.
    """
    torch = _torch("decode_attention")
    attention_api.check_operands(q_BHd, k_cache, v_cache, lengths_B)
    fp8 = isinstance(k_cache, ScaledKV)
    caches: tuple[Any, ...] = (
        (k_cache.values_BGSd, v_cache.values_BGSd, k_cache.scale_BGS, v_cache.scale_BGS) if fp8 else (k_cache, v_cache)
    )
    wanted = (torch.float8_e4m3fn,) * 2 + (torch.float32,) * 2 if fp8 else (torch.bfloat16,) * 2
    found = tuple(t.dtype for t in (q_BHd, *caches, lengths_B))
    if found != (torch.bfloat16, *wanted, torch.int32):
        raise ValueError(f"decode_attention: q, caches, lengths must be bfloat16, {wanted}, int32; got {found}")
    _check_cuda("decode_attention", q_BHd, *caches, lengths_B)
    (B, H, d), (_, G, S, _) = q_BHd.shape, k_cache.shape
    config = config or dataclasses.replace(attention.pick(k_cache), splits=1)
    if config.splits > 1 and not config.in_cluster:
        raise NotImplementedError(f"decode_attention: {config.splits} splits need a second launch; PyTorch gets one")
    if reason := attention_config.can_run(config, H, G, S, d, 1 if fp8 else 2):
        raise NotImplementedError(f"decode_attention: {reason}")
    if fp8:
        most = torch.finfo(torch.float16).max
        q_BHd = q_BHd.float().clamp(-most, most).to(torch.float16)
    q_BGRd = _pad(torch, q_BHd.reshape(B, G, H // G, d), (0, 0, 0, attention_config.GROUP_ROWS - H // G))
    kernel = attention_kernel(H // G, d**-0.5 if scale is None else scale, config)
    slots_B = torch.arange(B, dtype=torch.int32, device=q_BHd.device)
    o = kernel(q_BGRd, lengths_B.contiguous(), slots_B, *(c.contiguous() for c in caches))
    return o.reshape(B, H, d)


def quantize_rows(x_MK: Tensor) -> BlockScaled:
    """(M, K) floating point -> e4m3 values (M, K), float32 scales (M, K / 128): quantize_blocks' formula in PyTorch."""
    torch = _torch("quantize_rows")
    x = x_MK.float().reshape(x_MK.shape[0], -1, BLOCK)
    finite = x.isfinite()
    amax = torch.where(finite, x.abs(), 0.0).amax(-1)
    scale = torch.where(amax == 0, 1.0, (amax * float(INVERSE_MAX)).clamp(min=SMALLEST_SCALE))
    quotient = (x / scale[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    values = torch.where(finite, quotient, float("nan")).to(torch.float8_e4m3fn)
    return BlockScaled(values.reshape(x_MK.shape), scale)


def prepare_weight(w_NK: BlockScaled) -> BlockScaled:
    """Pad a weight as `pallas_kernels.prepare_weights` does; a prepared one is returned as it is."""
    torch = _torch("prepare_weight")
    values, scale = w_NK.values_NK, w_NK.scale_NbKb
    if values.shape[0] % ROW_MULTIPLE == 0 and scale.shape[1] % LINE == 0:
        return w_NK
    values = _pad(torch, values, (0, 0, 0, -values.shape[0] % ROW_MULTIPLE))
    return BlockScaled(values, _pad(torch, scale, (0, -scale.shape[1] % LINE, 0, 0)), w_NK.shape[0])


@functools.cache
def matmul_kernel(M: int, tile_m: int, config: matmul_config.Config):
    """(values, scales, weight's values in tiles of rows, its scales) -> y, compiled at the first call of a shape."""

    def launch(values_MK, scale_KbM, w_TnK, w_scale_NbKb):
        return matmul.launch(values_MK, scale_KbM, w_TnK, w_scale_NbKb, M, jnp.bfloat16, tile_m, config)

    return plgpu.as_torch_kernel(launch)


@functools.cache
def attention_kernel(heads: int, scale: float, config: attention_config.Config):
    """(q (B, G, 8, d), lengths, slots, caches) -> o, compiled at the first call of a shape."""

    def launch(q_BGRd, lengths_B, slots_B, *caches):
        return attention.launch(q_BGRd, caches, lengths_B, slots_B, heads, scale, config)[0]

    return plgpu.as_torch_kernel(launch)


def _torch(op: str) -> ModuleType:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{op} on tensors needs PyTorch, which is not installed (pip install torch)") from error
    return torch


def _check_cuda(op: str, *tensors: Tensor) -> None:
    """Raise unless JAX has the door, the tensors lie on one CUDA device, and that device runs the kernels."""
    if not hasattr(plgpu, "as_torch_kernel"):
        raise NotImplementedError(f"{op}: this JAX has no plgpu.as_torch_kernel; jax 0.10.2 and 0.11.2 have it")
    devices = [str(t.device) for t in tensors]
    if len(set(devices)) != 1 or not devices[0].startswith("cuda"):
        raise ValueError(f"{op}: all tensors must be on one CUDA device, got {', '.join(devices)}")
    if reason := _dispatch.need_capability("9.0"):
        raise NotImplementedError(f"{op}: {reason}")


def _pad(torch: ModuleType, x: Tensor, widths: tuple[int, ...]) -> Tensor:
    """Zeros at the ends, last axis first as in torch.nn.functional.pad, contiguous; e4m3 goes as bytes."""
    if x.dtype == torch.float8_e4m3fn:
        return _pad(torch, x.view(torch.uint8), widths).view(x.dtype)
    return torch.nn.functional.pad(x, widths).contiguous()
