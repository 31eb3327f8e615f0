"""Compiles the kernels for chips that need not be here, and prints what ptxas says of each.

    python tools/compile_kernels.py
    python tools/compile_kernels.py --freeze    # writes tests/kernels/data/compiled.json, too

Needs JAX's CUDA plugin of JAX's own version (`pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt`) and, on the
path, the ptxas of a CUDA toolkit that knows the chips; no GPU and no driver. JAX lowers for a chip's compute
capability, XLA compiles ahead of time for a device that is only described. What compiles may be wrong, or hang:
nothing runs.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

import pallas_kernels as pk
from pallas_kernels import _dispatch

ROOT = Path(__file__).parents[1]
FROZEN = ROOT / "tests" / "kernels" / "data" / "compiled.json"
CHIPS = {"sm_90": (_dispatch.HOPPER, 132), "sm_100": (_dispatch.BLACKWELL, 148)}
"""Compute capability, and SMs of the device that is described."""
OPS = (
    "quantize_blocks",
    "quantize_mx",
    "block_scaled_matmul",
    "mx_matmul",
    "swiglu_mlp",
    "decode_attention",
    "between_attentions",
    "append_kv",
    "causal_conv",
)
ROWS = (1, 64, 128)
SHARED = ("_chip.py", "_mosaic.py", "_chain.py", "_persistent.py")
"""Sources of more than one op."""


@dataclass(frozen=True)
class Row:
    """One call: its kernels' registers a thread and bytes spilled to memory, in the order of launch."""

    op: str
    chip: str
    shape: str
    registers: list[int]
    spilled: list[int]


