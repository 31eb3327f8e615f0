"""The one place that chooses: explicit back ends run or say why; None takes the list in order and says so once."""

import importlib
import json
import logging
from pathlib import Path

import jax.numpy as jnp
import pytest

import pallas_kernels as pk
from pallas_kernels import _dispatch, _tuned
from pallas_kernels._dispatch import Backend

ROOT = Path(pk.__file__).parent


@pytest.fixture(autouse=True)
def forget_what_was_said():
    _dispatch._say_once.cache_clear()
    yield
    _dispatch._say_once.cache_clear()


def calls():
    x = jnp.ones((2, 128), jnp.bfloat16)
    w = pk.quantize_blocks(jnp.ones((128, 128)), (128, 128))
    gate_up = pk.quantize_blocks(jnp.ones((256, 128)), (128, 128))
    kv = jnp.ones((2, 1, 64, 64), jnp.bfloat16)
    kv8, row = pk.quantize_kv(kv), jnp.ones((2, 1, 64), jnp.bfloat16)
    norm = jnp.ones(128)
    layer = pk.FastLayer(
        norm,
        pk.quantize_blocks(jnp.ones((512, 128)), (128, 128)),
        pk.quantize_blocks(jnp.ones((128, 256)), (128, 128)),
        norm,
        gate_up,
        w,
    )
    frame = pk.fast_weights([layer], jnp.ones((128, 128)), norm, w, jnp.ones((3, 64, 2)), 1e-6)
    draws = pk.Draws(jnp.ones(2), jnp.ones(2), jnp.ones(2, int), jnp.zeros((2, 2, 128)))
    return {
        "fast_frame": lambda b: pk.fast_frame(x, jnp.ones(2, int), frame, draws, backend=b),
        "causal_conv": lambda b: pk.causal_conv(x[:, None][:, :0], x[:, None], x[:1, :, None], x[0, :1], backend=b),
        "append_kv": lambda b: pk.append_kv(row, row, kv8, kv8, jnp.ones(2, int), backend=b),
        "between_attentions": lambda b: pk.between_attentions(x.T, None, None, pk.After(norm, w), eps=1e-6, backend=b),
        "quantize_blocks": lambda b: pk.quantize_blocks(x, backend=b),
        "quantize_mx": lambda b: pk.quantize_mx(x, backend=b),
        "block_scaled_matmul": lambda b: pk.block_scaled_matmul(x, w, backend=b),
        "mx_matmul": lambda b: pk.mx_matmul(x, pk.quantize_mx(jnp.ones((64, 128))), backend=b),
        "swiglu_mlp": lambda b: pk.swiglu_mlp(x, gate_up, w, backend=b),
        "decode_attention": lambda b: pk.decode_attention(
            jnp.ones((2, 2, 64), jnp.bfloat16), kv, kv, jnp.ones(2, int), backend=b
        ),
    }


@pytest.mark.parametrize("op", list(_dispatch.COMES_FIRST))
def test_explicit_mosaic_says_why_it_cannot_run_here(op):
    with pytest.raises(NotImplementedError, match=f"{op}: backend 'mosaic' cannot run: .{{20,}}"):
        calls()[op]("mosaic")


@pytest.mark.parametrize("op", list(_dispatch.COMES_FIRST))
def test_an_unknown_back_end_is_named(op):
    with pytest.raises(ValueError, match="'triton' is not one of 'reference', 'mosaic' or None"):
        calls()[op]("triton")


def choose(backend, capability, monkeypatch, reason=None):
    monkeypatch.setattr(_dispatch, "gpu_capability", lambda: capability)
    return _dispatch.choose(
        "block_scaled_matmul", backend, {"9.0": "Hopper's", "10.0": "Blackwell's"}, lambda _: reason
    )


def test_none_takes_a_kernel_where_it_has_run_and_says_once(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        assert choose(None, "9.0", monkeypatch) == "Hopper's"
        assert choose(None, "9.0", monkeypatch) == "Hopper's"
        assert choose(None, "9.0", monkeypatch, "needs more") is None
        assert choose(None, "10.0", monkeypatch) is None
        assert choose(None, "10.0", monkeypatch) is None
    assert [r.message for r in caplog.records] == [
        "block_scaled_matmul runs on mosaic",
        "block_scaled_matmul runs on reference (mosaic: needs more)",
        "block_scaled_matmul runs on reference (mosaic: taken on compute capability 10.0 only by name: "
        "docs/portability.md says what was run)",
    ]


def test_explicit_choices_are_taken_without_a_word(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        assert choose("reference", "9.0", monkeypatch, "no") is None
        assert choose(Backend.MOSAIC, "9.0", monkeypatch) == "Hopper's"
        assert choose("mosaic", "10.0", monkeypatch) == "Blackwell's"
    assert not caplog.records


def test_a_chip_that_has_no_kernel_hears_which_have_one(monkeypatch):
    with pytest.raises(NotImplementedError, match=r"needs a GPU of compute capability 9.0 or 10.0; .* capability 12.0"):
        choose("mosaic", "12.0", monkeypatch)


@pytest.mark.parametrize(("capability", "name"), [("9.0", "mosaic_sm90"), ("10.0", "mosaic_sm100")])
@pytest.mark.parametrize("op", list(_dispatch.COMES_FIRST))
def test_mosaic_is_the_kernel_of_the_chip(op, capability, name, monkeypatch):
    kernels = importlib.import_module(f"pallas_kernels.{op}.api").KERNELS
    if not (ROOT / op / f"{name}.py").exists():
        assert capability not in kernels
        return
    kernel = importlib.import_module(f"pallas_kernels.{op}.{name}")
    assert kernels[capability] is kernel
    called = []
    entry = "quantize_rows" if op.startswith("quantize") else op
    monkeypatch.setattr(_dispatch, "gpu_capability", lambda: capability)
    monkeypatch.setattr(kernel, "why_not", lambda *_: None)
    monkeypatch.setattr(kernel, entry, lambda *_: called.append(op) or (jnp.zeros((8, 128)), jnp.zeros((4, 32))))
    calls()[op]("mosaic")
    assert called == [op]


def test_measured_choices_come_before_defaults(monkeypatch, tmp_path):
    from pallas_kernels.block_scaled_matmul import mosaic_sm90
    from pallas_kernels.block_scaled_matmul.config import Config, default_config

    folder = tmp_path / "block_scaled_matmul" / "tuned"
    folder.mkdir(parents=True)
    (folder / f"{_tuned.device_name()}.json").write_text(json.dumps({"16x256x512": {"tile_n": 128, "splits": 2}}))
    monkeypatch.setattr(_tuned, "_ROOT", tmp_path)
    _tuned._table.cache_clear()
    assert mosaic_sm90.pick(16, 256, 512) == Config(tile_n=128, splits=2)
    assert mosaic_sm90.pick(8, 256, 512) == default_config(8, 256, 512)
    _tuned._table.cache_clear()
