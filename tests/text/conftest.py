from pathlib import Path

import pytest

from fishjax.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "prompt_format"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(GOLDEN / "tokenizer.json")
