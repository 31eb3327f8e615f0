"""The kernels on PyTorch tensors: what JAX hands over is one launch; padding and errors; on a Hopper, the numbers."""

import functools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels as pk
from pallas_kernels import _dispatch, torch_adapter
from pallas_kernels import _testing as oracle
from pallas_kernels.block_scaled_matmul.config import Config as MatmulConfig
from pallas_kernels.decode_attention.config import Config as AttentionConfig
from pallas_kernels.types import BlockScaled, ScaledKV

F8, F32, BF16 = jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16
BOUND = oracle.TOLERANCES["matmul", "bfloat16"].bound
ATTENTION_BOUND = oracle.TOLERANCES["decode_attention", "bfloat16"].bound
BACK = {"float8_e4m3fn": (np.uint8, ml_dtypes.float8_e4m3fn), "bfloat16": (np.int16, ml_dtypes.bfloat16)}


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def to_torch(torch, a, device="cpu"):
    """A NumPy or JAX array as a tensor; FP8 and bfloat16 by their bits."""
    a = np.array(a)
    bits, _ = BACK.get(a.dtype.name, (a.dtype, None))
    return torch.from_numpy(a.view(bits)).view(getattr(torch, a.dtype.name)).to(device)


def to_numpy(torch, t):
    name = str(t.dtype).removeprefix("torch.")
    bits, kind = BACK.get(name, (None, None))
    if bits is None:
        return t.cpu().numpy()
    return t.cpu().contiguous().view(getattr(torch, np.dtype(bits).name)).numpy().view(kind)


