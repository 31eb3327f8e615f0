"""The frame kernel without a Hopper: it lowers for CUDA; the GPU interpreter runs small frames whole, draws included.

The interpreter gives each warpgroup a thread of XLA's pool, which is as large as NPROC says: so it runs in processes of
its own, and this file is the program that they run.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels._testing import TOLERANCES, gpu_interpreter, rel_err, run_alone
from pallas_kernels.fast_frame import api, config, mosaic_sm90, reference
from pallas_kernels.fast_frame.arg_specs import SPECS
from pallas_kernels.fast_frame.weights import FastLayer, fast_weights
from pallas_kernels.quantize_blocks.reference import quantize_blocks

B, D, H, G, F, L, C, CODES = 3, 256, 2, 1, 384, 2, 3, 200
SMALL = config.Config(blocks=5, splits_qkv=1, splits_wo=2, splits_down=2, x_stages=2)


def weights(seed):
    rng = np.random.default_rng(seed)

    def quantised(N, K, gain=1.0):
        return quantize_blocks(jnp.asarray(gain * rng.standard_normal((N, K)) * K**-0.5, jnp.float32), (128, 128))

    def norm():
        return jnp.asarray(1 + 0.3 * rng.standard_normal(D), jnp.float32)

    layers = [
        FastLayer(
            norm(),
            quantised((H + 2 * G) * 128, D),
            quantised(D, H * 128),
            norm(),
            quantised(2 * F, D, 1.5),
            quantised(D, F),
        )
        for _ in range(L)
    ]
    angles = np.arange(C)[:, None] * 1e4 ** (-np.arange(64) / 64)
    rope = jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], -1), jnp.float32)
    embeddings = jnp.asarray(rng.standard_normal((CODES, D)), jnp.float32)
    return fast_weights(layers, embeddings, norm(), quantised(CODES, D, 3.0), rope, 1e-6)


def operands(seed, slots=B):
    """hidden, semantic, draws: slots that are greedy, that have a nucleus, that take all candidates."""
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.standard_normal((slots, D)), jnp.bfloat16)
    draws = reference.Draws(
        jnp.asarray(np.resize([0.7, 0.9, 1.3], slots), jnp.float32),
        jnp.asarray(np.resize([0.8, 0.7, 1.0], slots), jnp.float32),
        jnp.asarray(np.resize([1, 30, 12], slots), jnp.int32),
        jnp.asarray(rng.gumbel(size=(C - 1, slots, CODES)), jnp.float32),
    )
    return hidden, jnp.asarray(rng.integers(0, CODES, slots), jnp.int32), draws


def interpreted(hidden, semantic, w, draws):
    return [np.asarray(a) for a in mosaic_sm90.fast_frame(hidden, semantic, w, draws, SMALL, gpu_interpreter())]


def case_equals_the_reference(slots=B):
    w, (hidden, semantic, draws) = weights(1), operands(2, slots)
    codes, logits = interpreted(hidden, semantic, w, draws)
    wanted_codes, wanted = reference.fast_frame(hidden, semantic, w, draws)
    assert len(np.unique(codes)) > C, "codes that are all alike prove nothing"
    np.testing.assert_array_equal(codes[:, 0], wanted_codes[:, 0])
    exact, flipped = (TOLERANCES["fast_frame", kind].bound for kind in ("float32", "one value flipped"))
    agreeing = 0
    for slot in range(slots):
        errors = [rel_err(a, b) for a, b in zip(logits[:, slot], np.asarray(wanted)[:, slot], strict=True)]
        same = next((i for i, error in enumerate(errors) if error > exact), len(errors))
        np.testing.assert_array_equal(codes[slot, : same + 1], wanted_codes[slot, : same + 1])
        assert max(errors[: same + 1]) <= flipped  # what comes after a code of its own has nothing to be compared with
        agreeing += same == len(errors)
    assert agreeing >= slots / 2
    for position in range(1, C):
        np.testing.assert_array_equal(codes[:, position], reference.draw(logits[position - 1], draws, position))


def case_equals_the_reference_position_by_position():
    """As with more than 32 slots, where two tokens a slot have no room."""
    config.MAX_TOKENS = 8
    assert not mosaic_sm90._plan(5, weights(1), SMALL).paired and mosaic_sm90._plan(B, weights(1), SMALL).paired
    case_equals_the_reference(slots=5)


def case_a_slot_depends_on_itself_alone():
    w, (hidden, semantic, draws) = weights(3), operands(4)
    codes, logits = interpreted(hidden, semantic, w, draws)
    hidden, semantic = hidden.at[0].set(jnp.nan).at[2].set(-hidden[2]), semantic.at[2].set(7)
    poisoned, others = interpreted(hidden, semantic, w, draws)
    np.testing.assert_array_equal(poisoned[1], codes[1])
    np.testing.assert_array_equal(others[:, 1], logits[:, 1])
    assert np.isnan(others[:, 0]).any() and (poisoned[2] != codes[2]).any()
    assert ((poisoned >= 0) & (poisoned < CODES)).all()


@pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs FP8 from jax 0.11 on")
@pytest.mark.parametrize(
    "case",
    ["equals_the_reference", "equals_the_reference_position_by_position", "a_slot_depends_on_itself_alone"],
)
def test_interpreter(case):
    assert "RACE DETECTED" not in run_alone(__file__, case)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_lowers_for_cuda(spec):
    traced = jax.jit(mosaic_sm90.fast_frame).trace(*spec.arguments())
    assert str(traced.jaxpr).count("get_global") == 1, "one counter for all grid barriers, or each waits for its own"
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_a_plan_that_does_not_fit_says_why():
    def reason(**changed):
        sizes = {"slots": 8, "D": 2560, "H": 32, "G": 8, "F": 9728, "L": 4, "C": 10, "codes": 4096} | changed
        return config.why_not(config.plan(config.Config(), **sizes))

    assert reason() is None and reason(slots=64) is None
    assert "65" not in reason(slots=65) and "80 rows" in reason(slots=65)
    assert "17 codebooks" in reason(C=17)
    assert "query heads" in reason(H=8, G=8) and "query heads" in reason(H=30)
    assert "gate_up has 152 pieces for 132 blocks" in reason(F=2 * 9728)


def test_operands_that_do_not_fit_are_refused():
    w, (hidden, semantic, draws) = weights(5), operands(6)
    with pytest.raises(ValueError, match="hidden"):
        api.fast_frame(hidden[:, :128], semantic, w, draws)
    with pytest.raises(ValueError, match="gumbel"):
        api.fast_frame(hidden[:2], semantic[:2], w, draws)
    with pytest.raises(NotImplementedError, match="compute capability"):
        api.fast_frame(hidden, semantic, w, draws, backend="mosaic")


def test_draws():
    """Ties go to the lower number; the best survives any top_p and any u; top_k 1 is greedy."""
    logits = jnp.asarray([[0.0, 2.0, 2.0, -1.0], [0.0, 2.0, 2.0, -1.0], [9.0, 0.0, 0.0, 0.0], [1.0, 0.0, 2.0, 1.5]])
    gumbel = jnp.asarray([[[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 5.0, 0.0], [-jnp.inf, 9, 9, 9], [0.0, 0.0, 0.0, 4.0]]])
    draws = reference.Draws(
        jnp.ones(4), jnp.asarray([1.0, 1.0, 0.5, 1.0]), jnp.asarray([4, 4, 4, 1], jnp.int32), gumbel
    )
    assert reference.draw(logits, draws, 1).tolist() == [1, 2, 0, 2]


if __name__ == "__main__":
    globals()[f"case_{sys.argv[1]}"]()
