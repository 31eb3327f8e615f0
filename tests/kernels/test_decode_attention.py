"""decode_attention: the reference against float64, over lengths, head ratios, cache kinds."""

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels._testing import TOLERANCES, attention_oracle, rel_err
from pallas_kernels.types import ScaledKV

S = 40
LENGTHS = [0, 1, 15, 16, 17, S]


def make(rng, H, G, d, kind):
    q = rng.standard_normal((len(LENGTHS), H, d)) * 2
    k, v = (rng.standard_normal((len(LENGTHS), G, S, d)) * 2.0 ** rng.uniform(-3, 3, (1, 1, S, 1)) for _ in range(2))
    if kind == "fp8":
        k, v = (pk.quantize_kv(jnp.asarray(c, jnp.float32)) for c in (k, v))
        return jnp.asarray(q, jnp.bfloat16), k, v
    return tuple(jnp.asarray(a, kind) for a in (q, k, v))


def f64(c):
    if isinstance(c, ScaledKV):
        return np.asarray(c.values_BGSd).astype(np.float64) * np.asarray(c.scale_BGS).astype(np.float64)[..., None]
    return np.asarray(c).astype(np.float64)


@pytest.mark.parametrize(("H", "G", "d"), [(4, 4, 64), (8, 2, 128), (6, 2, 64), (5, 1, 32)])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8"])
def test_equals_float64_at_every_length(H, G, d, kind):
    q, k, v = make(np.random.default_rng(H + d), H, G, d, kind)
    o = np.asarray(pk.decode_attention(q, k, v, jnp.asarray(LENGTHS), backend="reference"))
    ref = attention_oracle(*map(f64, (q, k, v)), LENGTHS)
    assert not o[0].astype(np.float32).any()
    for b in range(1, len(LENGTHS)):
        assert rel_err(o[b], ref[b]) <= TOLERANCES["decode_attention", jnp.dtype(q.dtype).name].bound


def test_what_lies_past_the_length_is_never_seen():
    q, k, v = make(np.random.default_rng(0), 4, 2, 64, "float32")
    dead = (jnp.arange(S) >= jnp.asarray(LENGTHS)[:, None])[:, None, :, None]
    poisoned = [jnp.where(dead, jnp.nan, c) for c in (k, v)]
    lengths = jnp.asarray(LENGTHS)
    np.testing.assert_array_equal(
        np.asarray(pk.decode_attention(q, k, v, lengths)), np.asarray(pk.decode_attention(q, *poisoned, lengths))
    )


def test_slots_do_not_depend_on_their_neighbours():
    rng = np.random.default_rng(1)
    (q, k, v), (q2, k2, v2) = make(rng, 8, 2, 64, "float32"), make(rng, 8, 2, 64, "float32")
    mine = (jnp.arange(len(LENGTHS)) == 4)[:, None, None]
    mixed = jnp.where(mine, q, q2), jnp.where(mine[..., None], k, k2), jnp.where(mine[..., None], v, v2)
    a = pk.decode_attention(q, k, v, jnp.asarray(LENGTHS))
    b = pk.decode_attention(*mixed, jnp.asarray([3, 40, 0, 9, 17, 1]))
    np.testing.assert_array_equal(np.asarray(a)[4], np.asarray(b)[4])


def test_lengths_above_the_cache_count_as_all_of_it_and_huge_logits_do_not_overflow():
    q, k, v = make(np.random.default_rng(2), 4, 2, 64, "float32")
    full = pk.decode_attention(q * 1e4, k, v, jnp.full(6, S))
    over = pk.decode_attention(q * 1e4, k, v, jnp.full(6, S + 7))
    assert np.isfinite(np.asarray(full)).all()
    np.testing.assert_array_equal(np.asarray(full), np.asarray(over))


def test_scale_is_a_factor_on_the_logits():
    q, k, v = make(np.random.default_rng(3), 4, 2, 64, "float32")
    o = pk.decode_attention(q, k, v, jnp.asarray(LENGTHS), scale=0.3)
    assert rel_err(o, attention_oracle(*map(f64, (q, k, v)), LENGTHS, scale=0.3)) < 1e-5


def test_refuses_what_does_not_fit():
    q, k, v = make(np.random.default_rng(4), 4, 2, 64, "float32")
    lengths = jnp.asarray(LENGTHS)
    with pytest.raises(ValueError, match="H a multiple of G"):
        pk.decode_attention(q[:, :3], k, v, lengths)
    with pytest.raises(ValueError, match=r"lengths must be \(6,\)"):
        pk.decode_attention(q, k, v, lengths[:2])
    with pytest.raises(ValueError, match="one kind"):
        pk.decode_attention(q, pk.quantize_kv(k), v, lengths)
    with pytest.raises(ValueError, match="are not"):
        pk.decode_attention(q, k, v[:, :, :3], lengths)
