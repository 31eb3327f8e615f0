"""Programs that are compiled before anybody needs them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fishjax.engine.ahead import compile_ahead


def add(w, x):
    return x + w


def test_programs_compile_once_and_nothing_runs(compiles):
    bound = partial(jax.jit(add, donate_argnums=(1,)), jnp.ones(3))
    examples = {f"{n} rows": jnp.zeros((n, 3)) for n in (2, 3, 4)}
    said, before = [], compiles.count
    compile_ahead([(name, bound, (x,)) for name, x in examples.items()], said.append)
    assert compiles.count == before + 3
    assert sorted(said) == [f"compiled: {name}" for name in sorted(examples)]
    results = [bound(x) for x in examples.values()]  # no argument was donated: nothing had run
    assert compiles.count == before + 3
    assert all((np.asarray(result) == 1).all() for result in results)


def test_a_program_that_cannot_be_says_so():
    bound = partial(jax.jit(add), jnp.ones(3))
    with pytest.raises(TypeError, match="incompatible shapes"):
        compile_ahead([("a sum", bound, (jnp.zeros(2),))], lambda _: None)
