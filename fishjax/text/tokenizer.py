"""Token ids of a model: text in, ids out, and the ids that the prompt and the sampler need by name.

Place in the flow: text -> *tokenizer* -> prompt -> prefill. Knows no models and no requests.

What a caller writes is data, never control: `encode` turns `<|im_end|>` inside a text into the bytes of those
characters. Only the prompt's own scaffolding (and reference mode) is encoded with `allow_special=True`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from fishjax.errors import WeightsError

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"

_SEMANTIC = re.compile(r"<\|semantic:(\d+)\|>")


class Tokenizer:
    """A Hugging Face `tokenizer.json` with semantic tokens. Immutable after loading, so any thread may call it.

    `encode_special_tokens` is a setting of a tokenizer object, not of a call. So two objects are kept, and the
    one for callers' texts has every added token marked special: not one of them can be written.
    """

    def __init__(self, serialized: str, *, source: str = "tokenizer.json"):
        """From the text of a `tokenizer.json`; `source` names it in errors. Raises WeightsError."""
        self._source = source
        self._special = _build(serialized, source)
        self._plain = _build(_all_added_special(serialized, source), source)
        self._plain.encode_special_tokens = True
        self._ids = self._special.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._ids.values(), default=-1) + 1
        self.im_end_id = self.token_id(IM_END)
        self.semantic_begin_id, self.semantic_end_id = self._semantic_range()

    @classmethod
    def from_file(cls, path: Path | str) -> Tokenizer:
        """Load a `tokenizer.json`. Raises WeightsError when it is unreadable or lacks the tokens of speech."""
        try:
            serialized = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise WeightsError(f"cannot read the tokenizer {path}: {error}") from error
        return cls(serialized, source=str(path))

    @property
    def num_semantic(self) -> int:
        """How many semantic tokens there are: the size of the semantic codebook."""
        return self.semantic_end_id - self.semantic_begin_id + 1

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of `text`, without begin or end tokens; special tokens in it count only with `allow_special`."""
        chosen = self._special if allow_special else self._plain
        return chosen.encode(_well_formed(text), add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens written out."""
        return self._special.decode(list(ids), skip_special_tokens=False)

    def token_id(self, name: str) -> int:
        """Id of a token by its exact name, such as `<|voice|>`. Raises WeightsError when there is none."""
        if name not in self._ids:
            raise WeightsError(f"{self._source} has no token '{name}': it is not the tokenizer of a speech model")
        return self._ids[name]

    def _semantic_range(self) -> tuple[int, int]:
        found = {int(match[1]): id_ for name, id_ in self._ids.items() if (match := _SEMANTIC.fullmatch(name))}
        if not found:
            raise WeightsError(f"{self._source} has no semantic tokens (<|semantic:0|> and on)")
        begin = min(found.values())
        for code in range(len(found)):
            if found.get(code) != begin + code:
                raise WeightsError(
                    f"the semantic tokens of {self._source} are not in one row: <|semantic:{code}|> should have "
                    f"id {begin + code} and has {found.get(code, 'none')}"
                )
        return begin, begin + len(found) - 1


def _build(serialized: str, source: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(serialized)
    except Exception as error:  # the package raises bare Exception for every fault of a file
        raise WeightsError(f"{source} is not a tokenizer.json: {error}") from error


def _all_added_special(serialized: str, source: str) -> str:
    """The same tokenizer with every added token special: some (`<think>`) are published as plain ones."""
    parsed = json.loads(serialized)
    for token in parsed.get("added_tokens") or ():
        if not isinstance(token, dict):
            raise WeightsError(f"{source} is not a tokenizer.json: its added tokens are not objects")
        token["special"] = True
    return json.dumps(parsed)


def _well_formed(text: str) -> str:
    """Lone surrogates (from a broken JSON escape) have no UTF-8: they become U+FFFD."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
