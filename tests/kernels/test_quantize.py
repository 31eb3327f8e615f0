"""quantize_blocks and quantize_mx against NumPy, exact rational arithmetic and torchao."""

import math
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import quantize_blocks, quantize_kv, quantize_mx
from pallas_kernels._testing import block_dequant, e4m3_rows, mx_dequant

E4M3 = ml_dtypes.float8_e4m3fn
DATA = Path(__file__).parent / "data"
# Every finite e4m3 value, exactly, and a list of the non-negative ones in order: code point c is at index c.
MAGNITUDES = [Fraction(float(v)) for v in np.arange(127, dtype=np.uint8).view(E4M3).astype(np.float64)]


def round_to_e4m3(x: Fraction) -> Fraction:
    """Nearest e4m3 value, ties to the even code point, beyond 448 saturating: the rule written out."""
    size = min(abs(x), MAGNITUDES[-1])
    above = next(i for i, m in enumerate(MAGNITUDES) if m >= size)
    below = max(above - 1, 0)
    up, down = MAGNITUDES[above] - size, size - MAGNITUDES[below]
    code = above if up < down or (up == down and above % 2 == 0) else below
    return MAGNITUDES[code] if x >= 0 else -MAGNITUDES[code]


def bits(values) -> np.ndarray:
    return np.asarray(values).view(np.uint8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("seed", range(3))
def test_rows_equal_numpy_bit_for_bit(dtype, seed):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((7, 384)) * 2.0 ** rng.integers(-40, 40, (7, 1)), dtype)
    got = quantize_blocks(x)
    values, scale = e4m3_rows(np.asarray(x.astype(jnp.float32)))
    assert got.block == (1, 128) and got.scale_NbKb.shape == (7, 3)
    np.testing.assert_array_equal(np.asarray(got.scale_NbKb), scale)
    np.testing.assert_array_equal(bits(got.values_NK), values.view(np.uint8))


@pytest.mark.parametrize("num_rows", [1, 127, 128, 129, 300])
def test_weight_blocks_cover_a_short_last_block(num_rows):
    rng = np.random.default_rng(num_rows)
    w = (rng.standard_normal((num_rows, 256)) * 2.0 ** rng.uniform(-8, 8, (num_rows, 1))).astype(np.float32)
    got = quantize_blocks(jnp.asarray(w), (128, 128))
    amax = np.stack([np.abs(w[i : i + 128].reshape(-1, 2, 128)).max((0, 2)) for i in range(0, num_rows, 128)])
    np.testing.assert_array_equal(np.asarray(got.scale_NbKb), amax * np.float32(1 / 448))
    want = block_dequant(np.asarray(got.values_NK), np.asarray(got.scale_NbKb), (128, 128))
    np.testing.assert_allclose(np.asarray(got.dequantize()), want, rtol=1e-6)
    assert np.abs(want - w).max() <= (amax / 448 * 16).max()  # half a step at the top: 2^5 / 2


def test_blocks_zero_and_small():
    x = np.zeros((4, 128), np.float32)
    x[1] = np.linspace(-1, 1, 128) * 2.0**-122  # amax / 448 lies under the smallest normal float32
    want = np.where(np.abs(x[1]) < 2.0**-126, 0, x[1] * np.float32(2.0**126)).astype(E4M3).astype(np.float32)
    x[2, 5] = 2.0**-126
    x[3] = np.float32(1e-40)  # subnormal: counts as zero
    got = quantize_blocks(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(got.scale_NbKb)[:, 0], np.float32([1, 2.0**-126, 2.0**-126, 1]))
    values = np.asarray(got.values_NK).astype(np.float32)
    assert not values[0].any() and not values[3].any()
    assert values[2, 5] == 1.0
    np.testing.assert_array_equal(values[1], want)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("block", [(1, 128), (128, 128)])
def test_blocks_not_finite_stays_alone(bad, block):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((130, 256)).astype(np.float32)
    clean = quantize_blocks(jnp.asarray(np.where(np.arange(256) == 7, 0, x)), block)
    x[3, 7] = bad
    x[:3, 7] = x[4:, 7] = 0
    got = quantize_blocks(jnp.asarray(x), block)
    expected = bits(clean.values_NK).copy()
    assert np.isnan(np.asarray(got.values_NK).astype(np.float32)[3, 7])
    expected[3, 7] = bits(got.values_NK)[3, 7]
    np.testing.assert_array_equal(bits(got.values_NK), expected)
    np.testing.assert_array_equal(np.asarray(got.scale_NbKb), np.asarray(clean.scale_NbKb))


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((8, 256)).astype(np.float32)
    other = np.where(np.arange(8)[:, None] == 5, x, 1e4 * x)
    for quantize, scale in ((quantize_blocks, "scale_NbKb"), (quantize_mx, "scale_NKb")):
        a, b = quantize(jnp.asarray(x)), quantize(jnp.asarray(other))
        np.testing.assert_array_equal(bits(a.values_NK)[5], bits(b.values_NK)[5])
        np.testing.assert_array_equal(np.asarray(getattr(a, scale))[5], np.asarray(getattr(b, scale))[5])


