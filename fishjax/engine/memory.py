"""What an engine keeps in the device's memory, known before it is allocated.

    weights, slots and sound as long as it lives; moving: rows outside the slots, for requests on their way, and of
    clips; voices: the budget of snapshots, which fills up while it serves

Not in it: the working space of the compiled programs, which the device shows only while they run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from typing import Any

import jax
from flax import nnx

from fishjax.codec import Codec
from fishjax.codec.encode_stream import init_encode_stream
from fishjax.codec.stream import init_stream
from fishjax.engine.state import new_state
from fishjax.errors import InvalidRequest
from fishjax.model.cache import init_cache
from fishjax.model.dual_ar import DualAR

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes: of weights, of all slots' caches, of all slots' codec streams, of rows outside the slots, of snapshots."""

    weights: int
    slots: int
    sound: int
    moving: int
    voices: int

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return sum(astuple(self))

    def __str__(self) -> str:
        words = ", ".join(f"{name} {num_bytes / _MIB:.1f}" for name, num_bytes in asdict(self).items())
        return f"{self.total / _MIB:.1f} MiB ({words})"

    def check(self, limit: int | None) -> None:
        """Raises InvalidRequest when a device that gives `limit` bytes (None: it does not say) is too small."""
        if limit is not None and self.total > limit:
            raise InvalidRequest(
                f"the device gives {limit / _MIB:.1f} MiB, and this server needs {self}: "
                "start it with fewer --slots, a shorter --max-len, a smaller --precision or less --voice-memory"
            )


def plan(
    model: DualAR, codec: Codec, beside: Any, *, num_slots: int, max_len: int, kv_dtype: Any, voice_bytes: int = 0
) -> MemoryPlan:
    """What an engine of these parts keeps, with weights `beside` the modules; all may be abstract."""
    config = model.config
    row = described(lambda: (init_cache(config, 1, max_len, kv_dtype), init_stream(codec, 1, max_len)))
    clip = described(lambda: init_encode_stream(codec, 1, 1))
    return MemoryPlan(
        weights=num_bytes((nnx.state(model), nnx.state(codec), beside)),
        slots=described(lambda: new_state(config, num_slots, max_len, kv_dtype)),
        sound=described(lambda: init_stream(codec, num_slots, max_len)),
        # A row for each slot whose request is taken out of it; what clips begin with, and where one has come to.
        moving=row * num_slots + 2 * clip,
        voices=voice_bytes,
    )


def num_bytes(tree: Any) -> int:
    """Bytes of the arrays in a pytree, made or only described."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def described(make: Callable[[], Any]) -> int:
    """Bytes of what `make` would allocate."""
    return num_bytes(jax.eval_shape(make))


def device_limit() -> int | None:
    """Bytes that the first device gives to this process, or None where it does not say (a CPU)."""
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("bytes_limit") if stats else None