def main() -> int:
    """0 when everything compiles for its chip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--freeze", action="store_true", help=f"write {FROZEN.relative_to(ROOT)}")
    freeze = parser.parse_args().freeze
    rows = []
    for chip in CHIPS:  # a process each: Mosaic GPU keeps the first chip that it compiles for
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            rows += pool.submit(compile_all, chip).result()
    if freeze:
        ptxas = subprocess.run(["ptxas", "--version"], capture_output=True, text=True, check=True).stdout
        ptxas = re.search(r"V([\d.]+)", ptxas)[1]
        header = {"jax": jax.__version__, "ptxas": ptxas, "sources": {str(p): digest(p) for p in sources()}}
        lines = ",\n".join("    " + json.dumps(asdict(row)) for row in rows)
        FROZEN.write_text(f'{json.dumps(header, indent=2)[:-2]},\n  "rows": [\n{lines}\n  ]\n}}\n')
    return 0


def compile_all(chip: str) -> list[Row]:
    """Every call for one chip, printed as it is done."""
    jax.config.update("jax_platforms", "cpu")
    device, rows = described(chip), []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        for op, shape, call, operands in calls(chip):
            rows.append(compiled(op, chip, shape, call, operands, device, Path(folder)))
            print(*asdict(rows[-1]).values(), flush=True)
    return rows


def described(chip: str) -> Any:
    """A device that compiles and does not run."""
    capability, num_sms = CHIPS[chip]
    major = capability.partition(".")[0]
    config = f"""
      gpu_device_info {{
        cuda_compute_capability {{ major: {major} feature_extension: ACCELERATED_FEATURES }}
        core_count: {num_sms} threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
        shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
        registers_per_core_limit: 65536 registers_per_block_limit: 65536 fpus_per_core: 128
        memory_bandwidth: 4800000000000 l2_cache_size: 52428800 device_memory_size: 137438953472 clock_rate_ghz: 1.9
        name: "{chip}" device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability {capability}a"
        driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 }}
      device_description_str: "{chip}"
    """
    return topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1").devices[0]


def calls(chip: str) -> Iterator[tuple[str, str, Callable, tuple]]:
    """(op, shape, call, abstract operands) of every kernel at every shape of its arg_specs, a few row counts each."""
    capability, _ = CHIPS[chip]
    struct, bf16 = jax.ShapeDtypeStruct, jnp.dtype(jnp.bfloat16)
    for op in OPS:
        kernel = importlib.import_module(f"pallas_kernels.{op}.api").KERNELS.get(capability)
        specs = importlib.import_module(f"pallas_kernels.{op}.arg_specs")
        if kernel is None:
            continue
        if op == "between_attentions":
            for spec in specs.SPECS:
                yield op, spec.name, functools.partial(kernel.between_attentions, eps=1e-6), spec.arguments()
            continue
        if op == "append_kv":
            for spec in specs.SPECS:
                yield op, spec.name, kernel.append_kv, spec.arguments()
            continue
        if op == "causal_conv":
            for spec in specs.SPECS:
                operands = tuple(spec.arguments().items())

                def call(*values, kernel=kernel, spec=spec, names=tuple(name for name, _ in operands)):
                    return kernel.causal_conv(**dict(zip(names, values, strict=True)), dilation=spec.dilation)

                yield op, spec.name, call, tuple(value for _, value in operands)
            continue
        if op == "decode_attention":
            for spec in specs.SPECS:
                for cache in specs.CACHES:
                    q = struct((spec.B, spec.H, spec.d), bf16)
                    kv = struct((spec.B, spec.G, spec.S, spec.d), bf16)
                    kv = jax.eval_shape(pk.quantize_kv, kv) if cache == "float8" else kv
                    if kernel.why_not(q, kv) is None:
                        call = functools.partial(kernel.decode_attention, scale=spec.d**-0.5)
                        yield op, f"{spec.name}, {cache}", call, (q, kv, kv, struct((spec.B,), jnp.int32))
            continue
        for spec in specs.SPECS:
            for M in ROWS:
                if op.startswith("quantize"):
                    call, operands = kernel.quantize_rows, (struct((M, spec.K), bf16),)
                elif op == "swiglu_mlp":
                    weights = weight(2 * spec.F, spec.D, op, capability), weight(spec.D, spec.F, op, capability)
                    call, operands = kernel.swiglu_mlp, (struct((M, spec.D), bf16), *weights)
                else:
                    call = functools.partial(getattr(kernel, op), out_dtype=bf16)
                    operands = struct((M, spec.K), bf16), weight(spec.N, spec.K, op, capability)
                yield op, f"{spec.name}, M = {M}", call, operands


def weight(N: int, K: int, op: str, capability: str) -> Any:
    """An abstract weight, quantised and prepared."""

    def make(w):
        quantised = pk.quantize_mx(w) if op == "mx_matmul" else pk.quantize_blocks(w, (128, 128))
        return pk.prepare_weights(quantised, op, capability)

    return jax.eval_shape(make, jax.ShapeDtypeStruct((N, K), jnp.float32))


def compiled(op: str, chip: str, shape: str, call: Callable, operands: tuple, device: Any, dump: Path) -> Row:
    """Compile one call and read what the compiler left in `dump`."""
    for left in dump.iterdir():
        left.unlink()
    sharding = jax.sharding.SingleDeviceSharding(device)
    operands = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), operands)
    with jax.default_device(device):  # whose compute capability is what kernels are lowered for
        jax.jit(call).lower(*operands).compile()
    reports = [path.read_text() for path in sorted(dump.glob("*.ptxas"))]

    def found(pattern):
        return [match for report in reports for match in re.findall(pattern, report)]

    targets = set(found(r"entry function .* for '(\w+)'"))
    if targets != {f"{chip}a"}:
        sys.exit(f"{op}, {shape}: expected kernels for {chip}a, ptxas made {sorted(targets) or 'none'}")
    registers, spilled = found(r"Used (\d+) registers"), found(r"(\d+) bytes spill stores")
    return Row(op, chip, shape, [int(n) for n in registers], [int(n) for n in spilled])


def sources() -> list[Path]:
    """What a kernel's machine code comes from, relative to the repository."""
    found = [ROOT / "pallas_kernels" / name for name in SHARED]
    for op in OPS:
        folder = ROOT / "pallas_kernels" / op
        found += [*folder.glob("mosaic_*.py"), *folder.glob("config*.py")]
    return sorted(path.relative_to(ROOT) for path in found)


def digest(path: Path) -> str:
    """Of one source, short."""
    return hashlib.sha256((ROOT / path).read_bytes()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
