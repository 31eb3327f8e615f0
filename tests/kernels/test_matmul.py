"""block_scaled_matmul, mx_matmul, swiglu_mlp, matmul: references against float64, and that wrong layouts are caught."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels as pk
from pallas_kernels._testing import (
    ADVERSARIAL,
    TOLERANCES,
    adversarial_signs,
    block_dequant,
    e4m3_rows,
    mx_dequant,
    rel_err,
    swiglu_oracle,
)
from pallas_kernels.types import BlockScaled, MxScaled


def random_weight(rng, N, K, spread=0.0):
    """Float32 (N, K) whose 128 x 128 blocks have magnitudes 2^U(-spread, spread)."""
    grid = 2.0 ** rng.uniform(-spread, spread, (-(-N // 128), -(-K // 128)))
    return (rng.standard_normal((N, K)) * np.kron(grid, np.ones((128, 128)))[:N, :K]).astype(np.float32)


def operands(rng, M, N, K, dtype=jnp.bfloat16, spread=4.0):
    x = jnp.asarray(rng.standard_normal((M, K)) * 2.0 ** rng.uniform(-4, 4, (M, 1)), dtype)
    return x, pk.quantize_blocks(jnp.asarray(random_weight(rng, N, K, spread)), (128, 128))


def oracle(x, w: BlockScaled):
    xq = block_dequant(*e4m3_rows(np.asarray(x.astype(jnp.float32))), (1, 128))
    return xq @ block_dequant(np.asarray(w.values_NK), np.asarray(w.scale_NbKb), (128, 128)).T


@pytest.mark.parametrize(("M", "N", "K"), [(1, 64, 128), (5, 100, 256), (64, 129, 640), (3, 1, 128), (8, 4097, 256)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_block_scaled_equals_float64(M, N, K, dtype):
    x, w = operands(np.random.default_rng(M * N + K), M, N, K, dtype)
    y = pk.block_scaled_matmul(x, w, backend="reference")
    assert y.dtype == dtype and y.shape == (M, N)
    assert rel_err(y, oracle(x, w)) <= TOLERANCES["matmul", jnp.dtype(dtype).name].bound


def test_quantised_and_prepared_operands_give_the_same():
    x, w = operands(np.random.default_rng(0), 4, 4097, 256)
    want = np.asarray(pk.block_scaled_matmul(x, w))
    ready = pk.prepare_weights(w, "block_scaled_matmul")
    assert ready.values_NK.shape == (4224, 256) and ready.shape == (4097, 256) and ready.scale_NbKb.shape == (33, 32)
    np.testing.assert_array_equal(np.asarray(pk.block_scaled_matmul(x, ready)), want)
    np.testing.assert_array_equal(np.asarray(pk.block_scaled_matmul(pk.quantize_blocks(x), w)), want)
    again = pk.prepare_weights(ready, "block_scaled_matmul")
    np.testing.assert_array_equal(np.asarray(again.dequantize()), np.asarray(w.dequantize()))


def test_prepared_mx_weights_lie_as_the_kernel_reads_them():
    w = pk.quantize_mx(jnp.asarray(random_weight(np.random.default_rng(0), 4097, 256)))
    ready = pk.prepare_weights(w, "mx_matmul")
    assert ready.values_NK.shape == (4224, 256) and ready.scale_NKb.shape == (9, 4224) and ready.shape == (4097, 256)
    again = pk.prepare_weights(ready, "mx_matmul")
    blackwell = pk.prepare_weights(ready, "mx_matmul", "10.0")
    assert blackwell.values_NK.shape == (4224, 256) and blackwell.scale_NKb.shape == (33, 2, 32, 16)
    back = pk.prepare_weights(blackwell, "mx_matmul", "9.0")
    for prepared in (ready, again, blackwell, pk.prepare_weights(blackwell, "mx_matmul", "10.0"), back):
        np.testing.assert_array_equal(np.asarray(prepared.dequantize()), np.asarray(w.dequantize()))


def test_a_transposed_scale_grid_is_caught():
    x, w = operands(np.random.default_rng(1), 8, 512, 512)
    wrong = dataclasses.replace(w, scale_NbKb=w.scale_NbKb.T)
    assert rel_err(pk.block_scaled_matmul(x, wrong), oracle(x, w)) > 0.3


def test_scales_of_every_magnitude():
    rng = np.random.default_rng(2)
    N, K = 256, 512
    w = pk.quantize_blocks(jnp.asarray(random_weight(rng, N, K, 30.0)), (128, 128))
    x = jnp.asarray(
        rng.standard_normal((6, K)) * 2.0 ** rng.integers(-40, 40, (6, K // 128)).repeat(128, 1), jnp.float32
    )
    y = np.asarray(pk.block_scaled_matmul(x, w), np.float64)
    ref = oracle(x, w)
    for m in range(6):  # by row, so that the largest does not hide the others
        assert rel_err(y[m], ref[m]) <= TOLERANCES["matmul", "float32"].bound


def test_nan_stays_in_its_row():
    x, w = operands(np.random.default_rng(3), 4, 128, 256)
    clean = np.asarray(pk.block_scaled_matmul(x, w))
    got = np.asarray(pk.block_scaled_matmul(x.at[2, 77].set(jnp.nan), w)).astype(np.float32)
    assert np.isnan(got[2]).all()
    keep = [0, 1, 3]
    np.testing.assert_array_equal(got[keep], clean[keep].astype(np.float32))


def test_rows_do_not_depend_on_their_neighbours():
    rng = np.random.default_rng(4)
    x, w = operands(rng, 16, 256, 512)
    other = jnp.where(jnp.arange(16)[:, None] == 9, x, jnp.asarray(rng.standard_normal(x.shape) * 100, x.dtype))
    for op, weight in ((pk.block_scaled_matmul, w), (pk.mx_matmul, pk.quantize_mx(w.dequantize()))):
        np.testing.assert_array_equal(np.asarray(op(x, weight))[9], np.asarray(op(other, weight))[9])


def short_accumulator(x, w, bits, promote):
    """x w^T the way a tensor core with a short accumulator adds: 32 products at a time, truncated to `bits` bits.

    `promote` is how many k pass before the short sum is moved to float64 and starts again from zero.
    """
    total, acc = np.zeros((x.shape[0], w.shape[0])), np.zeros((x.shape[0], w.shape[0]))
    for k in range(0, x.shape[1], 32):
        acc = acc + x[:, k : k + 32] @ w[:, k : k + 32].T
        _, exponent = np.frexp(acc)
        unit = np.ldexp(1.0, exponent - bits)
        acc = np.trunc(acc / unit) * unit
        if (k + 32) % promote == 0:
            total, acc = total + acc, np.zeros_like(acc)
    return total + acc


def test_adversarial_signs_bound():
    rng = np.random.default_rng(5)
    x, w = adversarial_signs(rng, 4, 64, 9728)
    ref, size = x.astype(np.float64) @ w.T.astype(np.float64), np.abs(x).astype(np.float64) @ np.abs(w).T

    def error(y):
        return (np.abs(y - ref) / size).max()

    wq = BlockScaled(jnp.asarray(w, jnp.float8_e4m3fn), jnp.ones((1, 76)))
    xq = BlockScaled(jnp.asarray(x, jnp.float8_e4m3fn), jnp.ones((4, 76)))
    assert error(np.asarray(pk.block_scaled_matmul(xq, wq, out_dtype=jnp.float32), np.float64)) < ADVERSARIAL.bound / 50
    assert error(short_accumulator(x, w, 14, promote=128)) < ADVERSARIAL.bound
    assert error(short_accumulator(x, w, 14, promote=9728)) > 4 * ADVERSARIAL.bound


def test_matmul_refuses_what_does_not_fit():
    x, w = operands(np.random.default_rng(6), 2, 128, 256)
    with pytest.raises(ValueError, match="K must be a multiple of 128, got K = 192"):
        pk.block_scaled_matmul(x[:, :192], BlockScaled(w.values_NK[:, :192], w.scale_NbKb))
    with pytest.raises(ValueError, match="differ in K"):
        pk.block_scaled_matmul(x[:, :128], w)
    with pytest.raises(ValueError, match="128 x 128"):
        pk.block_scaled_matmul(x, pk.quantize_blocks(w.dequantize()))
    with pytest.raises(ValueError, match="1 x 128"):
        wide = pk.quantize_blocks(jnp.ones((130, 256)), (128, 128))
        pk.block_scaled_matmul(wide, w)
    with pytest.raises(ValueError, match="must be BlockScaled"):
        pk.block_scaled_matmul(x, w.values_NK)


@pytest.mark.parametrize(("M", "N", "K"), [(1, 64, 32), (5, 100, 256), (64, 129, 640)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_mx_equals_float64(M, N, K, dtype):
    rng = np.random.default_rng(M + N + K)
    x = jnp.asarray(rng.standard_normal((M, K)) * 2.0 ** rng.uniform(-6, 6, (M, 1)), dtype)
    w = pk.quantize_mx(jnp.asarray(random_weight(rng, N, K, 4.0)))
    xq = pk.quantize_mx(x)
    ref = (
        mx_dequant(*map(np.asarray, (xq.values_NK, xq.scale_NKb)))
        @ mx_dequant(*map(np.asarray, (w.values_NK, w.scale_NKb))).T
    )
    bound = TOLERANCES["matmul", jnp.dtype(dtype).name].bound
    for given in (x, xq):
        for weight in (w, pk.prepare_weights(w, "mx_matmul")):
            assert rel_err(pk.mx_matmul(given, weight, out_dtype=dtype), ref) <= bound


@pytest.mark.parametrize(("M", "D", "F"), [(1, 128, 128), (4, 256, 640), (16, 384, 256)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_swiglu_equals_float64(M, D, F, dtype):
    rng = np.random.default_rng(M + D + F)
    x = jnp.asarray(rng.standard_normal((M, D)), dtype)
    gate_up = pk.quantize_blocks(jnp.asarray(random_weight(rng, 2 * F, D, 1.0) * D**-0.5), (128, 128))
    down = pk.quantize_blocks(jnp.asarray(random_weight(rng, D, F, 1.0) * F**-0.5), (128, 128))
    ref = swiglu_oracle(
        np.asarray(x.astype(jnp.float32)),
        (np.asarray(gate_up.values_NK), np.asarray(gate_up.scale_NbKb)),
        (np.asarray(down.values_NK), np.asarray(down.scale_NbKb)),
    )
    y = pk.swiglu_mlp(x, gate_up, down)
    assert y.dtype == dtype
    assert rel_err(y, ref) <= TOLERANCES["swiglu_mlp", jnp.dtype(dtype).name].bound
    # Up rows before gate rows is the classic mistake: it must show.
    swapped = pk.quantize_blocks(jnp.roll(gate_up.dequantize(), F, axis=0), (128, 128))
    assert rel_err(pk.swiglu_mlp(x, swapped, down), ref) > 0.1


def test_swiglu_takes_every_kind_and_only_one():
    rng = np.random.default_rng(7)
    D, F = 128, 256
    x = jnp.asarray(rng.standard_normal((3, D)), jnp.float32)
    gate_up, down = (jnp.asarray(random_weight(rng, *s) * s[1] ** -0.5) for s in ((2 * F, D), (D, F)))
    h = np.asarray(x, np.float64) @ np.asarray(gate_up, np.float64).T
    exact = (h[:, :F] / (1 + np.exp(-h[:, :F])) * h[:, F:]) @ np.asarray(down, np.float64).T
    assert rel_err(pk.swiglu_mlp(x, gate_up, down), exact) < 1e-5
    mx = [pk.quantize_mx(w) for w in (gate_up, down)]
    assert 1e-3 < rel_err(pk.swiglu_mlp(x, *mx), exact) < 0.1
    with pytest.raises(ValueError, match="one kind"):
        pk.swiglu_mlp(x, gate_up, mx[1])
    with pytest.raises(ValueError, match="multiples of 128"):
        narrow = pk.quantize_blocks(down[:64], (128, 128))
        pk.swiglu_mlp(x[:, :64], BlockScaled(jnp.zeros((2 * F, 64), jnp.float8_e4m3fn), jnp.ones((4, 0))), narrow)


def test_matmul_dispatches_on_the_weight():
    rng = np.random.default_rng(8)
    x = jnp.asarray(rng.standard_normal((2, 3, 256)), jnp.float32)
    w = jnp.asarray(random_weight(rng, 100, 256))
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    assert rel_err(pk.matmul(x, w), exact) < 1e-5
    for weight in (pk.quantize_blocks(w, (128, 128)), pk.quantize_mx(w)):
        y = pk.matmul(x, weight)
        assert y.shape == (2, 3, 100) and y.dtype == x.dtype
        assert 1e-2 < rel_err(y, exact) < 0.05


@pytest.mark.parametrize("kind", [BlockScaled, MxScaled])
def test_a_parameter_may_hold_a_quantised_weight(kind):
    rng = np.random.default_rng(9)
    w = jnp.asarray(random_weight(rng, 130, 256))
    quantised = pk.quantize_blocks(w, (128, 128)) if kind is BlockScaled else pk.quantize_mx(w)

    class Layer(nnx.Module):
        def __init__(self):
            self.weight = nnx.Param(quantised)

        def __call__(self, x):
            return pk.matmul(x, self.weight[...])

    layer, x = Layer(), jnp.asarray(rng.standard_normal((4, 256)), jnp.bfloat16)
    assert layer.weight.shape == (130, 256) and isinstance(layer.weight[...], kind)
    graph, state = nnx.split(layer)
    leaves, tree = jax.tree.flatten(state)
    assert len(leaves) == 2
    merged = jax.jit(lambda leaves, x: nnx.merge(graph, jax.tree.unflatten(tree, leaves))(x))(leaves, x)
    np.testing.assert_array_equal(np.asarray(merged), np.asarray(jax.jit(pk.matmul)(x, quantised)))
    with pytest.raises(TypeError, match=r"only takes \[\.\.\.\]"):
        quantised[0]


def test_a_weight_with_a_scale_a_row_is_not_prepared():
    w = BlockScaled(jnp.ones((200, 128), jnp.float8_e4m3fn), jnp.arange(200.0)[:, None])
    with pytest.raises(ValueError, match=r"one scale per 128 x 128, got \(200, 1\)"):
        pk.prepare_weights(w, "block_scaled_matmul")


def test_no_rows_are_no_work():
    w = pk.quantize_blocks(jnp.ones((64, 128)), (128, 128))
    for op, weight in ((pk.block_scaled_matmul, w), (pk.mx_matmul, pk.quantize_mx(jnp.ones((64, 128))))):
        assert op(jnp.ones((0, 128), jnp.bfloat16), weight).shape == (0, 64)
