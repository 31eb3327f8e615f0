"""What differs between the chips, for kernels that are otherwise the same on both: above all the tensor core.

A kernel asks for products of tiles in shared memory and gets float32 registers. Each product starts from zero and is
complete when it is handed over: the caller may scale it, and refill the memory that was read. On Hopper the next one is
made meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import _dispatch

Pair = tuple[Any, Any]
"""Two references to shared memory, (rows, K) and (K, columns)."""
Use = Callable[[int, jax.Array], jax.Array]
"""What is made of a product, number and float32 tile, before the next one is waited for."""


def _itself(_: int, product: jax.Array) -> jax.Array:
    return product


class Chip(Protocol):
    """A generation of GPUs.

    capability: its compute capability. num_sms: of the device that defaults are made for.
    rows: those that one product may have. max_tokens: columns of it, as many as registers hold beside their sum.
    layout: of a product in registers; `layout.reduce` is that of one value per row or column. transposed: what it is
    cast to before it is stored transposed.
    """

    capability: str
    num_sms: int
    rows: tuple[int, ...]
    max_tokens: int
    layout: plgpu.Layout
    transposed: plgpu.Layout

    def scratch(self, tile: tuple[int, int], count: int) -> list:
        """What a kernel allocates, once, to ask for `count` products of this shape at a time."""
        ...

    def products(self, pairs: Sequence[Pair], tile: tuple[int, int], scratch: Sequence, use: Use = _itself) -> list:
        """What `use` makes of float32 products of this shape, in `layout`."""
        ...


class _Hopper:
    """wgmma: products are made in registers."""

    capability, num_sms = _dispatch.HOPPER, 132
    rows, max_tokens = (64, 128), 128
    layout, transposed = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED

    def scratch(self, tile, count):
        return []

    def products(self, pairs, tile, scratch, use=_itself):
        def multiply(*accs):
            for acc, (a, b) in zip(accs, pairs, strict=True):
                plgpu.wgmma(acc, a, b)
            last = len(accs) - 1
            return [use(i, plgpu.wgmma_accumulator_load(acc, wait_n=last - i)) for i, acc in enumerate(accs)]

        return pl.run_scoped(multiply, *[plgpu.WGMMAAccumulatorRef(tile, jnp.float32)] * len(pairs))


class _Blackwell:
    """tcgen05: products are made in tensor memory, in the background, and read from there."""

    capability, num_sms = _dispatch.BLACKWELL, 148
    rows, max_tokens = (128,), 64
    layout, transposed = plgpu.Layout.TCGEN05, plgpu.Layout.TCGEN05_TRANSPOSED

    def scratch(self, tile, count):
        return [*[plgpu.TMEM(tile, jnp.float32)] * count, plgpu.Barrier(orders_tensor_core=True)]

    def products(self, pairs, tile, scratch, use=_itself):
        *accs, done = scratch
        for acc, (a, b) in zip(accs, pairs, strict=True):
            plgpu.tcgen05_mma(acc, a, b, accumulate=False)
        plgpu.tcgen05_commit_arrive(done)
        plgpu.barrier_wait(done)
        made = [plgpu.async_load_tmem(acc, layout=self.layout) for acc in accs]
        plgpu.wait_load_tmem()  # every warp has read them: the next products may overwrite them
        return [use(i, product) for i, product in enumerate(made)]


SM90: Chip = _Hopper()
SM100: Chip = _Blackwell()


def broadcast(vector: jax.Array, tile: tuple[int, int], axis: int, chip: Chip) -> jax.Array:
    """One value per row (axis 0) or column (axis 1), in the layout of products of this shape."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, tile, (axis,)), chip.layout)
