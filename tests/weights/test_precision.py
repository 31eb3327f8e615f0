from __future__ import annotations

import itertools

import jax.numpy as jnp
import pytest

from fishjax.errors import InvalidRequest
from fishjax.weights.precision import ALLOWED, Precision

BF16, FP32 = Precision.default("gpu"), Precision.default("cpu")


def test_defaults_follow_the_platform():
    assert str(FP32) == "slow=fp32,fast=fp32,head=fp32,kv=fp32,codec=fp32"
    assert str(BF16) == "slow=bf16,fast=bf16,head=bf16,kv=bf16,codec=bf16"
    assert Precision.default() == FP32  # tests run on a CPU


def test_every_policy_survives_text():
    for words in itertools.product(*ALLOWED.values()):
        policy = Precision(**dict(zip(ALLOWED, words, strict=True)))
        assert Precision.parse(str(policy)) == policy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fp8", "slow=fp8,fast=fp8,head=fp8,kv=bf16,codec=fp32"),
        ("fp32", "slow=fp32,fast=fp32,head=fp32,kv=fp32,codec=fp32"),
        (" BF16 ", "slow=bf16,fast=bf16,head=bf16,kv=bf16,codec=fp32"),
        ("slow=fp8, fast=bf16", "slow=fp8,fast=bf16,head=fp32,kv=bf16,codec=fp32"),
        ("kv=fp8", "slow=fp32,fast=fp32,head=fp32,kv=fp8,codec=fp32"),
        ("slow=mxfp8,kv=fp8,codec=bf16", "slow=mxfp8,fast=fp32,head=fp32,kv=fp8,codec=bf16"),
    ],
)
def test_what_is_not_named_keeps_the_base(text, expected):
    assert str(Precision.parse(text, FP32)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "slow=bf16,fast=bf16,head=bf16,kv=bf16,codec=bf16"),
        ("slow=fp8", "slow=fp8,fast=bf16,head=bf16,kv=bf16,codec=bf16"),
        ("slow=fp32,codec=fp32", "slow=fp32,fast=bf16,head=bf16,kv=fp32,codec=fp32"),
    ],
)
def test_a_checkpoint_does_not_depend_on_the_machine_that_made_it(monkeypatch, text, expected):
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr("jax.default_backend", lambda platform=platform: platform)
        assert str(Precision.for_checkpoint(text)) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fp4", "'fp4' does not exist"),
        ("", "does not exist"),
        ("slow=fp4", "slow=fp4 does not exist: slow takes one of fp32, bf16, fp8, mxfp8"),
        ("kv=mxfp8", "kv takes one of fp32, bf16, fp8"),
        ("codec=fp8", "codec takes one of fp32, bf16"),
        ("mid=fp8", "the modules are slow, fast, head, kv, codec"),
        ("slow=fp8,fast", "cannot be read at 'fast'"),
        ("slow=fp8,", "cannot be read at ''"),
        ("slow=fp8,slow=bf16", "names slow twice"),
    ],
)
def test_what_cannot_be_is_one_sentence(text, says):
    with pytest.raises(InvalidRequest, match=says) as error:
        Precision.parse(text)
    assert "\n" not in str(error.value)


def test_types_for_the_engine():
    policy = Precision.parse("kv=fp8,codec=bf16")
    assert policy.kv_dtype == jnp.float8_e4m3fn and policy.codec_dtype == jnp.bfloat16
    assert BF16.kv_dtype == jnp.bfloat16 and FP32.kv_dtype == jnp.float32
