"""examples/own_kernel.py: its reference is exact, its kernel lowers everywhere and is exact where it is interpreted."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels._dispatch import gpu_capability
from pallas_kernels._testing import gpu_interpreter

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "own_kernel.py"
BOUND = 1e-3  # a value in a million on the other edge of an FP8 step


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture
def x():
    spread = 2.0 ** jax.random.uniform(jax.random.key(1), (128, 1), minval=-6, maxval=6)
    return spread * jax.random.normal(jax.random.key(0), (128, 640))


def test_the_reference_is_exact(example, x):
    assert example["check"](example["reference"], x) <= BOUND


@pytest.mark.skipif(gpu_interpreter() is None, reason="the GPU interpreter runs this from jax 0.11 on")
def test_the_kernel_is_exact_in_the_interpreter(example, x):
    assert example["check"](lambda x: example["kernel"](x, gpu_interpreter()), x) <= BOUND


@pytest.mark.gpu
@pytest.mark.skipif(gpu_capability() != "9.0", reason="needs a GPU of compute capability 9.0")
def test_the_kernel_is_exact_on_the_device(example, x):
    assert example["check"](example["kernel"], x) <= BOUND
    assert example["bench"](example["kernel"], x) > 0


def test_the_check_sees_scales_of_the_wrong_rows(example, x):
    def wrong(x):
        values, scale = example["reference"](x)
        return values, jnp.roll(scale, 1, axis=1)

    assert example["check"](wrong, x) > 10 * BOUND


def test_it_says_what_it_did():
    process = subprocess.run([sys.executable, EXAMPLE], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert process.returncode == 0, process.stderr
    first, second = process.stdout.splitlines()
    assert first.startswith("lowers for CUDA; reference: error ")
    if gpu_capability() == "9.0":
        assert second.startswith("kernel runs: error ")
    elif gpu_interpreter():
        assert second.startswith("kernel interpreted, not timed: error ")
    else:
        assert second.startswith("kernel not run: ") and "needs a GPU of compute capability 9.0" in second
