"""Which implementation an op runs. The only place that knows the default order.

An explicit back end runs or raises `NotImplementedError` with the reason. `None` takes the first of the op's list
that can run, and says once per op (logger `pallas_kernels`) what it took and why not the ones before it.
"""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable

import jax

_log = logging.getLogger("pallas_kernels")


class Backend(enum.StrEnum):
    """An implementation of an op."""

    REFERENCE = "reference"
    MOSAIC = "mosaic"


_KERNEL_FIRST, _REFERENCE_ONLY = (Backend.MOSAIC, Backend.REFERENCE), (Backend.REFERENCE,)
DEFAULT_ORDER: dict[str, tuple[Backend, ...]] = {
    # A kernel comes first once it has run on the device within its tolerance (README.md, "State of the kernels").
    "quantize_blocks": _REFERENCE_ONLY,  # XLA fuses it into what comes before; the matmuls launch their own kernel
    "quantize_mx": _REFERENCE_ONLY,
    "block_scaled_matmul": _KERNEL_FIRST,
    "mx_matmul": _REFERENCE_ONLY,
    "swiglu_mlp": _KERNEL_FIRST,
    "decode_attention": _KERNEL_FIRST,
}


@functools.cache
def gpu_capability() -> str | None:
    """Compute capability of the default device ("9.0" on Hopper); None when it is not an NVIDIA GPU."""
    if jax.default_backend() != "gpu":
        return None
    return getattr(jax.devices()[0], "compute_capability", None)


def need_capability(wanted: str) -> str | None:
    """None when the default device is an NVIDIA GPU of that compute capability, else a sentence saying what it is."""
    found = gpu_capability()
    if found == wanted:
        return None
    what = f"a GPU of capability {found}" if found else f"the {jax.default_backend()} back end"
    return f"needs a GPU of compute capability {wanted}; this process runs on {what}"


def no_kernel_yet() -> str:
    """The reason of an op that has only its reference."""
    return "no Mosaic kernel exists for this op yet"


def choose(op: str, backend: Backend | str | None, why_not_mosaic: Callable[[], str | None]) -> Backend:
    """The back end to run.

    Args:
      op: name of the op, a key of `DEFAULT_ORDER`.
      backend: what the caller asked for; None means the op's list in order.
      why_not_mosaic: returns None when the Mosaic kernel can run this call, else the reason.

    Raises:
      ValueError: `backend` is not a back end's name.
      NotImplementedError: the back end asked for cannot run; the message says why.
    """
    if backend is not None:
        try:
            wanted = Backend(backend)
        except ValueError:
            names = ", ".join(repr(b.value) for b in Backend)
            raise ValueError(f"{op}: backend {backend!r} is not one of {names} or None") from None
        if wanted is Backend.MOSAIC and (reason := why_not_mosaic()):
            raise NotImplementedError(f"{op}: backend 'mosaic' cannot run: {reason}")
        return wanted
    skipped = ""
    for candidate in DEFAULT_ORDER[op]:
        reason = why_not_mosaic() if candidate is Backend.MOSAIC else None
        if reason is None:
            _say_once(op, candidate, skipped)
            return candidate
        skipped = f" (mosaic {reason})"
    raise NotImplementedError(f"{op}: no back end can run{skipped}")


@functools.cache
def _say_once(op: str, taken: Backend, skipped: str) -> None:
    _log.info("%s runs on %s%s", op, taken.value, skipped)
