"""A quantised operand without a scale for every block is refused by every op: a kernel would read past the end."""

import dataclasses

import jax.numpy as jnp
import pytest

import pallas_kernels as pk

X = jnp.ones((2, 256), jnp.bfloat16)
BLOCKS, MX = pk.quantize_blocks(jnp.ones((256, 256)), (128, 128)), pk.quantize_mx(jnp.ones((256, 256)))
CACHE = pk.quantize_kv(jnp.ones((2, 1, 64, 64), jnp.bfloat16))
ROW, AT = jnp.ones((2, 1, 64), jnp.bfloat16), jnp.ones(2, jnp.int32)
CALLS = {
    "block_scaled_matmul": (BLOCKS, lambda w: pk.block_scaled_matmul(X, w)),
    "x of block_scaled_matmul": (pk.quantize_blocks(X), lambda x: pk.block_scaled_matmul(x, BLOCKS)),
    "mx_matmul": (MX, lambda w: pk.mx_matmul(X, w)),
    "x of mx_matmul": (pk.quantize_mx(X), lambda x: pk.mx_matmul(x, MX)),
    "swiglu_mlp": (BLOCKS, lambda w: pk.swiglu_mlp(X, pk.quantize_blocks(jnp.ones((512, 256)), (128, 128)), w)),
    "between_attentions": (
        BLOCKS,
        lambda w: pk.between_attentions(jnp.ones((256, 2)), None, None, pk.After(jnp.ones(256), w), eps=1e-6),
    ),
    "decode_attention": (CACHE, lambda cache: pk.decode_attention(ROW, cache, CACHE, AT)),
    "append_kv": (CACHE, lambda cache: pk.append_kv(ROW, ROW, cache, CACHE, AT)),
}


def scale_of(operand):
    return next(field.name for field in dataclasses.fields(operand) if field.name.startswith("scale"))


@pytest.mark.parametrize("op", CALLS)
def test_too_few_scales_or_of_another_type_are_refused(op):
    whole, call = CALLS[op]
    call(whole)
    name = scale_of(whole)
    scale = getattr(whole, name)
    for wrong in (scale[..., :-1], scale.astype(jnp.float16), scale[..., None]):
        with pytest.raises(ValueError, match=r"a scale for every block, got values float8_e4m3fn|one scale per"):
            call(dataclasses.replace(whole, **{name: wrong}))


@pytest.mark.parametrize("capability", ["9.0", "10.0"])
def test_prepared_weights_fit(capability):
    for op, whole in (("block_scaled_matmul", BLOCKS), ("mx_matmul", MX)):
        prepared = pk.prepare_weights(whole, op, capability)
        assert prepared.misfit() is None
        name = scale_of(prepared)
        assert dataclasses.replace(prepared, **{name: getattr(prepared, name)[1:]}).misfit()


@pytest.mark.parametrize("shape", [(2, 0, 64, 64), (2, 1, 0, 64), (2, 1, 64, 0)])
def test_attention_over_nothing_is_refused(shape):
    cache = jnp.ones(shape, jnp.bfloat16)
    with pytest.raises(ValueError, match="must have heads, positions and a width"):
        pk.decode_attention(jnp.ones((2, 1, shape[3]), jnp.bfloat16), cache, cache, AT)
