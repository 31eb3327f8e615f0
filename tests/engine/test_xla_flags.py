"""What processes that run an engine tell XLA: seen in child processes, before JAX starts."""

import os
import subprocess
import sys

import pytest

FLAG = "--xla_gpu_command_buffer_update_mode=SKIP_TEMP"

ALONE = """
import os, sys
from fishjax.engine.xla_flags import set_xla_flags

set_xla_flags()
assert "jax" not in sys.modules
print(os.environ.get("XLA_FLAGS", ""))
"""

COMMAND = """
import importlib, os, sys
import fishjax.engine.compile_cache
from jax._src import xla_bridge

def stop(*_, **__):
    assert not xla_bridge.backends_are_initialized()
    print(os.environ.get("XLA_FLAGS", ""), file=sys.stderr)
    os._exit(0)

module = importlib.import_module(sys.argv.pop(1))
fishjax.engine.compile_cache.keep_compiled = module.serve = stop  # the first dealings with JAX; `serve` of a worker
module.main()
"""


def installed(folder, name, version, entry_points=""):
    """A package as pip leaves it, without its files."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.fixture
def last_line(tmp_path):
    """The last line that a program prints on a machine with some jaxlib and its CUDA plugin: the XLA_FLAGS."""

    def of(program, *arguments, jaxlib="0.11.2", own=""):
        installed(tmp_path, "jaxlib", jaxlib)
        installed(tmp_path, "some_plugin", jaxlib, "[jax_plugins]\nxla_cuda13 = jax_plugins.xla_cuda13\n")
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "XLA_FLAGS": own}
        command = [sys.executable, "-c", program, *arguments]
        child = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert child.returncode == 0, child.stderr
        return (child.stdout + child.stderr).splitlines()[-1]

    return of


@pytest.mark.parametrize(
    "command",
    [
        ("serving.__main__",),
        ("fishjax.__main__", "serve"),
        ("fishjax.__main__", "say", "hello"),
        ("fishjax.bench.worker", "step", os.devnull),
    ],
    ids=" ".join,
)
def test_who_runs_an_engine_on_a_gpu_sets_the_flag(last_line, command):
    assert last_line(COMMAND, *command) == FLAG


def test_other_flags_stay(last_line):
    assert last_line(ALONE, own="--xla_gpu_autotune_level=0") == f"--xla_gpu_autotune_level=0 {FLAG}"


def test_what_the_user_said_of_it_counts(last_line):
    own = "--xla_gpu_command_buffer_update_mode=ALWAYS_UPDATE"
    assert last_line(ALONE, own=own) == own


def test_an_xla_that_would_not_know_it_is_not_told(last_line):
    assert last_line(ALONE, jaxlib="0.10.2") == ""


def test_a_machine_without_a_cuda_plugin_is_left_alone(last_line):
    without = "import importlib.metadata\nimportlib.metadata.entry_points = lambda group: []\n"
    assert last_line(without + ALONE) == ""
