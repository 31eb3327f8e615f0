"""A second process finds what the first one has compiled."""

import json
import subprocess
import sys
from pathlib import Path

from fishjax.engine.compile_cache import default_folder

PROGRAM = """
import json, sys
from pathlib import Path
import jax
from fishjax.engine.compile_cache import keep_compiled

keep_compiled(Path(sys.argv[1]))
counts = {"cache_hits": 0, "cache_misses": 0}

def count(event, **_):
    name = event.rpartition("/")[2]
    if name in counts:
        counts[name] += 1

jax.monitoring.register_event_listener(count)
from fishjax.engine.engine import Engine
from fishjax.weights.load import load_dual_ar
from fishjax.weights.load_codec import load_codec

golden = Path(sys.argv[2])
model, codec = load_dual_ar(golden / "dualar_tiny" / "s2_layout")[1], load_codec(golden / "codec_tiny")[1]
Engine(model, codec, im_end_id=422, num_slots=2, max_len=32, max_reference_s=0.5).warmup()
print(json.dumps(counts))
"""


def test_a_restart_compiles_nothing(tmp_path, golden):
    def start():
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "new" / "folder"), str(golden)]
        return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=200).stdout)

    first, second = start(), start()
    assert first["cache_misses"] > 10
    assert second == {"cache_hits": first["cache_hits"] + first["cache_misses"], "cache_misses": 0}


def test_where_it_is_kept(monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/a")
    assert default_folder() == Path("/a")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert default_folder() == Path("/b/fishjax/compiled")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_folder() == Path.home() / ".cache/fishjax/compiled"
