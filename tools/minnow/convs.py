"""Other ways to run the codec's convolutions while training, and a choice between them by measurement.

XLA hands 1-D convolutions to cuDNN, which is slow for a dozen channels at a full sample rate with dilated taps. The
weights are the same in all kinds; only the program differs:

    conv      as it is
    im2col    one matmul over the taps' shifted copies
    block     `s` samples become channels: a convolution of s*C >= 128 channels without dilation, its kernel mostly
              the same numbers at shifted places and zeros. More arithmetic, all of it on tensor cores
    block2col the same, as a matmul over shifted copies
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ("conv", "im2col", "block", "block2col")


def plain_kind() -> str:
    """The kind for programs that run a few times: compiles in seconds, where cuDNN's tuning would take a minute."""
    return "conv" if jax.default_backend() == "cpu" else "im2col"


_WIDE = 128  # channels that a block is brought up to
# (in channels, out channels, taps, dilation) -> kind
Table = Mapping[tuple[int, int, int, int], str]

_lax_conv = jax.lax.conv_general_dilated


def _plain(x_BTC: jax.Array, w: jax.Array, stride: int = 1, dilation: int = 1) -> jax.Array:
    return _lax_conv(
        x_BTC,
        w,
        window_strides=(stride,),
        padding=((0, 0),),
        rhs_dilation=(dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"),
    )


def _im2col(x_BTC: jax.Array, w: jax.Array, dilation: int = 1) -> jax.Array:
    steps = x_BTC.shape[1] - (w.shape[0] - 1) * dilation
    shifted = [x_BTC[:, tap * dilation : tap * dilation + steps] for tap in range(w.shape[0])]
    columns = shifted[0] if len(shifted) == 1 else jnp.concatenate(shifted, axis=-1)
    return columns @ w.reshape(-1, w.shape[-1])


def _blocked(x_BTC: jax.Array, w: jax.Array, dilation: int, conv: Callable) -> jax.Array:
    """x (B, T + past, in), w (k, in, out): `size` samples a block; past = (k - 1) * dilation."""
    taps, num_in, num_out = w.shape
    past = (taps - 1) * dilation
    steps = x_BTC.shape[1] - past
    size = max(1, _WIDE // max(num_in, num_out))
    while steps % size:
        size //= 2
    blocks_back = -(-past // size)
    extra = blocks_back * size - past
    x_BTC = jnp.pad(x_BTC, ((0, 0), (extra, 0), (0, 0)))
    x_BTC = x_BTC.reshape(x_BTC.shape[0], steps // size + blocks_back, size * num_in)
    # Output phase b of a block needs tap t at input phase a of block j: j * size + a = b + extra + t * dilation.
    j, a, b, t = np.ix_(range(blocks_back + 1), range(size), range(size), range(taps))
    place = (j * size + a == b + extra + t * dilation).astype(np.float32)
    wide = jnp.einsum("jabt,tio->jaibo", jnp.asarray(place, w.dtype), w)
    y = conv(x_BTC, wide.reshape(blocks_back + 1, size * num_in, size * num_out))
    return y.reshape(y.shape[0], steps, num_out)


def run(kind: str, x_BTC: jax.Array, w: jax.Array, dilation: int = 1) -> jax.Array:
    """A convolution of stride 1 without padding, in one of `KINDS`."""
    if kind == "im2col":
        return _im2col(x_BTC, w, dilation)
    if kind == "block":
        return _blocked(x_BTC, w, dilation, _plain)
    if kind == "block2col":
        return _blocked(x_BTC, w, dilation, _im2col)
    return _plain(x_BTC, w, dilation=dilation)


@contextlib.contextmanager
def convolutions(table: Table, default: str = "conv") -> Iterator[None]:
    """While tracing inside, the codec's convolutions run in the table's kinds (`default` where it has none)."""

    def conv(
        lhs,
        rhs,
        window_strides=(1,),
        padding=((0, 0),),
        lhs_dilation=None,
        rhs_dilation=None,
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count: int = 1,
        **unused,
    ):
        if lhs_dilation is not None or dimension_numbers != ("NWC", "WIO", "NWC") or unused:
            raise NotImplementedError("only the codec's own convolutions")
        lhs = jnp.pad(lhs, ((0, 0), tuple(padding[0]), (0, 0)))
        (stride,), dilation = window_strides, 1 if rhs_dilation is None else rhs_dilation[0]
        taps = rhs.shape[0]
        if feature_group_count > 1:
            steps = lhs.shape[1] - (taps - 1) * dilation
            return sum(lhs[:, t * dilation : t * dilation + steps] * rhs[t, 0] for t in range(taps))
        if stride > 1 and taps % stride == 0 and lhs.shape[1] % stride == 0:
            # `stride` samples are one wide sample: no stride is left.
            lhs = lhs.reshape(lhs.shape[0], -1, stride * lhs.shape[2])
            rhs = rhs.reshape(taps // stride, -1, rhs.shape[2])
            taps, stride = rhs.shape[0], 1
        if stride > 1:
            return _plain(lhs, rhs, stride, dilation)
        key = (rhs.shape[1], rhs.shape[2], taps, dilation)
        fallback = default if taps > 1 or default == "conv" else default.replace("im2col", "block2col")
        return run(table.get(key, fallback), lhs, rhs, dilation)

    jax.lax.conv_general_dilated = conv
    try:
        yield
    finally:
        jax.lax.conv_general_dilated = _lax_conv


def measure(shapes: list[tuple[int, int, int]], batch: int, threads: Executor, log: Callable[[str], None]) -> Table:
    """Times forward and backward of the residual units' convolutions, (channels, steps, dilation) each, and chooses.

    Kinds are compiled side by side; one that fails to compile is left out and said so.
    """

    def lower(kind: str, channels: int, steps: int, dilation: int):
        def both(x_BTC, w, g_BTC):
            y, pull = jax.vjp(
                lambda x, w: run(kind, jnp.pad(x, ((0, 0), (6 * dilation, 0), (0, 0))), w, dilation), x_BTC, w
            )
            return y, pull(g_BTC)

        x = jax.ShapeDtypeStruct((batch, steps, channels), jnp.bfloat16)
        w = jax.ShapeDtypeStruct((7, channels, channels), jnp.bfloat16)
        return jax.jit(both).lower(x, w, x)

    began = time.monotonic()
    futures = {(kind, shape): threads.submit(lower(kind, *shape).compile) for shape in shapes for kind in KINDS}
    table: dict[tuple[int, int, int, int], str] = {}
    for shape in shapes:
        channels, steps, dilation = shape
        x = jnp.ones((batch, steps, channels), jnp.bfloat16)
        w = jnp.ones((7, channels, channels), jnp.bfloat16)
        times: dict[str, float] = {}
        for kind in KINDS:
            try:
                program = futures[kind, shape].result()
                jax.block_until_ready(program(x, w, x))
                start = time.monotonic()
                for _ in range(4):
                    out = program(x, w, x)
                jax.block_until_ready(out)
                times[kind] = (time.monotonic() - start) / 4
            except jax.errors.JaxRuntimeError as error:
                log(f"  {kind} {shape} does not run: {str(error).splitlines()[0]}")
        best = min(times, key=times.__getitem__)
        log(
            f"  {channels} channels, dilation {dilation}: {best}; "
            + ", ".join(f"{kind} {1000 * t:.2f}" for kind, t in times.items())
            + " ms"
        )
        table[channels, channels, 7, dilation] = best
    log(f"convolutions chosen in {time.monotonic() - began:.0f} s")
    return table
