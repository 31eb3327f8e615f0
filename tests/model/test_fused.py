"""The fused decode step, on a CPU its references, against the step of single operations.

FP8 makes any comparison coarse: what differs in the last bit of bfloat16 may be rounded to the neighbouring e4m3, 6 %
away. So the oracle is the step of single operations with float32 activations, and the fused step, whose residual is
float32, must come closer to it than the same step with bfloat16 activations does.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fishjax.codec import Codec
from fishjax.config import ModelConfig
from fishjax.engine import sampling
from fishjax.engine.engine import Engine
from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import InvalidRequest
from fishjax.model.cache import init_cache
from fishjax.model.dual_ar import DualAR
from fishjax.model.fused import frame_weights, slow_step, why_not
from fishjax.weights.assign import parameters
from fishjax.weights.load import load_dual_ar
from fishjax.weights.load_codec import load_codec
from fishjax.weights.precision import Precision
from fishjax.weights.prepare import prepare
from fishjax.weights.quantize import apply_precision
from pallas_kernels import fast_frame
from pallas_kernels.fast_frame import reference

FP8 = Precision.parse("slow=fp8,fast=fp8,head=bf16,kv=bf16,codec=fp32")
IM_END = 422


@pytest.fixture(scope="module")
def config(golden) -> ModelConfig:
    """The golden layout with widths that the kernels know."""
    tiny = load_dual_ar(golden / "dualar_tiny" / "s2_layout")[1].config
    slow = dataclasses.replace(tiny.slow, dim=256, num_heads=4, num_kv_heads=2, head_dim=64, ffn_dim=384)
    fast = dataclasses.replace(tiny.fast, dim=256, num_heads=2, num_kv_heads=1, head_dim=128, ffn_dim=256)
    return dataclasses.replace(tiny, slow=slow, fast=dataclasses.replace(fast, qk_norm=False))


@pytest.fixture(scope="module")
def model(config) -> DualAR:
    model = DualAR(config, rngs=nnx.Rngs(3))
    apply_precision(model, FP8)
    prepare(model)
    return model


@pytest.fixture(scope="module")
def exact(config) -> DualAR:
    """The same weights, all that is not FP8 in float32."""
    model = DualAR(config, rngs=nnx.Rngs(3))
    apply_precision(model, FP8)
    for variable in parameters(model).values():
        if isinstance(value := variable.get_value(), jax.Array):
            variable.set_value(value.astype(jnp.float32))
    prepare(model)
    return model


@pytest.fixture(scope="module")
def codec(golden) -> Codec:
    return load_codec(golden / "codec_tiny")[1]


def error(a, b) -> float:
    """Of a row, relative to its norm; the mean over all rows."""
    a, b = (np.asarray(x.astype(jnp.float32), np.float64).reshape(-1, x.shape[-1]) for x in (a, b))
    return float(np.mean(np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)))


def test_slow_step_is_the_slow_transformer(model, exact, config):
    """Two columns, one after the other, with what the first one left in the cache."""
    slots = 5
    columns = np.zeros((slots, config.num_codebooks + 1, 2), np.int32)
    columns[:, 0] = np.random.default_rng(1).integers(0, 256, (slots, 2))
    fused, plain, oracle = (init_cache(config, slots, 16, kind) for kind in (jnp.bfloat16, jnp.bfloat16, jnp.float32))
    start_B = jnp.asarray([0, 3, 0, 7, 1])
    for column in range(2):
        x_B1D, exact_B1D = (
            m.slow.embed(jnp.asarray(columns[..., column : column + 1]), generation=True) for m in (model, exact)
        )
        oracle_B1D, oracle = exact.slow.extend(exact_B1D, start_B + column, oracle)
        plain_B1D, plain = model.slow.extend(x_B1D, start_B + column, plain)
        hidden_BD, fused = slow_step(model.slow, x_B1D[:, 0], start_B + column, fused)
        assert hidden_BD.dtype == plain_B1D.dtype
        assert error(hidden_BD, oracle_B1D[:, 0]) < error(plain_B1D, oracle_B1D) < 0.15
        rows = np.arange(slots), slice(None), np.asarray(start_B + column)
        for a, b, c in zip(*(cache.k_BGSd + cache.v_BGSd for cache in (fused, plain, oracle)), strict=True):
            assert error(a[rows], c[rows]) < 1.1 * error(b[rows], c[rows]) < 0.15


def test_fast_frame_is_the_fast_transformer(model, exact, config):
    slots, rng = 6, np.random.default_rng(2)
    hidden_BD = jnp.asarray(rng.standard_normal((slots, config.fast.dim)), jnp.bfloat16)
    semantic_B = jnp.asarray(rng.integers(0, config.codebook_size, slots))
    knobs = sampling.Knobs(jnp.full(slots, 0.8), jnp.full(slots, 0.9), jnp.full(slots, 20, jnp.int32), short=True)
    seed_B, frame_B = jnp.arange(slots, dtype=jnp.uint32), jnp.arange(slots)
    draws = sampling.frame_draws(knobs, seed_B, frame_B, config.num_codebooks, config.codebook_size)
    codes_BC, logits_CBN = reference.fast_frame(hidden_BD, semantic_B, frame_weights(model.fast), draws)
    np.testing.assert_array_equal(fast_frame(hidden_BD, semantic_B, frame_weights(model.fast), draws), codes_BC)
    assert len(np.unique(np.asarray(codes_BC))) > config.num_codebooks

    for codebook in range(1, config.num_codebooks):  # the sampler makes the same race of them
        drawn_B = sampling.sample_code(logits_CBN[codebook - 1], knobs, seed_B, frame_B, codebook)
        np.testing.assert_array_equal(drawn_B, codes_BC[:, codebook])

    def logits_of(fast, hidden_BD):
        @jax.jit
        def run(hidden_BD):
            seen = []
            fast.frame(hidden_BD, semantic_B, lambda codebook, logits: (seen.append(logits), codes_BC[:, codebook])[1])
            return jnp.stack(seen)

        return run(hidden_BD)

    oracle_CBN = logits_of(exact.fast, hidden_BD.astype(jnp.float32))
    assert error(logits_CBN, oracle_CBN) < error(logits_of(model.fast, hidden_BD), oracle_CBN) < 0.15


@pytest.mark.parametrize("fused", ["slow", "both"])
def test_an_engine_speaks_fused_and_a_neighbour_changes_nothing(model, codec, config, compiles, fused):
    engine = Engine(
        model, codec, im_end_id=IM_END, num_slots=2, max_len=64, precision=FP8, max_reference_s=0.5, fused=fused
    )
    engine.warmup()
    compiled = compiles.count

    def frames(slot, others, top_k=20, others_top_k=20):
        columns = np.zeros((config.num_codebooks + 1, 8), np.int32)
        columns[0] = np.arange(8) + 30
        for at in {slot, *others}:
            sampling_params = SamplingParams(seed=int(at == slot), top_k=top_k if at == slot else others_top_k)
            engine.insert(engine.prefill(columns, sampling_params), at)
        made = [engine.step({slot, *others}).result().codes_BK[slot] for _ in range(5)]
        for at in {slot, *others}:
            engine.free(at)
        return np.stack(made)

    alone = frames(0, ())
    assert len(np.unique(alone)) > 5
    np.testing.assert_array_equal(frames(1, (0,)), alone)
    # Beyond the kernel's short list of candidates a slot draws without it: that one alone.
    many = frames(0, (), top_k=sampling.TOP_K_CAP + 36)
    assert (many != alone).any() or fused == "slow"
    np.testing.assert_array_equal(frames(1, (0,), others_top_k=sampling.TOP_K_CAP + 36), alone)
    np.testing.assert_array_equal(frames(0, (1,), top_k=sampling.TOP_K_CAP + 36), many)
    assert compiles.count == compiled


def test_a_model_that_the_kernels_do_not_know_is_refused(model, codec, config, golden):
    assert why_not(model, 64, "both") is None
    assert "the kernel holds 64" in why_not(model, 65, "both")
    odd = dataclasses.replace(config, fast=dataclasses.replace(config.fast, num_kv_heads=2))
    alike = DualAR(odd, rngs=nnx.Rngs(0))
    apply_precision(alike, FP8)
    prepare(alike)
    assert "query heads over" in why_not(alike, 1, "both")
    fast = dataclasses.replace(config.fast, num_heads=4, num_kv_heads=2, head_dim=64)
    narrow = dataclasses.replace(config, fast=fast)
    plain = DualAR(narrow, rngs=nnx.Rngs(0))
    with pytest.raises(InvalidRequest, match="fused kernels do not know this model: the slow transformer's weights"):
        Engine(plain, codec, im_end_id=IM_END, num_slots=1, max_len=64, fused="slow")
    apply_precision(plain, FP8)
    prepare(plain)
    assert "heads are 64 wide" in why_not(plain, 1, "both") and why_not(plain, 1, "slow") is None


def test_the_fused_step_lowers_for_a_gpu(model, config):
    """With references in place of kernels: what lies between them."""
    slots = 2
    cache = init_cache(config, slots, 32, jnp.bfloat16)
    lowered = jax.jit(lambda x, start, cache: slow_step(model.slow, x, start, cache)).trace(
        jnp.zeros((slots, 256), jnp.bfloat16), jnp.zeros(slots, jnp.int32), cache
    )
    assert "func.func public @main" in lowered.lower(lowering_platforms=("cuda",)).as_text()
