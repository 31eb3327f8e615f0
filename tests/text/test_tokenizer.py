import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fishjax.errors import WeightsError
from fishjax.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "prompt_format" / "tokenizer.json"
CASES = json.loads((GOLDEN.parent / "cases.json").read_text(encoding="utf-8"))


def changed(change) -> str:
    parsed = json.loads(GOLDEN.read_text(encoding="utf-8"))
    change(parsed)
    return json.dumps(parsed)


def without(*names: str) -> str:
    return changed(lambda t: t.update(added_tokens=[a for a in t["added_tokens"] if a["content"] not in names]))


@pytest.mark.parametrize("case", CASES["encode"], ids=lambda case: case["text"][:20])
def test_golden_ids_in_reference_mode(tokenizer, case):
    assert tokenizer.encode(case["text"], allow_special=True) == case["ids"]


def test_ids_by_name(tokenizer):
    assert {name: tokenizer.token_id(name) for name in CASES["special_ids"]} == CASES["special_ids"]
    assert (tokenizer.semantic_begin_id, tokenizer.semantic_end_id, tokenizer.num_semantic) == (432, 495, 64)
    assert (tokenizer.im_end_id, tokenizer.vocab_size) == (422, 496)


def test_special_tokens_in_a_text_count_in_reference_mode_only(tokenizer):
    text = "abc<|im_end|>def<|voice|><|semantic:3|>"
    assert [i for i in tokenizer.encode(text, allow_special=True) if i >= 420] == [422, 427, 435]
    assert all(i < 420 for i in tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(tokenizer.encode(text, allow_special=True)) == text


def test_an_added_token_that_is_not_marked_special_cannot_be_written_either():
    def demote(parsed):
        for token in parsed["added_tokens"]:
            token["special"] = False

    tokenizer = Tokenizer(changed(demote))
    assert all(i < 420 for i in tokenizer.encode("<|im_end|><|semantic:3|>"))
    assert tokenizer.encode("<|im_end|>", allow_special=True) == [422]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_and_makes_no_special_token(text):
    tokenizer = Tokenizer.from_file(GOLDEN)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < 420 for i in ids)


def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud83d b\ud83d\ude00")) == "a\ufffd b\U0001f600"


def test_threads_do_not_disturb_each_other(tokenizer):
    wrong = []

    def work(allow: bool):
        wanted = [422] if allow else tokenizer.encode("<|im_end|>")
        wrong.extend(1 for _ in range(300) if tokenizer.encode("<|im_end|>", allow_special=allow) != wanted)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("serialized", "says"),
    [
        ("not json", "is not a tokenizer.json"),
        ("[]", "is not a tokenizer.json"),
        ('{"model": {"type": "nothing"}}', "is not a tokenizer.json"),
        (without("<|im_end|>"), "'<|im_end|>'"),
        (without(*(f"<|semantic:{i}|>" for i in range(64))), "no semantic tokens"),
        (without("<|semantic:7|>"), "<|semantic:7|> should have id 439"),
        (without("<|semantic:0|>"), "<|semantic:0|>"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path, serialized, says):
    path = tmp_path / "tokenizer.json"
    path.write_text(serialized, encoding="utf-8")
    with pytest.raises(WeightsError, match=r"tokenizer\.json") as error:
        Tokenizer.from_file(path)
    assert says in str(error.value)


def test_an_unreadable_file_is_a_weights_error(tmp_path):
    with pytest.raises(WeightsError, match="cannot read the tokenizer"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WeightsError, match="cannot read the tokenizer"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


def test_an_unknown_name_is_an_error(tokenizer):
    with pytest.raises(WeightsError, match=r"<\|audio\|>"):
        tokenizer.token_id("<|audio|>")
