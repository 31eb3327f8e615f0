"""One measurement of a case in a worker process of its own: the engine's step, XLA's, or the parts of the engine's.

Tracing and lowering use no GPU. Weights are made and programs compiled while the lock is shared, so that cases compile
side by side; what is timed has the GPU alone, and so has the compiling of convolutions, which XLA chooses by timing
them. The codec of so many slots is the same program in every case: it is compiled once and kept where servers keep it.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax
import numpy as np

from fishjax.engine.compile_cache import default_folder, keep_compiled

from ..measure_jax import hello
from . import parts
from .cases import StepCase as Case
from .floor import floor_ms
from .rig import EngineRun, Filled, GroupRun, PeerRun, Rig, SoundRun, chunk_ms, steady_ms

NUM_STEPS, ALONE_STEPS, NUM_CHUNKS = 256, 64, 16

__all__ = ["Case", "hello", "measure"]


class Lock(Protocol):
    """Of the GPU between processes."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def shared(self) -> AbstractContextManager[None]:
        """With others that compile, while nobody measures."""
        ...


# A process has one case; its second measurement finds shapes, programs and weights as the first one left them.
_rig = functools.cache(Rig)


@functools.cache
def _programs(rig: Rig) -> tuple[Any, ...]:
    return rig.decode(), rig.sound(), rig.group(), rig.prefill()


@functools.cache
def _filled(rig: Rig) -> Filled:
    return rig.fill()


class _Compiles:
    """Counts the programs that XLA compiles."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self)

    def __call__(self, event: str, duration_secs: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            self.count += 1


def measure(case: Case, part: str, options: dict[str, Any], lock: Lock) -> dict[str, Any]:
    """The fields that this part adds to a row. part: "engine", "peer" or "parts"."""
    del options
    keep_compiled(default_folder())
    started = time.perf_counter()
    rig = _rig(case)
    if part == "peer":
        return _measure_peer(rig, lock)
    programs = _programs(rig) if part == "engine" else _programs(rig)[:2]
    lowered = [bound.func.lower(*bound.args, *arguments) for bound, arguments in programs]
    variants = parts.lower(rig) if part == "parts" else []
    lower_s, started = time.perf_counter() - started, time.perf_counter()
    _compile_convolutions(lowered, lock)
    convolutions_s = time.perf_counter() - started
    with lock.shared():
        started = time.perf_counter()
        filled = _filled(rig)
        fill_s, started = time.perf_counter() - started, time.perf_counter()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda one: one.compile(), (*lowered, *(one for _, _, one in variants))))
        compile_s = convolutions_s + time.perf_counter() - started
    with lock:
        if part == "parts":
            return parts.measure(rig, filled, programs[0][0], programs[1][0], variants)
        result = _measure_engine(rig, filled, *(bound for bound, _ in programs))
    return {
        **result,
        "predicted_bytes": rig.memory.total - rig.memory.moving,
        "floor_ms": floor_ms(rig),
        "setup_s": {"lower": lower_s, "fill": fill_s, "compile": compile_s},
    }


def _compile_convolutions(lowered: Sequence[Any], lock: Lock) -> None:
    """Compile those that have convolutions, alone on the GPU."""
    for one in lowered:
        if "stablehlo.convolution" in one.as_text():
            with lock:
                one.compile()


def _measure_engine(rig: Rig, filled: Filled, decode: Any, sound: Any, group: Any, prefill: Any) -> dict[str, Any]:
    run = EngineRun(rig, filled.decode(decode), filled.sound(sound))
    compiles = _Compiles()
    steps_ms = steady_ms(run, NUM_STEPS, lambda: setattr(compiles, "count", 0))
    late = compiles.count
    memory = _device_memory()
    del run
    codec_ms = steady_ms(SoundRun(rig, filled.sound(sound)), ALONE_STEPS)
    decode_ms = steady_ms(EngineRun(rig, filled.decode(decode)), ALONE_STEPS)
    grouped_ms = steady_ms(EngineRun(rig, filled.decode(decode), group=filled.sound(group)), ALONE_STEPS)
    codec_group_ms = steady_ms(GroupRun(rig, filled.sound(group)), ALONE_STEPS)
    return {
        **_times(steps_ms),
        "codec_ms": float(np.median(codec_ms)),
        "decode_ms": float(np.median(decode_ms)),
        "grouped_ms_mean": float(np.mean(grouped_ms)),
        "codec_group_ms": float(np.median(codec_group_ms)),
        "prefill_ms": chunk_ms(rig, filled.prefill(prefill), NUM_CHUNKS),
        "compiles": late,
        **memory,
    }


def _measure_peer(rig: Rig, lock: Lock) -> dict[str, Any]:
    peer, arguments = rig.peer()
    lowered = peer.func.lower(*peer.args, *arguments)
    _compile_convolutions([lowered], lock)
    with lock.shared():
        filled = _filled(rig)
        lowered.compile()
    with lock:
        return _times(steady_ms(PeerRun(rig, filled.peer(peer)), NUM_STEPS))


def _times(steps_ms: np.ndarray) -> dict[str, Any]:
    p50, p99 = np.percentile(steps_ms, (50, 99))
    return {"ms_p50": float(p50), "ms_p99": float(p99), "ms_mean": float(np.mean(steps_ms)), "steps": len(steps_ms)}


def _device_memory() -> dict[str, Any]:
    """Bytes that this process holds on the device now, and held at most; on a CPU what JAX's arrays hold."""
    gc.collect()
    stats = jax.local_devices()[0].memory_stats()
    if stats is None:
        return {"device_bytes": sum(array.nbytes for array in jax.live_arrays()), "peak_bytes": None}
    return {"device_bytes": stats["bytes_in_use"], "peak_bytes": stats["peak_bytes_in_use"]}
