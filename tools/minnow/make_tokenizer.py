"""Write minnow's `tokenizer.json`: lower-cased UTF-8 bytes, then the special tokens of the S2 layout.

    python tools/minnow/make_tokenizer.py [OUT]        (default fishjax/minnow/tokenizer.json)

Ids: 0..255 bytes in the order of the byte-level alphabet sorted by code point (so the file is the same whoever
writes it), 256..267 control tokens, 268..779 the semantic tokens. 780 ids in all; a model pads its table to 832,
the next multiple of 64, and never uses the rest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

NUM_SEMANTIC = 512
CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
    "<|phoneme_start|>",
    "<|phoneme_end|>",
    "<|text|>",
    "<|voice|>",
    "<|interleave|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
)
NUM_IDS = 256 + len(CONTROL_TOKENS) + NUM_SEMANTIC
PADDED_VOCAB_SIZE = -(-NUM_IDS // 64) * 64


def make_tokenizer() -> Tokenizer:
    """Bytes without merges; upper and lower case are one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = (*CONTROL_TOKENS, *(f"<|semantic:{code}|>" for code in range(NUM_SEMANTIC)))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    return tokenizer


def main() -> None:
    """Write the file, compact, one line."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "fishjax/minnow/tokenizer.json"
    serialized = json.loads(make_tokenizer().to_str())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(serialized, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{out}: {NUM_IDS} ids, padded vocabulary {PADDED_VOCAB_SIZE}")


if __name__ == "__main__":
    main()
