"""The grid of `bench kernels`, its filters, its floors, and the keys under which choices are filed."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from fishjax.bench import cases, ops
from fishjax.errors import InvalidRequest
from pallas_kernels import ScaledKV, _tuned
from pallas_kernels.between_attentions import mosaic_sm90 as between_kernel
from pallas_kernels.block_scaled_matmul import mosaic_sm90 as matmul_kernel
from pallas_kernels.decode_attention import mosaic_sm90 as attention_kernel
from pallas_kernels.mx_matmul import mosaic_sm90 as mx_kernel
from pallas_kernels.prepare import rows_of_prepared
from pallas_kernels.swiglu_mlp import mosaic_sm90 as mlp_kernel

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)


def test_the_grid_holds_every_combination_once():
    grid = cases.grid()
    keys = [case.key for case in grid]
    assert len(set(keys)) == len(keys)
    matmuls = {(c.shape["N"], c.shape["K"], c.m, c.input) for c in grid if c.op == "block_scaled_matmul"}
    weights = ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (4097, 2560))
    assert matmuls == {(*w, m, i) for w, m, i in itertools.product(weights, ROWS, ("quantized", "bfloat16"))}
    mx = {(c.shape["N"], c.shape["K"], c.m, c.input) for c in grid if c.op == "mx_matmul"}
    assert mx == {case for case in matmuls if case[2] not in (2, 4)}
    assert [(c.shape, c.m) for c in grid if c.op == "swiglu_mlp"] == [({"D": 2560, "F": 9728}, m) for m in ROWS]
    attention = {(c.m, *c.shape.values()) for c in grid if c.op == "decode_attention"}
    full = itertools.product((1, 16, 64), (128, 1024, 4096), ("bfloat16", "float8"))
    expected = {(B, 32, 8, S, 128, cache, "full") for B, S, cache in full}
    assert attention == expected | {(64, 32, 8, 1024, 128, cache, "mixed") for cache in ("bfloat16", "float8")}


def test_mixed_lengths_are_fixed_and_uniform():
    case = next(c for c in cases.grid() if c.shape.get("lengths") == "mixed")
    lengths = cases.lengths_of(case)
    assert (lengths == cases.lengths_of(case)).all() and lengths.shape == (64,)
    assert lengths.min() >= 64 and lengths.max() <= 1024 and 450 < lengths.mean() < 640


def test_floors_are_the_bytes_over_the_rate():
    wo = cases.Case("block_scaled_matmul", "wo", {"N": 2560, "K": 4096}, 8, "quantized")
    num_bytes = 2560 * 4096 + 20 * 32 * 4 + 8 * 4096 + 8 * 32 * 4 + 8 * 2560 * 2
    assert cases.floor_us(wo) == pytest.approx(num_bytes / 4.48e6)
    shape = {"H": 32, "G": 8, "S": 1024, "d": 128, "cache": "float8", "lengths": "full"}
    mx = cases.Case("mx_matmul", "wo", {"N": 2560, "K": 4096}, 8, "quantized")
    num_bytes = (2560 + 8) * (4096 + 128) + 8 * 2560 * 2
    assert cases.floor_us(mx) == pytest.approx(num_bytes / 4.48e6) and mx.group == wo.group
    attention = cases.Case("decode_attention", "x", shape, 64)
    num_bytes = 64 * 1024 * 8 * 2 * (128 + 4) + 2 * 64 * 32 * 128 * 2
    assert cases.floor_us(attention) == pytest.approx(num_bytes / 4.48e6)
    mlp = cases.Case("swiglu_mlp", "s2_pro", {"D": 2560, "F": 9728}, 1)
    assert cases.floor_us(mlp) == pytest.approx(16.7, abs=0.05)
    assert cases.weight_bytes(mlp, "xla_bf16") == 2 * 3 * 2560 * 9728


def test_filters():
    down = cases.select(cases.grid(), ops=["block_scaled_matmul"], rows=[8], n=2560, k=9728)
    assert [(c.name, c.input) for c in down] == [("down", "quantized"), ("down", "bfloat16")]
    custom = cases.select(cases.grid(), rows=[5], n=640, k=256)
    assert {(c.name, c.m, c.shape["N"]) for c in custom} == {("custom", 5, 640)}
    assert {c.op for c in custom} == {"block_scaled_matmul", "mx_matmul"}
    assert {c.name for c in cases.select(cases.grid(), shapes=["wo", "s2_pro"])} == {"wo", "s2_pro"}
    with pytest.raises(InvalidRequest, match="go together"):
        cases.select(cases.grid(), n=2560)
    with pytest.raises(InvalidRequest, match="no case"):
        cases.select(cases.grid(), shapes=["nothing"])


@pytest.mark.parametrize("case", [c for c in cases.grid() if c.m == 64], ids=lambda c: c.key)
def test_choices_are_filed_where_the_op_looks(case, monkeypatch):
    asked = []
    monkeypatch.setattr(_tuned, "lookup", lambda op, *key: asked.append((op, "x".join(map(str, key)))))
    s = case.shape
    if case.op == "block_scaled_matmul":
        matmul_kernel.pick(case.m, rows_of_prepared(s["N"]), s["K"])
    elif case.op == "mx_matmul":
        mx_kernel._pick(case.m, rows_of_prepared(s["N"]), s["K"])
    elif case.op == "swiglu_mlp":
        mlp_kernel._pick(case.m, s["D"], s["F"])
    elif case.op == "between_attentions":
        between_kernel.pick(case.m, s["D"], s["K"], s["N"], s["F"])
    else:
        cache = jax.ShapeDtypeStruct((case.m, s["G"], s["S"], s["d"]), jnp.bfloat16)
        attention_kernel.pick(ScaledKV(cache, cache) if s["cache"] == "float8" else cache)
    assert asked == [(case.op, cases.tuned_key(case))]


def test_config_fields():
    wo = cases.Case("block_scaled_matmul", "wo", {"N": 2560, "K": 4096}, 8)
    fields = ops.parse_config("tile_n=128, early=True")
    assert fields == {"tile_n": 128, "early": True}
    default = ops.config_of(wo)
    changed = ops.config_of(wo, fields)
    assert (changed.tile_n, changed.early, changed.splits) == (128, True, default.splits)
    with pytest.raises(InvalidRequest, match="no width"):
        ops.check_fields("block_scaled_matmul", {"width": 1})
    with pytest.raises(InvalidRequest, match="NAME=VALUE"):
        ops.parse_config("tile_n")


def test_the_tuner_has_configs_for_every_shape_that_can_run():
    for case in cases.grid():
        if case.op != "swiglu_mlp" or case.m <= 32:
            assert ops.configs_to_try(case), case.key
