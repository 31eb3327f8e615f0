"""Text that arrives in pieces, as from a language model, to segments: each sentence as soon as it is certainly whole.

Place in the flow: pieces -> *segments* -> one prompt each. What is cut does not depend on where the pieces begin and
end, but for flushes and for sentences longer than a segment. Plain Python; no tokens, no model.
"""

from __future__ import annotations

import regex

from fishjax.errors import InvalidRequest
from fishjax.text.split import SPEAKER_TAG, has_sound, sentence_ends, split_for_speech, squeeze_spaces, strip_tags

# A control tag, or a speaker's, of which the end may not have arrived.
_OPEN_TAG = regex.compile(r"(?:\[[^\[\]]{0,300}|<(?:\|[^<>|\s]{0,64}\|?)?)$")


class LiveText:
    """Collects pieces and gives segments of at most `max_bytes` UTF-8 bytes, as `split_for_speech` makes them.

    A sentence is whole once the next one has begun. A stop that may be none ("p.m.", or before a lower-case word) ends
    one only if it is half a segment long. A new speaker ends everything before. Without `keep_tags`, control tags are
    dropped.
    """

    def __init__(self, max_bytes: int, *, keep_tags: bool = True):
        self._max_bytes = max_bytes
        self._keep_tags = keep_tags
        self._speaker = ""  # the tag that holds where the rest begins, with the space behind it if there is one
        self._tag_is_new = False  # nothing has come behind it yet
        self._rest = ""
        # What cannot be cut (a letter with a thousand accents) is not read again before it has doubled in length: read
        # with each piece, its time would grow with its square.
        self._read_from = 0

    def feed(self, piece: str) -> list[str]:
        """Take the next piece; the segments that are whole now."""
        text = self._rest + piece
        if len(text) < self._read_from:
            self._rest = text
            return []
        return self._read(text)

    def flush(self) -> list[str]:
        """Everything that is here, whole or not."""
        return (self._read(self._rest) if self._read_from else []) + self._flush_rest()

    def _read(self, text: str) -> list[str]:
        text = squeeze_spaces(text)
        segments: list[str] = []
        begin = 0
        for tag in SPEAKER_TAG.finditer(text):
            segments += self._sentences(text[begin : tag.start()])
            segments += self._flush_rest()
            self._speaker, self._tag_is_new, begin = tag[0], True, tag.end()
        return segments + self._sentences(text[begin:])

    def _flush_rest(self) -> list[str]:
        rest, self._rest, self._read_from = self._rest, "", 0
        return self._segments(rest)

    def _sentences(self, text: str) -> list[str]:
        """Whole sentences of one speaker's text; what is left becomes the rest."""
        if self._tag_is_new and text:
            self._tag_is_new = False
            self._speaker += " " * text.startswith(" ")
            text = text.removeprefix(" ")
        open_tag = _OPEN_TAG.search(text)
        horizon = len(text) if open_tag is None else open_tag.start()
        segments: list[str] = []
        begin = 0
        for end, certain in sentence_ends(text):
            whole = end < horizon and has_sound(text[end:])
            if whole and (certain or 2 * _num_bytes(text[begin:end]) >= self._max_bytes):
                segments += self._segments(text[begin:end])
                begin = end + text.startswith(" ", end)
        self._rest, self._read_from = text[begin:], 0
        if _num_bytes(text[begin:horizon]) > self._max_bytes:
            parts = self._segments(text[begin:horizon])
            if len(parts) > 1:
                segments += parts[:-1]
                self._rest = parts[-1].removeprefix(self._speaker) + text[horizon:]
            else:
                self._read_from = 2 * len(self._rest)
        return segments

    def _segments(self, text: str) -> list[str]:
        text = self._speaker + text if self._keep_tags else strip_tags(self._speaker + text)
        try:
            return split_for_speech(text, self._max_bytes)
        except InvalidRequest:
            return []  # spaces and tags alone


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8"))
