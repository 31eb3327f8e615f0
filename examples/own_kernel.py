"""A kernel of your own in one file: formula, Hopper kernel, check, timing. Here RMSNorm and FP8 rows in one launch.

It runs on a Hopper GPU, or in JAX's GPU interpreter on a CPU (jax 0.11 on); it lowers for CUDA anywhere, and says so.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import profiler
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _dispatch, _mosaic, _testing, quantize_blocks

ROWS, BLOCK, EPS, WGMMA, F8, F32 = 64, 128, 1e-6, plgpu.Layout.WGMMA, jnp.float8_e4m3fn, jnp.float32


def reference(x_MK):
    """e4m3 values (M, K) and a scale, max |y| / 448, per row and 128 columns of y = x / sqrt(mean x^2 + eps)."""
    y = quantize_blocks(x_MK * lax.rsqrt(jnp.mean(x_MK**2, axis=1, keepdims=True) + EPS), backend="reference")
    return y.values_NK, y.scale_NbKb.T


def kernel(x_MK, interpret=None):
    """The same for M and K multiples of 64 and 128 (no 128 all zeros); a block makes 64 rows x 128 columns of y."""

    def body(x_gmem, values_gmem, scale_gmem, x_smem, values_smem, scale_smem, loaded):
        kb, rows = lax.axis_index("block"), pl.ds(lax.axis_index("tile") * ROWS, ROWS)

        def read(j):
            plgpu.copy_gmem_to_smem(x_gmem.at[rows, pl.ds(j * BLOCK, BLOCK)], x_smem, loaded)  # starts the copy
            plgpu.barrier_wait(loaded)  # it has arrived
            x = _mosaic.load(x_smem, WGMMA, optimized=False)
            plgpu.commit_smem()  # every warp has read it: the next copy may overwrite it
            return x

        # Every block reads its whole rows, all but once from L2: that spares a launch that only finds the mean.
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, BLOCK), F32), WGMMA)
        squares = lax.fori_loop(0, x_MK.shape[1] // BLOCK, lambda j, total: total + read(j) ** 2, zeros)
        inverse = lax.rsqrt(jnp.sum(squares, axis=1) * (1 / x_MK.shape[1]) + EPS)
        y = read(kb) * lax.broadcast_in_dim(inverse, (ROWS, BLOCK), (0,))
        scale_smem[...] = scale = jnp.max(jnp.abs(y), axis=1) * (1 / 448)
        values_smem[...] = (y / lax.broadcast_in_dim(scale, y.shape, (0,))).astype(F8)
        plgpu.commit_smem()  # what the warps wrote is visible to the copies out
        plgpu.copy_smem_to_gmem(values_smem, values_gmem.at[rows, pl.ds(kb * BLOCK, BLOCK)])
        plgpu.copy_smem_to_gmem(scale_smem, scale_gmem.at[kb, rows])
        plgpu.wait_smem_to_gmem(0)

    grid = x_MK.shape[1] // BLOCK, x_MK.shape[0] // ROWS
    out = jax.ShapeDtypeStruct(x_MK.shape, F8), jax.ShapeDtypeStruct((grid[0], x_MK.shape[0]), F32)
    scratch = plgpu.SMEM((ROWS, BLOCK), F32), plgpu.SMEM((ROWS, BLOCK), F8), plgpu.SMEM((ROWS,), F32), plgpu.Barrier()
    options = {"grid": grid, "grid_names": ("block", "tile"), "compiler_params": _mosaic.LANE, "interpret": interpret}
    return plgpu.kernel(body, out_type=out, scratch_types=scratch, **options)(x_MK)


def check(call, x):
    """Relative error of the dequantised result against the same in float64."""
    values, scale = map(np.asarray, call(x))
    y = np.asarray(x, np.float64) / np.sqrt((np.asarray(x, np.float64) ** 2).mean(axis=1, keepdims=True) + EPS)
    exact = _testing.block_dequant(*_testing.e4m3_rows(y), (1, BLOCK))
    return _testing.rel_err(_testing.block_dequant(values, scale.T, (1, BLOCK)), exact)


def bench(call, x):
    """Median of 50 calls, microseconds of their kernels on the device."""
    return 1e3 * float(np.median(profiler.measure(call, iterations=50)(x)[1]))


if __name__ == "__main__":
    x = 3 * jax.random.normal(jax.random.key(0), (64, 2560))
    jax.jit(kernel).trace(x).lower(lowering_platforms=("cuda",))
    print(f"lowers for CUDA; reference: error {check(reference, x):.1e}")
    if (why_not := _dispatch.need_capability("9.0")) is None:
        print(f"kernel runs: error {check(kernel, x):.1e}, {bench(kernel, x):.1f} us; XLA {bench(reference, x):.1f} us")
    elif interpreter := _testing.gpu_interpreter():
        print(f"kernel interpreted, not timed: error {check(lambda x: kernel(x, interpreter), x):.1e} ({why_not})")
    else:
        print(f"kernel not run: jax {jax.__version__} has no GPU interpreter for FP8, and it {why_not}")