def test_blocks_refuse_wrong_shapes():
    with pytest.raises(ValueError, match="K must be a multiple of 128, got K = 100"):
        quantize_blocks(jnp.ones((2, 100)))
    with pytest.raises(ValueError, match=r"block \(1, 64\)"):
        quantize_blocks(jnp.ones((2, 128)), (1, 64))
    with pytest.raises(ValueError, match="matrix"):
        quantize_blocks(jnp.ones((2, 2, 128)))


@pytest.mark.parametrize("seed", range(3))
def test_mx_equals_the_rules_in_exact_arithmetic(seed):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((6, 64)) * 2.0 ** rng.integers(-30, 30, (6, 1))).astype(np.float32)
    # Ties of the rounding, and the range that saturates.
    x[0, :32] = np.float32(
        [256, 272, 280, 296, 448, 460, 464, 479, 480, 500, 511.9, 17, 19, 1.0625, 1.1875, 0.001953125] * 2
    )
    got = quantize_mx(jnp.asarray(x))
    values = np.asarray(got.values_NK).astype(np.float64)
    for n in range(6):
        for j in range(2):
            block = [Fraction(float(v)) for v in x[n, 32 * j : 32 * j + 32]]
            exponent = math.floor(math.log2(max(abs(v) for v in block))) - 8
            assert int(got.scale_NKb[n, j]) == exponent + 127
            for i, v in enumerate(block):
                assert Fraction(values[n, 32 * j + i]) == round_to_e4m3(v / Fraction(2) ** exponent)


def test_mx_equals_torchao():
    data = np.load(DATA / "mx_torchao_floor.npz")
    got = quantize_mx(jnp.asarray(data["x_NK"]))
    np.testing.assert_array_equal(np.asarray(got.scale_NKb), data["byte_NKb"])
    # torchao divides by 2^-126 where the byte says 2^-127, so its values of those blocks decode to half of x.
    meant = np.repeat(data["byte_NKb"] > 0, 32, axis=1)
    assert meant.sum() > 0.9 * meant.size
    np.testing.assert_array_equal(bits(got.values_NK)[meant], data["values_NK"][meant])


def test_mx_every_exponent_and_its_decoding():
    exponents = np.arange(-126, 128)
    x = np.ldexp(np.linspace(1, 1.99, 32)[None], exponents[:, None]).astype(np.float32)
    got = quantize_mx(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(got.scale_NKb)[:, 0], np.maximum(exponents - 8 + 127, 0))
    want = mx_dequant(np.asarray(got.values_NK), np.asarray(got.scale_NKb))
    normal = np.abs(want) >= 2.0**-126
    np.testing.assert_array_equal(np.asarray(got.dequantize())[normal], want[normal].astype(np.float32))
    assert np.abs(want[8:] / x[8:] - 1).max() <= 0.125  # saturation at 448 of 511; ordinary rounding is 1/16
    ml = np.asarray(got.scale_NKb).view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(ml[:, 0], 2.0 ** (np.asarray(got.scale_NKb)[:, 0].astype(float) - 127))


def test_mx_zero_and_subnormal_blocks():
    x = np.zeros((2, 64), np.float32)
    x[1] = 1e-40
    got = quantize_mx(jnp.asarray(x))
    assert not np.asarray(got.scale_NKb).any() and not np.asarray(got.values_NK).astype(np.float32).any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_mx_not_finite_makes_its_block_nan(bad):
    x = np.ones((2, 64), np.float32)
    x[0, 3] = bad
    got = quantize_mx(jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(got.scale_NKb), [[255, 119], [119, 119]])
    y = np.asarray(got.dequantize())
    assert np.isnan(y[0, :32]).all() and (y[0, 32:] == 1).all() and (y[1] == 1).all()


def test_kv_has_one_scale_per_position():
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((2, 3, 5, 64)) * 2.0 ** rng.integers(-9, 9, (2, 3, 5, 1))).astype(np.float32)
    got = quantize_kv(jnp.asarray(x))
    values, scale = e4m3_rows(x.reshape(-1, 64), 64)
    assert got.shape == x.shape and got.scale_BGS.shape == (2, 3, 5)
    np.testing.assert_array_equal(bits(got.values_BGSd), values.view(np.uint8).reshape(x.shape))
    np.testing.assert_array_equal(np.asarray(got.scale_BGS), scale.reshape(2, 3, 5))


def test_same_under_jit():
    x = jnp.asarray(np.random.default_rng(3).standard_normal((4, 256)), jnp.bfloat16)
    for quantize in (quantize_blocks, quantize_mx):
        for a, b in zip(jax.tree.leaves(quantize(x)), jax.tree.leaves(jax.jit(quantize)(x)), strict=True):
            np.testing.assert_array_equal(bits(a), bits(b))