def matmul_case(torch, rng, M, N, K, device="cpu"):
    values = np.clip(rng.standard_normal((N, K)) * 100, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    scale = (2.0 ** rng.uniform(-4, 4, (-(-N // 128), K // 128))).astype(np.float32)
    x = (rng.standard_normal((M, K)) * 2.0 ** rng.uniform(-6, 6, (M, 1))).astype(ml_dtypes.bfloat16)
    ref = oracle.block_dequant(*oracle.e4m3_rows(x), (1, 128)) @ oracle.block_dequant(values, scale, (128, 128)).T
    w = BlockScaled(to_torch(torch, values, device), to_torch(torch, scale, device))
    return to_torch(torch, x, device), w, ref


def attention_case(torch, rng, kind, device="cpu"):
    B, H, G, S, d = 4, 8, 2, 128, 64
    lengths = np.array([0, 1, 65, 128], np.int32)
    q = (rng.standard_normal((B, H, d)) * 2).astype(ml_dtypes.bfloat16)
    k, v = (rng.standard_normal((B, G, S, d)).astype(ml_dtypes.bfloat16) for _ in range(2))
    if kind == "float8":
        k, v = (pk.quantize_kv(jnp.asarray(c)) for c in (k, v))
        known = [np.asarray(c.dequantize()) for c in (k, v)]
        k, v = (ScaledKV(to_torch(torch, c.values_BGSd, device), to_torch(torch, c.scale_BGS, device)) for c in (k, v))
    else:
        known, (k, v) = [k, v], (to_torch(torch, c, device) for c in (k, v))
    ref = oracle.attention_oracle(q, *known, lengths)
    return (to_torch(torch, q, device), k, v, to_torch(torch, lengths, device)), ref


def expect_attention(torch, given, ref, **options):
    o = to_numpy(torch, torch_adapter.decode_attention(*given, **options))
    assert o.shape == ref.shape and not o[0].astype(np.float32).any()
    assert max(oracle.rel_err(o[b], ref[b]) for b in range(1, len(ref))) <= ATTENTION_BOUND


def operations(launch, *shapes):
    text = jax.jit(launch).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"stablehlo\.\w+(?: @\w+)?|call @\w+", text)


@pytest.fixture
def handed_over(monkeypatch):
    """The JAX functions themselves, as they are given to as_torch_kernel."""
    monkeypatch.setattr(plgpu, "as_torch_kernel", lambda launch: launch)
    caches = torch_adapter.matmul_kernel, torch_adapter.attention_kernel
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize(("M", "splits"), [(3, 1), (16, 4), (256, 1)])
def test_the_matmul_is_one_launch(handed_over, M, splits):
    """as_torch_kernel refuses every other operation, when it compiles: on the device."""
    tile_m, rows = min(-(-M // 8) * 8, 128), max(8, M)
    launch = torch_adapter.matmul_kernel(M, tile_m, MatmulConfig(64, splits, 2))
    shapes = ((rows, 2560), F8), ((20, rows), F32), ((66, 64, 2560), F8), ((33, 32), F32)
    assert operations(launch, *(jax.ShapeDtypeStruct(*s) for s in shapes)) == ["stablehlo.custom_call @mosaic_gpu_v2"]


@pytest.mark.parametrize("cache", ["bfloat16", "float8"])
@pytest.mark.parametrize("splits", [1, 2])
def test_attention_is_one_launch(handed_over, cache, splits):
    launch = torch_adapter.attention_kernel(4, 0.1, AttentionConfig(64, splits, 2, merge="cluster"))
    kv, scale = jax.ShapeDtypeStruct((4, 2, 128, 64), BF16 if cache == "bfloat16" else F8), ((4, 2, 128), F32)
    caches = (kv, kv) if cache == "bfloat16" else (kv, kv, *[jax.ShapeDtypeStruct(*scale)] * 2)
    q = jax.ShapeDtypeStruct((4, 2, 8, 64), BF16 if cache == "bfloat16" else jnp.float16)
    found = operations(launch, q, *[jax.ShapeDtypeStruct((4,), jnp.int32)] * 2, *caches)
    assert found == ["stablehlo.custom_call @mosaic_gpu_v2"]


def test_without_pytorch_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    w = pk.quantize_blocks(jnp.ones((128, 128)), (128, 128))
    with pytest.raises(ImportError, match="block_scaled_matmul on tensors needs PyTorch"):
        torch_adapter.block_scaled_matmul(jnp.ones((2, 128)), w)
    with pytest.raises(ImportError, match="decode_attention on tensors needs PyTorch"):
        torch_adapter.decode_attention(*[jnp.ones((1, 1, 64))] * 4)


def test_errors_name_what_is_wrong(torch, monkeypatch):
    rng = np.random.default_rng(0)
    x, w, _ = matmul_case(torch, rng, 2, 128, 256)
    with pytest.raises(ValueError, match="differ in K"):
        torch_adapter.block_scaled_matmul(x[:, :128], w)
    with pytest.raises(ValueError, match="must be on one CUDA device, got cpu, cpu"):
        torch_adapter.block_scaled_matmul(x, w)
    given, _ = attention_case(torch, rng, "bfloat16")
    with pytest.raises(ValueError, match="does not fit k"):
        torch_adapter.decode_attention(given[0][:2], *given[1:])
    with pytest.raises(ValueError, match=r"got \(torch.float32,"):
        torch_adapter.decode_attention(given[0].float(), *given[1:])
    monkeypatch.delattr(plgpu, "as_torch_kernel")
    with pytest.raises(NotImplementedError, match="this JAX has no plgpu"):
        torch_adapter.block_scaled_matmul(x, w)


def test_pytorch_quantises_bit_for_bit(torch):
    rng = np.random.default_rng(1)
    x = (rng.standard_normal((5, 640)) * 2.0 ** rng.uniform(-40, 40, (5, 1))).astype(np.float32)
    x[0, :128], x[1, 3], x[2, 200] = 0, np.inf, np.nan
    got, want = torch_adapter.quantize_rows(torch.from_numpy(x)), pk.quantize_blocks(jnp.asarray(x))
    np.testing.assert_array_equal(to_numpy(torch, got.scale_NbKb), np.asarray(want.scale_NbKb))
    values = to_numpy(torch, got.values_NK).astype(np.float32)
    np.testing.assert_array_equal(values, np.asarray(want.values_NK).astype(np.float32))


def test_weights_are_padded_as_jax_pads_them(torch):
    _, w, _ = matmul_case(torch, np.random.default_rng(2), 1, 300, 256)
    ready = torch_adapter.prepare_weight(w)
    assert torch_adapter.prepare_weight(ready) is ready
    numpy = BlockScaled(*(jnp.asarray(to_numpy(torch, t)) for t in (w.values_NK, w.scale_NbKb)))
    want = pk.prepare_weights(numpy, "block_scaled_matmul")
    assert ready.shape == want.shape == (300, 256)
    for a, b in ((ready.values_NK, want.values_NK), (ready.scale_NbKb, want.scale_NbKb)):
        np.testing.assert_array_equal(to_numpy(torch, a).astype(np.float32), np.asarray(b).astype(np.float32))


@pytest.fixture
def interpreted(torch, monkeypatch, handed_over):
    """as_torch_kernel on the CPU: tensors to arrays and back, the launch in JAX's GPU interpreter."""
    if gpu_interpreter := oracle.gpu_interpreter():
        for module in (torch_adapter.matmul, torch_adapter.attention):
            monkeypatch.setattr(module, "launch", functools.partial(module.launch, interpret=gpu_interpreter))
    else:
        pytest.skip("the GPU interpreter runs FP8 from jax 0.11 on")

    def on_cpu(launch):
        return lambda *tensors: jax.tree.map(
            lambda a: to_torch(torch, a), launch(*(jnp.asarray(to_numpy(torch, t)) for t in tensors))
        )

    monkeypatch.setattr(plgpu, "as_torch_kernel", on_cpu)
    monkeypatch.setattr(torch_adapter, "_check_cuda", lambda op, *tensors: None)


@pytest.mark.parametrize(("M", "N"), [(3, 100), (16, 128), (130, 64)])
def test_matmul_in_the_interpreter(torch, interpreted, M, N):
    x, w, ref = matmul_case(torch, np.random.default_rng(M), M, N, 384)
    y = to_numpy(torch, torch_adapter.block_scaled_matmul(x, w, config=MatmulConfig(64, 1, 2)))
    assert y.shape == (M, N) and oracle.rel_err(y, ref) <= BOUND


@pytest.mark.parametrize("cache", ["bfloat16", "float8"])
def test_attention_in_the_interpreter(torch, interpreted, cache):
    given, ref = attention_case(torch, np.random.default_rng(3), cache)
    expect_attention(torch, given, ref, config=AttentionConfig(64, 1, 2, keys_in="shared"))
    with pytest.raises(NotImplementedError, match="second launch"):
        torch_adapter.decode_attention(*given, config=AttentionConfig(64, 2, 2))


on_hopper = pytest.mark.skipif(_dispatch.gpu_capability() != "9.0", reason="needs a GPU of compute capability 9.0")


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("M", [1, 3, 8, 64, 130])
def test_matmul_on_the_device(torch, M):
    rng = np.random.default_rng()
    for N, K in ((4097, 2560), (2560, 9728)):
        x, w, ref = matmul_case(torch, rng, M, N, K, "cuda")
        for weight in (w, torch_adapter.prepare_weight(w)):
            y = to_numpy(torch, torch_adapter.block_scaled_matmul(x, weight))
            assert oracle.rel_err(y, ref) <= BOUND


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("cache", ["bfloat16", "float8"])
def test_attention_on_the_device(torch, cache):
    given, ref = attention_case(torch, np.random.default_rng(), cache, "cuda")
    expect_attention(torch, given, ref)


@pytest.mark.gpu
@on_hopper
def test_the_example_of_the_page(torch):
    page = (Path(__file__).parents[2] / "docs" / "portability.md").read_text()
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL).group(1), names)
    rows = oracle.block_dequant(*oracle.e4m3_rows(to_numpy(torch, names["x"])), (1, 128))
    w = oracle.block_dequant(*(to_numpy(torch, names[n]) for n in ("values", "scale")), (128, 128))
    assert oracle.rel_err(to_numpy(torch, names["y"]), rows @ w.T) <= BOUND
    q, k, v, lengths = (to_numpy(torch, names[n]) for n in ("q", "k", "v", "lengths"))
    assert oracle.rel_err(to_numpy(torch, names["o"]), oracle.attention_oracle(q, k, v, lengths)) <= ATTENTION_BOUND
    k8, v8 = (to_numpy(torch, names[n].values_BGSd) for n in ("k8", "v8"))
    assert oracle.rel_err(to_numpy(torch, names["o8"]), oracle.attention_oracle(q, k8, v8, lengths)) <= ATTENTION_BOUND
