"""What fuzzing found is replayed: each input ends as it did, and new ones end well. See tools/fuzz.py."""

import importlib.util
import json
import random
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("error")  # and a traceback that C code swallows
PATH = Path(__file__).parents[2] / "tools" / "fuzz.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("fuzz", PATH)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("target", "least"), [("requests", 25), ("clips", 30)])
def test_every_input_of_the_corpus_ends_as_it_did(tool, target, least):
    folder = tool.CORPUS / target
    outcomes = json.loads((folder / tool.OUTCOMES).read_text())
    assert {path.name for path in folder.glob("*.bin")} == set(outcomes) and len(outcomes) >= least
    for name, wanted in outcomes.items():
        began_s = time.monotonic()
        assert tool.TARGETS[target]((folder / name).read_bytes()) == wanted, name
        assert time.monotonic() - began_s < 10.0, name  # a hang: milliseconds are usual


@pytest.mark.parametrize("target", ["requests", "clips"])
def test_changed_inputs_are_taken_or_refused_with_a_sentence(tool, target):
    inputs, rng = tool.known(target), random.Random(1)
    ends = set()
    for _ in range(1500):
        ends.update(tool.TARGETS[target](tool.change(rng.choice(inputs), inputs, rng)))
    assert len(ends) > 5
    assert not [end for end in ends if "<" in end or "Error" in end or ".py" in end]
