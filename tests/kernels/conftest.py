"""For kernels of chips that are not here: lowering as if one were, and an interpreter that knows block scales.

JAX's GPU interpreter (jax 0.11) runs tcgen05, but without scales. What the PTX manual says of tcgen05.cp and of a
block-scaled tcgen05.mma is added to it, in NumPy: 512 bytes of scales land in tensor memory as (128 rows, 4 blocks),
and each operand counts as its element times its block's scale. Everything else (order, barriers, races) stays the
interpreter's; the scales' reads are checked for races, too.
"""

import dataclasses
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect
from jax._src.lib.mlir import ir

import pallas_kernels as pk
from pallas_kernels._testing import gpu_interpreter
from pallas_kernels.types import ScaledKV

TILE = (32, 16)
"""The last axes of scales in shared memory: row 32 a + i, block b lies at [i, 4 a + b]."""
BLOCK = 32
_local = threading.local()


class Dequantised:
    """The interpreter's memory, where reading an operand of one product gives its elements times their scales."""

    def __init__(self, memory, scales):
        self._memory, self._scales = memory, scales

    def __getattr__(self, name):
        return getattr(self._memory, name)

    def get_buffer_content(self, key, access, *args, **kwargs):
        value, *rest = self._memory.get_buffer_content(key, access, *args, **kwargs)
        if (key, access) in self._scales:
            scale, columns = self._scales[key, access]
            by_element = np.repeat(scale.astype(np.float32), BLOCK, axis=1)
            by_element = by_element.T[:, : value.shape[1]] if columns else by_element
            value = value.astype(np.float32) * by_element
        return value, *rest


def teach_block_scales():
    """Replace what the interpreter does at four places by the same with scales."""
    from jax._src.pallas.mosaic_gpu import primitives
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory

    plain_memory, plain_product = gpu_callbacks._get_shared_memory, gpu_callbacks.TcGen05Mma.__call__
    plain_store, plain_interpret = (
        shared_memory.GPUSharedMemory.store_buffer_content,
        jaxpr_interpret.JaxprInterpreter.interpret,
    )

    def interpret(self, jaxpr, token, *args):
        eqns = [
            eqn.replace(primitive=primitives.async_copy_smem_to_tmem_p)
            if eqn.primitive is primitives.async_copy_scales_to_tmem_p
            else eqn
            for eqn in jaxpr.eqns
        ]
        return plain_interpret(self, jaxpr.replace(eqns=eqns), token, *args)

    def store(self, key, access, value, *args, **kwargs):
        if value.ndim == 4 and value.shape[2:] == TILE and access.permutation is None:
            rows, blocks = value.shape[:2]
            target = self.buffer_shape_and_dtype(key).shape
            if len(target) == 2:
                value = value.reshape(rows, blocks, 32, 4, 4).transpose(0, 3, 2, 1, 4).reshape(rows * 128, blocks * 4)
        return plain_store(self, key, access, value, *args, **kwargs)

    def product(self, pipeline_clock, tma_thread_id):
        if self.a_scale_key is None:
            return plain_product(self, pipeline_clock, tma_thread_id)
        memory = plain_memory()
        scales = {}
        for key, access, scale_key, transforms, columns in (
            (self.a_key, self.a_access, self.a_scale_key, self.a_scale_transforms, False),
            (self.b_key, self.b_access, self.b_scale_key, self.b_scale_transforms, True),
        ):
            where = memory.access(scale_key, transforms)
            scales[key, access] = memory.get_buffer_content(scale_key, where, self.thread)[0], columns
            if memory.detect_races:
                clock = memory.get_clock(self.thread)
                if pipeline_clock is not None:
                    clock.update(pipeline_clock)
                clock.inc(tma_thread_id)
                gpu_callbacks.get_races().check_read(
                    self.thread, clock.generic_clock, scale_key, where, source_info=self.source_info
                )
        _local.memory = Dequantised(memory, scales)
        try:
            plain = dataclasses.replace(self, a_scale_key=None, b_scale_key=None)
            return plain_product(plain, pipeline_clock, tma_thread_id)
        finally:
            _local.memory = None

    gpu_callbacks._get_shared_memory = lambda: getattr(_local, "memory", None) or plain_memory()
    gpu_callbacks.TcGen05Mma.__call__ = product
    shared_memory.GPUSharedMemory.store_buffer_content = store
    jaxpr_interpret.JaxprInterpreter.interpret = interpret


if gpu_interpreter() is not None:
    teach_block_scales()


@pytest.fixture(autouse=True)
def no_races(capsys):
    """The interpreter's race detector only prints."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.fixture
def poisoned():
    """Keys and values (B, G, S, d) as a cache of that kind holds them, NaN past each length; and what it should read.

    poisoned(k, v, lengths, "bfloat16" or "float8") -> (k, v), (k float32, v float32)
    """

    def poison(k, v, lengths, cache):
        dead = (jnp.arange(k.shape[2]) >= lengths[:, None])[:, None, :, None]
        if cache == "bfloat16":
            return [jnp.where(dead, jnp.nan, c) for c in (k, v)], [np.asarray(c.astype(jnp.float32)) for c in (k, v)]
        k, v = pk.quantize_kv(k), pk.quantize_kv(v)
        stored = [
            ScaledKV(
                jnp.where(dead, jnp.nan, c.values_BGSd.astype(jnp.float32)).astype(jnp.float8_e4m3fn),
                jnp.where(dead[..., 0], jnp.nan, c.scale_BGS),
            )
            for c in (k, v)
        ]
        return stored, [np.asarray(c.dequantize()) for c in (k, v)]

    return poison


@dataclasses.dataclass(frozen=True)
class Device(jax.sharding.AbstractDevice):
    """What JAX asks of the device that it lowers for."""

    compute_capability: str = "9.0"


@pytest.fixture
def lowered_for():
    """Lower a call for CUDA as if this machine had a GPU of that compute capability: that of each kernel in it.

    JAX asks the mesh, then the default device, for the chip, and takes "9.0" where neither knows one.
    """

    def lower(capability, call, *shapes):
        device = Device("a GPU", 1, "gpu", capability)
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)):
            text = jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        return [capability_of(escaped) for escaped in re.findall(KERNEL, text)]

    return lower


KERNEL = r'@mosaic_gpu_v2\(.* module = "((?:[^"\\]|\\.)*)"'


def capability_of(escaped):
    """For which compute capability a Mosaic GPU module, as StableHLO prints it, was made."""
    code = re.sub(
        rb"\\([0-9A-F]{2}|.)",
        lambda match: bytes.fromhex(match[1].decode()) if len(match[1]) == 2 else match[1],
        escaped.encode(),
    )
    context = mlir.make_ir_context()
    mosaic_gpu_dialect.register_dialect(context)
    context.allow_unregistered_dialects = True
    with context:
        attributes = ir.Module.parse(code).operation.attributes
        return ".".join(str(attributes[f"mosaic_gpu.arch_{part}"].value) for part in ("major", "minor"))
