"""The persistent kernels on a Hopper, at S2-Pro's size, against their references; a hang ends at the timeout.

`python -m pytest tests/kernels/test_persistent_on_gpu.py -m gpu` on the machine that has one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantize_blocks
from pallas_kernels._dispatch import gpu_capability
from pallas_kernels._testing import TOLERANCES, between_oracle, rel_err
from pallas_kernels.between_attentions import mosaic_sm90 as between
from pallas_kernels.between_attentions.arg_specs import SPECS as BETWEEN
from pallas_kernels.fast_frame import mosaic_sm90 as frame
from pallas_kernels.fast_frame import reference
from pallas_kernels.fast_frame.arg_specs import SPECS as FRAMES
from pallas_kernels.fast_frame.weights import FastLayer, fast_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(gpu_capability() != "9.0", reason="needs a GPU of compute capability 9.0"),
]
EPS = 1e-6


class Maker:
    """Random operands on the device, other ones every time."""

    def __init__(self):
        self.key = jax.random.key(np.random.default_rng().integers(1 << 31))

    def normal(self, *shape, size=1.0, mean=0.0):
        self.key, key = jax.random.split(self.key)
        return mean + size * jax.random.normal(key, shape)

    def weight(self, N, K, size=1.0):
        return quantize_blocks(self.normal(N, K, size=size * K**-0.5), (128, 128))

    def norm(self, D):
        return self.normal(D, size=0.3, mean=1.0)

    def filled(self, described):
        """Operands in the shapes of `described`: weights, norms (1-D), all else."""
        quantised = type(self.weight(128, 128))

        def make(leaf):
            if isinstance(leaf, quantised):
                return self.weight(*leaf.shape)
            made = self.norm(*leaf.shape) if leaf.ndim == 1 else self.normal(*leaf.shape)
            return made.astype(leaf.dtype)

        return jax.tree.map(make, described, is_leaf=lambda leaf: isinstance(leaf, quantised))


def bits(tree):
    return [np.asarray(leaf.astype(jnp.float32)) for leaf in jax.tree.leaves(tree)]


def dense(part):
    """Weights and norms of a part as arrays, in their order."""
    return (
        None if part is None else tuple(np.asarray(w.dequantize() if w.ndim == 2 else w) for w in vars(part).values())
    )


@pytest.mark.parametrize("spec", BETWEEN, ids=lambda spec: spec.name)
def test_between_attentions(spec):
    x, o, before, after = Maker().filled(spec.arguments())
    run = jax.jit(lambda *operands: between.between_attentions(*operands, EPS))
    made = run(x, o, before, after)
    # In float64 and on the host: XLA may leave the rounding to e4m3 out of a reference that it compiles for one token.
    wide = None if o is None else np.asarray(o.astype(jnp.float32))
    dense_before, dense_after = dense(before), dense(after)
    bound = TOLERANCES["between_attentions", "bfloat16"].bound
    wanted, wanted_qkv = between_oracle(np.asarray(x), wide, dense_before, dense_after, EPS)
    # Two matmuls after the first rounding to e4m3 the oracle itself moves by 5e-3 when x moves by 1e-4, and by 1e-2
    # when x moves by 1e-3 (the tensor core adds 128 products to about 14 bits): a whole chain has no finer measure.
    nudge = 1 + 1e-3 * np.random.default_rng().standard_normal(x.shape)
    nudged, _ = between_oracle(np.asarray(x) * nudge, wide, dense_before, None, EPS)
    assert rel_err(made[0], wanted) <= max(bound, rel_err(nudged, wanted)) < 2e-2
    if after is not None:  # of the residual that the kernel made: another one rounds other values the other way
        _, qkv = between_oracle(np.asarray(made[0]), None, None, dense_after, EPS)
        assert rel_err(bits(made[1])[0], qkv) <= bound
        assert rel_err(bits(made[1])[0], wanted_qkv) <= TOLERANCES["between_attentions", "qkv"].bound
    for _ in range(20):
        for a, b in zip(bits(run(x, o, before, after)), bits(made), strict=True):
            np.testing.assert_array_equal(a, b)
    if spec.M > 1:  # the last token beside others that hold anything
        poisoned = x.at[:, : spec.M - 1].set(jnp.nan), None if o is None else o.at[: spec.M - 1].set(1e30)
        y, qkv = run(*poisoned, before, after)
        np.testing.assert_array_equal(y[:, -1], made[0][:, -1])
        if qkv is not None:
            np.testing.assert_array_equal(bits(qkv)[0][-1], bits(made[1])[0][-1])


def frame_operands(spec):
    make = Maker()
    layers = [
        FastLayer(
            make.norm(spec.D),
            make.weight((spec.H + 2 * spec.G) * 128, spec.D),
            make.weight(spec.D, spec.H * 128),
            make.norm(spec.D),
            make.weight(2 * spec.F, spec.D),
            make.weight(spec.D, spec.F),
        )
        for _ in range(spec.L)
    ]
    angles = np.arange(spec.C)[:, None] * 1e6 ** (-np.arange(64) / 64)
    rope = jnp.asarray(np.stack([np.cos(angles), np.sin(angles)], -1), jnp.float32)
    head = make.weight(spec.codes, spec.D, size=3.0)
    weights = fast_weights(layers, make.normal(spec.codes, spec.D), make.norm(spec.D), head, rope, EPS)
    draws = reference.Draws(
        jnp.full(spec.B, 0.8),
        jnp.full(spec.B, 0.8),
        jnp.asarray(np.resize([30, 1, 64], spec.B), jnp.int32),
        jax.random.gumbel(make.key, (spec.C - 1, spec.B, spec.codes)),
    )
    hidden = make.normal(spec.B, spec.D).astype(jnp.bfloat16)
    semantic = jnp.asarray(np.random.default_rng().integers(0, spec.codes, spec.B), jnp.int32)
    return hidden, semantic, weights, draws


@pytest.mark.parametrize(
    "spec", (*FRAMES, dataclasses.replace(FRAMES[0], name="one_layer", B=8, L=1)), ids=lambda s: s.name
)
def test_fast_frame(spec):
    hidden, semantic, weights, draws = frame_operands(spec)
    run = jax.jit(frame.fast_frame)
    codes, logits = run(hidden, semantic, weights, draws)
    # Position 1 has the same codes before it; later ones only as long as all draws agreed. An e4m3 value on the other
    # side of a boundary moves others after it, so the reference is no measure finer than its own answer to a nudge of
    # its inputs. Of 16 slots and more: for one token XLA may leave the rounding to e4m3 out.
    rows = np.resize(np.arange(spec.B), max(spec.B, 16))
    two = dataclasses.replace(weights, rope_C2h=weights.rope_C2h[:2])
    one_draw = reference.Draws(
        *(part[rows] for part in vars(draws).values() if part.ndim == 1), draws.gumbel_CBN[:1, rows]
    )

    @jax.jit
    def plain(size):
        def nudged(x, seed):
            return x * (1 + size * jax.random.normal(jax.random.key(seed), x.shape))

        given = nudged(hidden.astype(jnp.float32)[rows], 1), semantic[rows]
        embeddings = nudged(two.embeddings_ND.astype(jnp.float32), 2)
        return reference.fast_frame(*given, dataclasses.replace(two, embeddings_ND=embeddings), one_draw)[1][
            0, : spec.B
        ]

    wanted, nudged = plain(0.0), plain(1e-3)
    assert rel_err(logits[0], wanted) <= 1.5 * rel_err(nudged, wanted) < 0.15
    for position in range(1, spec.C):
        np.testing.assert_array_equal(codes[:, position], reference.draw(logits[position - 1], draws, position))
    assert len(np.unique(np.asarray(codes))) > spec.C // 2
    for _ in range(20):
        again, again_logits = run(hidden, semantic, weights, draws)
        np.testing.assert_array_equal(again, codes)
        np.testing.assert_array_equal(again_logits, logits)
    if spec.B > 1:
        poisoned = hidden.at[1:].set(jnp.nan)
        np.testing.assert_array_equal(run(poisoned, semantic, weights, draws)[0][0], codes[0])
