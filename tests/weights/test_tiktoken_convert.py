# ruff: noqa: RUF001 (texts in many scripts)
import base64
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HfTokenizer

from fishjax.errors import WeightsError
from fishjax.text.tokenizer import Tokenizer
from fishjax.weights.tiktoken_convert import S1_WORDS, convert_tiktoken, write_tokenizer_json

TEXT = (
    "The quick brown fox jumps over the lazy dog, doesn't it? We've seen 42 foxes... 'Twas odd; she's here!\n\n"
    "今天天气很好，我们去公园散步吧。 今天天气 مرحبا بالعالم، هذا 😀"
    " [laugh] <|speaker:0|> aaaaaaaa   spaces  ?!x \t\r\n end  "
)


def train_ranks(num_merges: int, seed: int = 0) -> dict[bytes, int]:
    """A small rank table: bytes in a shuffled order, then the commonest pairs of TEXT, as byte pairs are trained."""
    order = list(range(256))
    random.Random(seed).shuffle(order)
    ranks = {bytes([byte]): i for i, byte in enumerate(order)}
    words = [[bytes([b]) for b in word.encode()] for word in regex.findall(S1_WORDS, TEXT)]
    for _ in range(num_merges):
        counts: dict[bytes, int] = {}
        for word in words:
            for a, b in pairwise(word):
                counts[a + b] = counts.get(a + b, 0) + 1
        pairs = [pair for pair in counts if pair not in ranks]
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (counts[pair], pair))
        ranks[best] = len(ranks)
        words = [merged(word, best) for word in words]
    return ranks


def merged(word: list[bytes], pair: bytes) -> list[bytes]:
    result: list[bytes] = []
    for part in word:
        if result and result[-1] + part == pair:
            result[-1] = pair
        else:
            result.append(part)
    return result


