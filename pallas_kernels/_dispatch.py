"""Which implementation an op runs. The only place that knows the default order.

An explicit back end runs or raises `NotImplementedError` with the reason. `None` takes the op's kernel where that
comes first on this chip and can run, else the reference, and says once per op (logger `pallas_kernels`) what it took
and why not the kernel. An op may have a kernel for more than one chip: a call gets the one of the chip it runs on.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax

_log = logging.getLogger("pallas_kernels")


class Backend(enum.StrEnum):
    """An implementation of an op."""

    REFERENCE = "reference"
    MOSAIC = "mosaic"


HOPPER, BLACKWELL = "9.0", "10.0"
"""Compute capabilities for which there are kernels: sm_90 and sm_100."""
COMES_FIRST: dict[str, tuple[str, ...]] = {
    # op -> compute capabilities on which `None` takes its kernel: where it has run on the device within its tolerance
    # (docs/portability.md). Elsewhere a kernel is there for whoever asks for it by name.
    "quantize_blocks": (),  # XLA fuses it into what comes before; the matmuls launch their own kernel
    "quantize_mx": (),  # likewise
    "block_scaled_matmul": (HOPPER,),
    "mx_matmul": (),  # it has run; from 16 rows on XLA's bfloat16 is faster
    "swiglu_mlp": (HOPPER,),
    "decode_attention": (HOPPER,),
    "fast_frame": (),
    "between_attentions": (HOPPER,),
    "append_kv": (HOPPER,),
    "causal_conv": (),
}
Kernel = TypeVar("Kernel")


@functools.cache
def gpu_capability() -> str | None:
    """Compute capability of the default device ("9.0" on Hopper); None when it is not an NVIDIA GPU."""
    if jax.default_backend() != "gpu":
        return None
    return getattr(jax.devices()[0], "compute_capability", None)


def comes_first(op: str) -> bool:
    """Whether `None` takes the op's kernel on this chip, where it can run the call."""
    return gpu_capability() in COMES_FIRST[op]


def chip_backend(kernels: Mapping[str, Kernel]) -> Backend | None:
    """The back end of whoever has decided for an op's kernels already: by name where this chip has one, else None."""
    return Backend.MOSAIC if gpu_capability() in kernels else None


def need_capability(*wanted: str) -> str | None:
    """None when the default device is an NVIDIA GPU of such a compute capability, else a sentence saying what it is."""
    found = gpu_capability()
    if found in wanted:
        return None
    what = f"a GPU of capability {found}" if found else f"the {jax.default_backend()} back end"
    return f"needs a GPU of compute capability {' or '.join(wanted)}; this process runs on {what}"


def choose(
    op: str, backend: Backend | str | None, kernels: Mapping[str, Kernel], why_not: Callable[[Kernel], str | None]
) -> Kernel | None:
    """This chip's kernel when that is what runs, None when the reference is.

    Args:
      op: name of the op, a key of `COMES_FIRST`.
      backend: what the caller asked for; None leaves it to the chip.
      kernels: the op's Mosaic kernels by compute capability.
      why_not: returns None when a kernel can run this call, else the reason.

    Raises:
      ValueError: `backend` is not a back end's name.
      NotImplementedError: the back end asked for cannot run; the message says why.
    """
    try:
        wanted = None if backend is None else Backend(backend)
    except ValueError:
        names = ", ".join(repr(b.value) for b in Backend)
        raise ValueError(f"{op}: backend {backend!r} is not one of {names} or None") from None
    if wanted is Backend.REFERENCE:
        return None
    capability = gpu_capability()
    kernel = kernels.get(capability or "")
    reason = need_capability(*kernels) if kernel is None else why_not(kernel)
    if wanted is Backend.MOSAIC:
        if reason:
            raise NotImplementedError(f"{op}: backend 'mosaic' cannot run: {reason}")
        return kernel
    if reason is None and capability not in COMES_FIRST[op]:
        reason = f"taken on compute capability {capability} only by name: docs/portability.md says what was run"
    _say_once(op, Backend.REFERENCE if reason else Backend.MOSAIC, f" (mosaic: {reason})" if reason else "")
    return None if reason else kernel


@functools.cache
def _say_once(op: str, taken: Backend, skipped: str) -> None:
    _log.info("%s runs on %s%s", op, taken.value, skipped)
