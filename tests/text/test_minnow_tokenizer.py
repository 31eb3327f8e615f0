"""The byte tokenizer of the small voice: ids are part of its weights, so they may never move."""

import json
import runpy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fishjax.text.prompt import Prompter
from fishjax.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
PATH = ROOT / "fishjax" / "minnow" / "tokenizer.json"
MINNOW = Tokenizer.from_file(PATH)
CONTROL = (
    "endoftext im_start im_end pad phoneme_start phoneme_end text voice interleave audio_start audio_end audio_pad"
)


def test_the_file_is_what_its_maker_writes():
    made = runpy.run_path(str(ROOT / "tools" / "minnow" / "make_tokenizer.py"))
    assert json.loads(made["make_tokenizer"]().to_str()) == json.loads(PATH.read_text(encoding="utf-8"))
    assert (made["NUM_IDS"], made["PADDED_VOCAB_SIZE"]) == (MINNOW.vocab_size, 832)


def test_ids_stay():
    assert [MINNOW.token_id(f"<|{name}|>") for name in CONTROL.split()] == list(range(256, 268))
    assert (MINNOW.semantic_begin_id, MINNOW.semantic_end_id, MINNOW.vocab_size) == (268, 779, 780)
    assert MINNOW.encode("a z.\n ~") == [64, 220, 89, 13, 198, 220, 93]
    assert MINNOW.encode("é") == [127, 102]


def test_case_is_one_and_special_tokens_are_not_lowered():
    assert MINNOW.encode("OPEN the Gate, ÀÉÎ Привет") == MINNOW.encode("open the gate, àéî привет")
    assert MINNOW.encode("A<|IM_END|><|im_end|>", allow_special=True)[-1] == 258
    assert max(MINNOW.encode("<|im_end|><|semantic:3|>")) < 256


@pytest.mark.parametrize(
    "text", ["hello", "今天天气很好", "こんにちは", "مرحبا", "नमस्ते", "สวัสดี", "👨‍👩‍👧 🇫🇷", "e\u0301", "\x00\x7f"]
)
def test_every_script_is_its_bytes(text):
    assert MINNOW.decode(MINNOW.encode(text)) == text
    assert len(MINNOW.encode(text)) == len(text.encode("utf-8"))


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_bytes(text):
    ids = MINNOW.encode(text)
    assert all(0 <= i < 256 for i in ids)
    assert MINNOW.decode(ids) == MINNOW.decode(MINNOW.encode(MINNOW.decode(ids)))


@pytest.mark.parametrize("layout", ["chat", "interleave"])
def test_it_serves_both_layouts(layout):
    row = Prompter(MINNOW, 10, layout).prompt([], [], "Now.")[0]
    assert row.max() < 268
    assert "now." in MINNOW.decode(row.tolist())