def oracle(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Byte pairs by ranks, written out: in each word, join the neighbours whose union ranks lowest, leftmost first."""
    ids = []
    for word in regex.findall(S1_WORDS, text):
        whole = word.encode("utf-8")
        parts = [whole] if whole in ranks else [bytes([byte]) for byte in whole]
        while True:
            unions = [ranks.get(a + b) for a, b in pairwise(parts)]
            best = min((rank for rank in unions if rank is not None), default=None)
            if best is None:
                break
            at = unions.index(best)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids.extend(ranks[part] for part in parts)
    return ids


def specials(first: int) -> dict[str, int]:
    names = ["<|begin_of_text|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|voice|>", "<|interleave|>"]
    return {name: first + i for i, name in enumerate([*names, *(f"<|semantic:{i}|>" for i in range(8))])}


def write(folder: Path, ranks: dict[bytes, int], special: dict[str, int], extra: str = "") -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (folder / "tokenizer.tiktoken").write_text("\n".join(lines) + "\n" + extra, encoding="ascii")
    (folder / "special_tokens.json").write_text(json.dumps(special), encoding="utf-8")
    return folder


def convert(folder: Path) -> Tokenizer:
    write_tokenizer_json(folder, folder / "tokenizer.json")
    return Tokenizer.from_file(folder / "tokenizer.json")


RANKS = train_ranks(120)


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Tokenizer:
    return convert(write(tmp_path_factory.mktemp("s1"), RANKS, specials(len(RANKS))))


def test_trained_text_is_encoded_by_rank(converted):
    ids = converted.encode(TEXT)
    assert ids == oracle(TEXT, RANKS)
    assert max(ids) > 256 and len(ids) < len(TEXT.encode()) * 0.9  # merges happened
    assert converted.decode(ids) == TEXT


@settings(max_examples=200)
@given(st.text(st.one_of(st.sampled_from(TEXT), st.characters(exclude_categories=["Cs"])), max_size=60))
def test_any_text_is_encoded_by_rank(converted, text):
    assert converted.encode(text) == oracle(text, RANKS)


def test_special_tokens_keep_their_ids(converted):
    assert {name: converted.token_id(name) for name in specials(len(RANKS))} == specials(len(RANKS))
    assert converted.encode("a<|im_end|>", allow_special=True)[-1] == len(RANKS) + 3
    assert converted.encode("a<|im_end|>") == oracle("a<|im_end|>", RANKS)
    assert converted.num_semantic == 8


def test_tiktoken_agrees(converted):
    tiktoken = pytest.importorskip("tiktoken")
    encoding = tiktoken.Encoding(
        "s1", pat_str=S1_WORDS, mergeable_ranks=RANKS, special_tokens=specials(len(RANKS)), explicit_n_vocab=None
    )
    for text in (TEXT, *TEXT.split(" "), "we'll DON'T 3.14 ,,, \n\n x", "  ?!x"):
        assert converted.encode(text) == encoding.encode(text, disallowed_special=())
    text = "<|im_start|>user\nHello<|im_end|>"
    assert converted.encode(text, allow_special=True) == encoding.encode(text, allowed_special="all")


def test_holes_in_the_ranks_and_the_empty_filler_keep_later_ids(tmp_path):
    ranks = {token: rank + (rank >= 300) for token, rank in RANKS.items()}  # nothing has rank 300
    tokenizer = convert(write(tmp_path, ranks, specials(len(ranks) + 1), extra="= 300\n"))
    assert tokenizer.encode(TEXT) == oracle(TEXT, ranks)
    assert tokenizer.token_id("<|begin_of_text|>") == len(ranks) + 1


def test_a_whole_word_token_without_merges_is_found(tmp_path):
    ranks = {**RANKS, b" zqxj": len(RANKS)}
    tokenizer = convert(write(tmp_path, ranks, specials(len(ranks))))
    assert tokenizer.encode("a zqxj")[-1] == len(RANKS)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda f: (f / "special_tokens.json").unlink(), "special_tokens.json to make one from is not there"),
        (lambda f: (f / "tokenizer.tiktoken").write_text("YQ== x\n"), "line 1 of"),
        (lambda f: (f / "tokenizer.tiktoken").write_text("Y*== 1\n"), "line 1 of"),
        (lambda f: (f / "tokenizer.tiktoken").write_text("YQ== 1\nYQ== 2\n"), "line 2 of"),
        (lambda f: (f / "tokenizer.tiktoken").write_text("YQ== 1\nYg== 1\n"), "same rank twice"),
        (lambda f: (f / "tokenizer.tiktoken").write_text(""), "no ranks"),
        (lambda f: (f / "tokenizer.tiktoken").write_text("YQ== 0\n"), "byte 0x00 is no token"),
        (lambda f: (f / "tokenizer.tiktoken").write_bytes(b"\xff"), "cannot read"),
        (lambda f: (f / "special_tokens.json").write_text("[]"), "JSON object"),
        (lambda f: (f / "special_tokens.json").write_text('{"<|a|>": "b"}'), "does not map token names to ids"),
        (lambda f: (f / "special_tokens.json").write_text('{"<|a|>": 99999}'), "next free id is"),
        (lambda f: (f / "special_tokens.json").write_text('{"<|a|>": 0}'), "next free id is"),
    ],
)
def test_what_cannot_be_converted_is_one_clear_error(tmp_path, break_it, says):
    folder = write(tmp_path, RANKS, specials(len(RANKS)))
    break_it(folder)
    with pytest.raises(WeightsError) as error:
        write_tokenizer_json(folder, folder / "tokenizer.json")
    assert says in str(error.value)
    assert not (folder / "tokenizer.json").exists()


def test_the_text_of_the_file_is_a_tokenizer(tmp_path):
    folder = write(tmp_path, RANKS, specials(len(RANKS)))
    serialized = convert_tiktoken(folder / "tokenizer.tiktoken", folder / "special_tokens.json")
    assert HfTokenizer.from_str(serialized).get_vocab_size() == len(RANKS) + 14
