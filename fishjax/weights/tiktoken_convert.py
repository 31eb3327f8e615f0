"""S1's `tokenizer.tiktoken` and `special_tokens.json` as one `tokenizer.json`.

    tokenizer.tiktoken    one token a line: base64 of its bytes, space, rank (= id)
    special_tokens.json   {"<|im_end|>": 151647, ...}: ids behind the last rank, without holes

A rank file states no merges, only which byte strings are tokens; while encoding, any two neighbours whose
concatenation is a token may merge, lowest rank first. So every split of a token into two tokens is written as a
merge, in the order of the ranks. A whole word that is a token is taken as it is (`ignore_merges`).
"""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from fishjax.config import read_json
from fishjax.errors import WeightsError

# How S1's tokenizer cuts a text into words. Unlike Qwen's, every punctuation mark is a word of its own, and a run of
# spaces keeps its last one. (The look-ahead for that is misspelt in the original: it asks for a literal "?!".)
S1_WORDS = (
    r"(?i:'(?:s|t|re|ve|m|ll|d))|\p{P}|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+\?!\S|\s+"
)


def convert_tiktoken(ranks_path: Path, special_tokens_path: Path, *, words: str = S1_WORDS) -> str:
    """The text of the `tokenizer.json`; `words` is the pattern that cuts a text into words.

    Raises WeightsError when a file is unreadable or the ids do not fit together.
    """
    ranks = _read_ranks(ranks_path)
    specials = _read_specials(special_tokens_path)
    byte_names = _byte_names()
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise WeightsError(f"{ranks_path} cannot spell every text: byte 0x{missing[0]:02x} is no token")

    def name(token: bytes) -> str:
        return "".join(byte_names[byte] for byte in token)

    first_special = max(ranks.values()) + 1
    vocab = {name(token): rank for token, rank in ranks.items()}
    for hole in set(range(first_special)) - set(ranks.values()):
        vocab[f"<|unused:{hole}|>"] = hole  # keeps the ids behind it in place
    merges = [
        (name(token[:cut]), name(token[cut:]))
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    ordered = sorted(specials, key=specials.__getitem__)
    for expected, special in enumerate(ordered, start=first_special):
        if specials[special] != expected:
            raise WeightsError(
                f"{special_tokens_path} does not continue {ranks_path}: '{special}' has id {specials[special]}, "
                f"and the next free id is {expected}"
            )
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
        split = pre_tokenizers.Split(Regex(words), behavior="isolated")
    except Exception as error:  # the package raises bare Exception
        raise WeightsError(f"{ranks_path} cannot be made a tokenizer.json: {error}") from error
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, normalized=False, special=True) for special in ordered])
    return tokenizer.to_str()


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WeightsError(f"cannot read {path}: {error}") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            if encoded == "=":  # an empty token: published files have one as a filler
                continue
            token, value = base64.b64decode(encoded, validate=True), int(rank)
        except (ValueError, binascii.Error) as error:
            raise WeightsError(f"line {number} of {path} is not 'base64 rank': {line[:80]!r}") from error
        if not token or token in ranks or value < 0:
            raise WeightsError(f"line {number} of {path} gives an empty, repeated or negative entry: {line[:80]!r}")
        ranks[token] = value
    if not ranks or len(set(ranks.values())) != len(ranks):
        raise WeightsError(f"{path} holds no ranks, or the same rank twice")
    return ranks


def _read_specials(path: Path) -> dict[str, int]:
    specials = read_json(path)
    if not specials or not all(type(id_) is int for id_ in specials.values()):
        raise WeightsError(f"{path} does not map token names to ids")
    return specials


def _byte_names() -> dict[int, str]:
    """The byte-level alphabet: printable Latin-1 bytes stand for themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    names = {byte: chr(byte) for byte in printable}
    return names | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def write_tokenizer_json(source: Path, out: Path) -> None:
    """Convert the pair in the folder `source` and write `out` (a `tokenizer.json`). Raises WeightsError."""
    pair = source / "tokenizer.tiktoken", source / "special_tokens.json"
    absent = [path.name for path in pair if not path.exists()]
    if absent:
        raise WeightsError(f"{source} has no tokenizer.json, and {' and '.join(absent)} to make one from is not there")
    serialized = json.loads(convert_tiktoken(*pair))
    out.write_text(json.dumps(serialized, ensure_ascii=False) + "\n", encoding="utf-8")
