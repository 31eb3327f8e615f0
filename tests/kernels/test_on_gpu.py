"""The kernels on a GPU, against float64: every shape, odd row counts, poison, and one row beside any others.

`python -m pytest tests/kernels/test_on_gpu.py -m gpu` on the machine that has one, a Hopper or a Blackwell.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import _testing as oracle
from pallas_kernels._chip import SM90, SM100
from pallas_kernels._dispatch import gpu_capability
from pallas_kernels.block_scaled_matmul.arg_specs import ROWS, SPECS
from pallas_kernels.block_scaled_matmul.config import Config as MatmulConfig
from pallas_kernels.block_scaled_matmul.mosaic_sm90 import why_not as matmul_why_not
from pallas_kernels.decode_attention import mosaic_sm90 as attention_kernel
from pallas_kernels.decode_attention.config import Config as AttentionConfig
from pallas_kernels.mx_matmul import config as hopper_mx
from pallas_kernels.mx_matmul import config_sm100 as blackwell_mx
from pallas_kernels.quantize_blocks.mosaic_sm90 import quantize_rows
from pallas_kernels.quantize_mx.mosaic_sm90 import round_rows
from pallas_kernels.swiglu_mlp import mosaic_sm90 as swiglu_kernel
from pallas_kernels.swiglu_mlp.config import Config as MlpConfig
from pallas_kernels.types import BlockScaled, MxScaled

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_capability() not in ("9.0", "10.0"), reason="needs a GPU of compute capability 9.0 or 10.0"),
]
CHIP = SM100 if gpu_capability() == "10.0" else SM90
BOUND = oracle.TOLERANCES["matmul", "bfloat16"].bound


def weight(rng, N, K):
    """Values and 128 x 128 scales of every magnitude, and the same as a prepared weight."""
    values = np.clip(rng.standard_normal((N, K), np.float32) * 100, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    scale = (2.0 ** rng.uniform(-4, 4, (-(-N // 128), K // 128)) / 100 / np.sqrt(K)).astype(np.float32)
    return (values, scale), pk.prepare_weights(
        BlockScaled(jnp.asarray(values), jnp.asarray(scale)), "block_scaled_matmul"
    )


def activations(rng, M, K):
    x = rng.standard_normal((M, K)) * 2.0 ** rng.uniform(-6, 6, (M, 1))
    return x.astype(ml_dtypes.bfloat16)


def product(x, w):
    return oracle.block_dequant(*oracle.e4m3_rows(x), (1, 128)) @ oracle.block_dequant(*w, (128, 128)).T


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_matmul_at_every_row_count(spec):
    rng = np.random.default_rng()
    raw, ready = weight(rng, spec.N, spec.K)
    for M in (*ROWS, 3, 63, 65, 300):
        x = activations(rng, M, spec.K)
        y = pk.block_scaled_matmul(jnp.asarray(x), ready, backend="mosaic")
        assert oracle.rel_err(y, product(x, raw)) <= BOUND, M


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("early", [False, True])
def test_splits_of_k_meet_in_one_order(splits, early):
    rng = np.random.default_rng()
    raw, ready = weight(rng, 256, 1280)
    for M in (1, 16, 24, 64, 128):
        x = jnp.asarray(activations(rng, M, 1280))
        config = MatmulConfig(CHIP.rows[0], splits, 2, early=early)
        first, again = (np.asarray(pk.block_scaled_matmul(x, ready, backend="mosaic", config=config)) for _ in range(2))
        np.testing.assert_array_equal(first, again)
        assert oracle.rel_err(first, product(np.asarray(x), raw)) <= BOUND


@pytest.mark.parametrize("warpgroups", [2, 4])
@pytest.mark.parametrize(("splits", "together"), [(1, 1), (1, 2), (3, 1), (4, 2)])
def test_warpgroups_share_the_tokens(warpgroups, splits, together):
    if CHIP is not SM90:
        pytest.skip("written for Hopper")
    rng = np.random.default_rng()
    raw, ready = weight(rng, 512, 2560)
    config = MatmulConfig(64, splits, 3, warpgroups, together=together)
    for M in (1, 16, 24, 64, 128, 200):
        if matmul_why_not(M, 512, 2560, config):
            assert warpgroups == 4 and M >= 64  # whose tiles do not fit
            continue
        x = jnp.asarray(activations(rng, M, 2560))
        first, again = (np.asarray(pk.block_scaled_matmul(x, ready, backend="mosaic", config=config)) for _ in range(2))
        np.testing.assert_array_equal(first, again)
        assert oracle.rel_err(first, product(np.asarray(x), raw)) <= BOUND, M


def test_a_row_does_not_see_the_other_rows():
    rng = np.random.default_rng()
    _, ready = weight(rng, 2560, 2560)
    x = activations(rng, 64, 2560)
    other = x.copy()
    other[1:] = np.where(rng.random((63, 2560)) < 0.01, np.nan, activations(rng, 63, 2560))
    y, z = (np.asarray(pk.block_scaled_matmul(jnp.asarray(a), ready, backend="mosaic")) for a in (x, other))
    np.testing.assert_array_equal(y[0], z[0])


def test_a_short_accumulator_would_show():
    rng = np.random.default_rng()
    x, w = oracle.adversarial_signs(rng, 8, 64, 9728)
    ones_x, ones_w = np.ones((8, 76), np.float32), np.ones((1, 76), np.float32)
    fp8 = ml_dtypes.float8_e4m3fn
    y = pk.block_scaled_matmul(
        BlockScaled(jnp.asarray(x.astype(fp8)), jnp.asarray(ones_x)),
        BlockScaled(jnp.asarray(w.astype(fp8)), jnp.asarray(ones_w)),
        out_dtype=jnp.float32,
        backend="mosaic",
    )
    ref = x.astype(np.float64) @ w.astype(np.float64).T
    assert np.abs(np.asarray(y) - ref).max() <= oracle.ADVERSARIAL.bound * (np.abs(x) @ np.abs(w).T).max()


def test_the_scale_grid_transposed_is_caught():
    rng = np.random.default_rng()
    (values, scale), _ = weight(rng, 2560, 2560)
    x = activations(rng, 8, 2560)
    wrong = BlockScaled(jnp.asarray(values), jnp.asarray(scale.T.copy()))
    y = pk.block_scaled_matmul(jnp.asarray(x), wrong, backend="mosaic")
    assert oracle.rel_err(y, product(x, (values, scale))) > 0.1


def mx_operand(rng, rows, K):
    values = np.clip(rng.standard_normal((rows, K), np.float32) * 100, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    byte = rng.integers(120, 134, (rows, K // 32)).astype(np.uint8)
    return oracle.mx_dequant(values, byte), MxScaled(jnp.asarray(values), jnp.asarray(byte))


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
def test_mx_matmul_at_every_row_count(spec):
    rng = np.random.default_rng()
    w, quantised = mx_operand(rng, spec.N, spec.K)
    ready = pk.prepare_weights(quantised, "mx_matmul")
    for M in (*ROWS, 3, 63, 65, 300):
        x, given = mx_operand(rng, M, spec.K)
        assert oracle.rel_err(pk.mx_matmul(given, ready, backend="mosaic"), x @ w.T) <= BOUND, M


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("form", [1, 2, 4])
def test_mx_matmul_is_repeatable_in_every_form(splits, form):
    config = hopper_mx.Config(splits, 2, form) if CHIP is SM90 else blackwell_mx.Config(splits, form)
    rng = np.random.default_rng()
    w, quantised = mx_operand(rng, 256, 1280)
    for M in (1, 16, 24, 64, 128):
        if CHIP is SM90 and form == 4 and M > 64:  # does not fit
            continue
        x, given = mx_operand(rng, M, 1280)
        first, again = (np.asarray(pk.mx_matmul(given, quantised, backend="mosaic", config=config)) for _ in range(2))
        np.testing.assert_array_equal(first, again)
        assert oracle.rel_err(first, x @ w.T) <= BOUND


def test_mx_scales_at_both_ends_and_nan():
    """2^127 beside every weight scale, 2^-127 included; a NaN scale beside zeros reaches its row and no other."""
    rng = np.random.default_rng()
    _, x = mx_operand(rng, 8, 128)
    _, w = mx_operand(rng, 255, 128)
    x_byte, w_byte = np.full((8, 4), 254, np.uint8), np.arange(255, dtype=np.uint8)[:, None].repeat(4, 1)
    x_byte[4:] = 127
    ref = oracle.mx_dequant(np.asarray(x.values_NK), x_byte) @ oracle.mx_dequant(np.asarray(w.values_NK), w_byte).T
    size = np.abs(np.asarray(x.values_NK, np.float64)) @ np.abs(np.asarray(w.values_NK, np.float64)).T
    size = np.ldexp(size, x_byte[:, :1].astype(np.int32) + w_byte[:, 0].astype(np.int32) - 254)
    x, w = MxScaled(x.values_NK, jnp.asarray(x_byte)), MxScaled(w.values_NK, jnp.asarray(w_byte))
    y = np.asarray(pk.mx_matmul(x, w, out_dtype=jnp.float32, backend="mosaic"), np.float64)
    fits = (size < 2.0**127) & (size > 2.0**-100)
    assert fits[:4, 0].all()
    assert (np.abs(y - ref) <= oracle.ADVERSARIAL.bound * size)[fits].all()
    x = MxScaled(x.values_NK.at[5].set(0), x.scale_NKb.at[5, 2].set(255))
    y = np.asarray(pk.mx_matmul(x, w, out_dtype=jnp.float32, backend="mosaic"))
    assert np.isnan(y[5]).all() and not np.isnan(y[:4, :100]).any()


@pytest.mark.parametrize("M", [1, 5, 64, 65, 200])
def test_rows_are_quantised_bit_for_bit(M):
    rng = np.random.default_rng()
    x = activations(rng, M, 640)
    x[0, :128], x[M // 2, 200], x[M // 2, 300] = 0, np.nan, np.inf
    values, scale_KbM = quantize_rows(jnp.asarray(x))
    ref = pk.quantize_blocks(jnp.asarray(x), backend="reference")
    np.testing.assert_array_equal(np.asarray(scale_KbM)[:5, :M].T, np.asarray(ref.scale_NbKb))
    bits, wanted = (np.asarray(a).view(np.uint8) for a in (values[:M], ref.values_NK))
    nan = np.isnan(np.asarray(ref.values_NK).astype(np.float32))
    np.testing.assert_array_equal(bits[~nan], wanted[~nan])
    assert np.isnan(np.asarray(values[:M]).astype(np.float32)[nan]).all()


@pytest.mark.parametrize("M", [1, 5, 64, 65, 200])
def test_mx_rows_are_quantised_bit_for_bit(M):
    x = activations(np.random.default_rng(), M, 640)
    x[0, :32], x[M // 2, 200], x[M // 2, 300] = 0, np.nan, np.inf
    got, want = (pk.quantize_mx(jnp.asarray(x), backend=backend) for backend in ("mosaic", "reference"))
    np.testing.assert_array_equal(np.asarray(got.scale_NKb), np.asarray(want.scale_NKb))
    bits, wanted = (np.asarray(a.values_NK).view(np.uint8) for a in (got, want))
    nan = np.isnan(np.asarray(want.values_NK).astype(np.float32))
    np.testing.assert_array_equal(bits[~nan], wanted[~nan])
    assert np.isnan(np.asarray(got.values_NK).astype(np.float32)[nan]).all()
    rounded = np.asarray(round_rows(jnp.asarray(x)).astype(jnp.float32))
    np.testing.assert_array_equal(rounded[:M], np.asarray(want.dequantize()))


@pytest.mark.parametrize("M", [1, 3, 16, 64, 65, 128])
@pytest.mark.parametrize("config", [MlpConfig(1, 3), MlpConfig(2, 3), MlpConfig(epilogue=False)], ids=str)
def test_swiglu_in_two_stages(M, config):
    """The inner values are the oracle's but for single FP8 steps; what follows them is as exact as a matmul."""
    if config.epilogue and 128 // config.blocks_per_group not in CHIP.rows:
        pytest.skip("Blackwell's blocks own whole groups")
    rng = np.random.default_rng()
    D, F = 2560, 9728
    gate_up, ready_gate_up = weight(rng, 2 * F, D)
    down, ready_down = weight(rng, D, F)
    x = rng.standard_normal((M, D)).astype(ml_dtypes.bfloat16)
    values, scale_FbM = swiglu_kernel.gate_up(jnp.asarray(x), ready_gate_up, config, chip=CHIP)
    inner = oracle.block_dequant(np.asarray(values)[:M], np.asarray(scale_FbM)[: F // 128, :M].T, (1, 128))
    gate, up = np.split(product(x, gate_up), 2, axis=1)
    a = gate / (1 + np.exp(-gate)) * up
    amax = np.abs(a).reshape(M, -1, 128).max(-1).repeat(128, 1)
    assert (np.abs(inner - a) <= np.maximum(np.abs(a) / 8, amax / 448 / 256) + 1e-3 * amax).all()
    assert oracle.rel_err(inner, a) <= 0.04  # rounding to e4m3 alone: 0.027
    y = np.asarray(pk.swiglu_mlp(jnp.asarray(x), ready_gate_up, ready_down, backend="mosaic", config=config))
    assert oracle.rel_err(y, inner @ oracle.block_dequant(*down, (128, 128)).T) <= BOUND
    whole = oracle.swiglu_oracle(np.asarray(x), gate_up, down)
    assert oracle.rel_err(y, whole) <= oracle.TOLERANCES["swiglu_mlp", "bfloat16"].bound


@pytest.mark.parametrize("cache", ["bfloat16", "float8"])
@pytest.mark.parametrize(("H", "G", "d", "S"), [(32, 8, 128, 1024), (16, 8, 64, 128), (8, 1, 128, 256), (4, 4, 64, 64)])
@pytest.mark.parametrize(("splits", "merge"), [(None, None), (3, "cluster"), (8, "cluster"), (3, "launch")])
def test_attention_over_live_positions_only(cache, H, G, d, S, splits, merge, poisoned):
    rng = np.random.default_rng()
    lengths = np.array([0, 1, 15, 16, 17, S // 2 + 1, S, S + 9], np.int32)
    B = len(lengths)
    q = jnp.asarray(rng.standard_normal((B, H, d)) * 2, jnp.bfloat16)
    k, v = (
        jnp.asarray(rng.standard_normal((B, G, S, d)) * 2.0 ** rng.uniform(-6, 3, (1, 1, S, 1)), jnp.bfloat16)
        for _ in range(2)
    )
    config = None
    if splits:
        keys_in = "registers" if CHIP is SM90 else "shared"
        config = AttentionConfig(CHIP.rows[0], splits, keys_in=keys_in, merge=merge)
    if reason := attention_kernel.why_not(q, k, config, CHIP):
        pytest.skip(reason)
    (k, v), known = poisoned(k, v, lengths, cache)
    ref = oracle.attention_oracle(np.asarray(q), *known, np.minimum(lengths, S))
    attend = jax.jit(functools.partial(pk.decode_attention, backend="mosaic", config=config))
    o = np.asarray(attend(q, k, v, jnp.asarray(lengths)))
    assert not o[0].astype(np.float32).any()
    for b in range(1, B):
        assert oracle.rel_err(o[b], ref[b]) <= oracle.TOLERANCES["decode_attention", "bfloat16"].bound, lengths[b]
