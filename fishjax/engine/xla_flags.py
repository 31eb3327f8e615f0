"""What XLA is told before it starts, for processes of our own that run an engine. Knows no JAX: it must come first."""

from __future__ import annotations

import importlib.metadata
import os

_FLAG = "--xla_gpu_command_buffer_update_mode"


def set_xla_flags() -> None:
    """Record the graphs of a step once: adds `--xla_gpu_command_buffer_update_mode=SKIP_TEMP` to `XLA_FLAGS`.

    By default XLA records a program's graph anew when the addresses of its temporary memory have changed since the last
    run. An engine's programs take turns in the same memory (decode step, codec step, a chunk of a prompt), so that they
    always have, and recording costs more than the launches that a graph saves. With SKIP_TEMP a program sees its
    temporary memory at the same virtual addresses in every run, so its graph stays as it is. XLA then takes its
    allocator of virtual memory, and says so at start.

    To be called before JAX starts its back ends. Nothing changes where `XLA_FLAGS` already names the flag, where no
    CUDA plugin is installed, and before JAX 0.11, whose XLA ends the process over a flag that it does not know.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _FLAG not in flags and _has_flag() and _has_cuda():
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}=SKIP_TEMP".strip()


def _has_flag() -> bool:
    major, minor = importlib.metadata.version("jaxlib").split(".")[:2]
    return (int(major), int(minor)) >= (0, 11)


def _has_cuda() -> bool:
    return any(plugin.name.startswith("xla_cuda") for plugin in importlib.metadata.entry_points(group="jax_plugins"))
