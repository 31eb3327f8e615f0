"""Long text to pieces, for users (fixed mode); `reference_split` has the original's rules.

Place in the flow: text -> *segments* -> one prompt each. Plain Python; no tokens, no model.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from enum import IntEnum
from itertools import accumulate

import regex

from fishjax.errors import InvalidRequest

SPEAKER_TAG = re.compile(r"<\|speaker:\d+\|>")
MAX_TURNS = 5  # turns in one prompt

# A control tag: [laugh], [whisper in small voice], <|speaker:3|>. A bracket longer than this is a text in brackets.
_TAG = regex.compile(r"\[[^\[\]]{1,300}\]|<\|[^<>|\s]{1,64}\|>")
_NO_BREAK = frozenset("\u00a0\u2007\u202f")  # spaces that hold a word together
_VISIBLE = regex.compile(r"[^\s\p{Z}\p{Cc}\p{Cf}]")


class _Rank(IntEnum):
    """How good a place for a cut is."""

    GRAPHEME = 0  # inside a word
    PART = 1  # between two characters of a script that writes no spaces
    AFTER_TAG = 2  # a space after [a tag], which belongs to the words behind it
    WORD = 3
    CLAUSE = 4
    LOOSE_SENTENCE = 5  # looks like the end of a sentence, but a lower-case word follows
    SENTENCE = 6


def split_for_speech(text: str, max_bytes: int) -> list[str]:
    """Segments of at most `max_bytes` UTF-8 bytes each, in order: what is spoken as one prompt each.

    White space: runs of spaces, tabs and newlines become one space; a no-break space by itself stays.
    Speakers: every `<|speaker:N|>` begins a turn. Text before the first is a turn without a speaker. Up to five
    turns share a segment, joined by newlines, as in the original. A tag with nothing to say behind it is dropped.
    Length: a turn longer than `max_bytes` is cut at the last end of a sentence that fits, else of a clause, else
    of a word; each piece repeats the turn's speaker tag and is a segment of its own or the beginning of one.
    A word that alone is too long is cut between graphemes (in Chinese, Japanese, Thai and their like, between
    characters). Never cut: graphemes and tags in square brackets; they alone may exceed `max_bytes`.
    Nothing else is lost: without white space and speaker tags, the segments joined are the text. (A word cut at
    graphemes may lose an invisible one.)

    Raises InvalidRequest for a text with nothing to say: white space, invisible characters or speaker tags alone.
    """
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be positive, not {max_bytes}")
    pieces = [(i, piece) for i, turn in enumerate(_turns(text)) for piece in _cut_turn(*turn, max_bytes)]
    if not pieces:
        raise InvalidRequest("there is nothing to say: the text is blank, only tags, spaces or invisible characters")
    segments: list[list[str]] = []
    num_bytes, last_turn = 0, -1
    for turn, piece in pieces:
        piece_bytes = _num_bytes(piece)
        full = not segments or len(segments[-1]) >= MAX_TURNS or num_bytes + 1 + piece_bytes > max_bytes
        if full or turn == last_turn:
            segments.append([])
            num_bytes = -1  # the first piece has no newline before it
        segments[-1].append(piece)
        num_bytes += 1 + piece_bytes
        last_turn = turn
    return ["\n".join(segment) for segment in segments]


def strip_tags(text: str) -> str:
    """The text without [control tags] and speaker tags, for models that were trained without them."""
    # Only from the beginning of a run of spaces: from each space of it, the time would grow with its square.
    text = regex.sub(rf"(?<!\s)\s*+(?:{_TAG.pattern})(?=[\s\p{{P}}]|$)", "", text)
    return _TAG.sub(" ", text)


def squeeze_spaces(text: str) -> str:
    """Runs of spaces, tabs and newlines become one space; a no-break space by itself stays."""
    return re.sub(r"\s+", lambda run: run[0] if _NO_BREAK.issuperset(run[0]) else " ", text)


def has_sound(text: str) -> bool:
    """Whether there is anything but spaces and invisible characters."""
    return _VISIBLE.search(text) is not None


def sentence_ends(text: str) -> list[tuple[int, bool]]:
    """Where sentences end in `text`, whose spaces are squeezed: (place, whether it is beyond doubt), in order.

    Beyond doubt is not a stop before a lower-case word, nor one like those of "p.m." and "3.".
    """
    ranks = _cut_ranks(text) if text else {}
    return [(place, ranks[place] is _Rank.SENTENCE) for place in sorted(ranks) if ranks[place] >= _Rank.LOOSE_SENTENCE]


def _turns(text: str) -> Iterator[tuple[str, str]]:
    """(speaker tag or "", what it says); turns with nothing to say are left out."""
    # Lone surrogates (from a broken JSON escape) have no UTF-8: they become U+FFFD.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    text = squeeze_spaces(text)
    tags = ["", *SPEAKER_TAG.findall(text)]
    for tag, body in zip(tags, SPEAKER_TAG.split(text), strict=True):
        if has_sound(body):
            # The original keeps a space behind the tag; before a tagless turn there is nothing to keep it for.
            yield (tag + " " if tag and body.startswith(" ") else tag), body.strip()


def _cut_turn(tag: str, body: str, max_bytes: int) -> list[str]:
    pieces = _cut(body, max(1, max_bytes - _num_bytes(tag)))
    return [tag + piece for piece in pieces if has_sound(piece)]


def _cut(text: str, max_bytes: int) -> list[str]:
    """Greedy: at each step the furthest cut of the best rank that fits."""
    if _num_bytes(text) <= max_bytes:
        return [text]
    ranks = _cut_ranks(text)
    places: dict[_Rank, list[int]] = {rank: [] for rank in _Rank}
    for place in sorted(ranks):
        places[ranks[place]].append(place)
    anywhere = sorted(ranks)
    bytes_at = [0, *accumulate(_num_bytes(character) for character in text)]
    pieces, start = [], 0
    while bytes_at[-1] - bytes_at[start] > max_bytes:
        limit = bisect_right(bytes_at, bytes_at[start] + max_bytes) - 1
        end = _best_cut(places, bytes_at, start, limit, max_bytes)
        if end is None:  # one grapheme or tag that alone is too long
            following = bisect_right(anywhere, start)
            end = anywhere[following] if following < len(anywhere) else len(text)
        pieces.append(text[start:end])
        start = end + 1 if ranks.get(end, _Rank.GRAPHEME) >= _Rank.AFTER_TAG and text[end] == " " else end
    if start < len(text):
        pieces.append(text[start:])
    return pieces


def _best_cut(
    places: dict[_Rank, list[int]], bytes_at: list[int], start: int, limit: int, max_bytes: int
) -> int | None:
    """The place in (start, limit] to cut at, or None."""
    for rank in sorted(_Rank, reverse=True):
        fitting = places[rank][bisect_right(places[rank], start) : bisect_right(places[rank], limit)]
        if not fitting:
            continue
        if rank >= _Rank.CLAUSE:
            return fitting[-1]
        # Inside a clause: in parts of equal length, not all but one word first.
        end = min(
            (p[bisect_right(p, start)] for r, p in places.items() if r >= _Rank.CLAUSE and p and p[-1] > start),
            default=len(bytes_at) - 1,
        )
        clause_bytes = bytes_at[end] - bytes_at[start]
        wanted = bytes_at[start] + clause_bytes / -(-clause_bytes // max_bytes)
        return fitting[min(bisect_left(fitting, wanted, key=bytes_at.__getitem__), len(fitting) - 1)]
    return None


def _cut_ranks(text: str) -> dict[int, _Rank]:
    """Places where `text` may be cut; each is before text[place], and a space there is left out of both sides."""
    starts = [match.start() for match in regex.finditer(r"\X", text)]
    ranks = dict.fromkeys(starts[1:], _Rank.GRAPHEME)
    lone_spaces = {start for start, end in zip(starts, [*starts[1:], len(text)], strict=True) if text[start:end] == " "}

    def raise_to(place: int, rank: _Rank) -> None:
        if place in ranks:
            ranks[place] = max(ranks[place], rank)

    for match in _PART.finditer(text):
        raise_to(match.start(), _Rank.PART)
    tag_ends = set()
    for match in _TAG.finditer(text):
        tag_ends.add(match.end())
        for inside in range(match.start() + 1, match.end()):
            ranks.pop(inside, None)
    for space in lone_spaces:
        raise_to(space, _Rank.AFTER_TAG if space in tag_ends else _Rank.WORD)
        ranks.pop(space + 1, None)  # the same cut, with the space on the left
    for match in _STOP.finditer(text):
        end = match.end()
        if (rank := _stop_rank(text, match)) is not None and (end in lone_spaces or text[end : end + 1] != " "):
            raise_to(end, rank)
    return ranks


# Scripts written without spaces between words. Not cut: before marks, small letters and closing punctuation,
# after opening punctuation, inside a run of katakana, and where Thai and Lao vowels hold on to their consonant.
_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Bopomofo}\p{Yi}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
_PART = regex.compile(
    rf"(?:(?<=[{_UNSPACED}])|(?=[{_UNSPACED}]))"
    r"(?![\p{M}\p{Lm}\p{Po}\p{Pe}\p{Pf}\p{Pd}\s\u0e30-\u0e33\u0e45\u0e46\u0eb0-\u0eb3ぁぃぅぇぉっゃゅょゎァィゥェォッャュョヮ])"
    r"(?<![\p{Ps}\p{Pi}\s\u0e40-\u0e44\u0ec0-\u0ec4])"
    r"(?<!(?=[\p{Katakana}ー]).(?=\p{Katakana}))"
)
# Marks that end a sentence or a clause, in any script, with the brackets and quotes that close behind them.
_STOP = regex.compile(
    r"(?V1)(?:(?P<sentence>[\p{Sentence_Terminal}…]+)|(?P<clause>[[\p{Terminal_Punctuation}--\p{Sentence_Terminal}]\u2013-\u2015]+))"
    r"\p{M}*(?:[\p{Pe}\p{Pf}\"']|\p{Pi}(?=\s|$))*"
)
_NEED_SPACE = frozenset(".!?…,;:\u2013\u2014\u2015")
_ABBREVIATION = regex.compile(
    r"mrs?|ms|dr|prof|st|[sj]r|mt|ft|vs|cf|al|approx|dept|inc|ltd|corp|gen|sgt|capt|hon|gov|sen|e\.g|i\.e"
    r"|z\.b|d\.h|u\.a|bzw|ca|mme|mlle|m|sra|dña|ул|им|т\.[\u0435\u043a]"
)
_BEFORE_NUMBER = regex.compile(r"nos?|figs?|vol|pp?|eq|sec|ch|art|nr|n°|jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec")


def _stop_rank(text: str, match: regex.Match[str]) -> _Rank | None:
    """What a run of stops means for a cut behind it; None: nothing (3.14, 12:30, example.com)."""
    marks = match["sentence"] or match["clause"]
    following = text[match.end() : match.end() + 2]
    spaced = not following or following[0] == " "
    if not spaced:
        before = text[match.start() - 1 : match.start()]
        unspaced_script = marks[-1] == "…" and _PART.match(text, match.end()) is not None
        if (marks[-1] in _NEED_SPACE and not unspaced_script) or (before.isdigit() and following[0].isdigit()):
            return None
    if match["clause"] is not None:
        return _Rank.CLAUSE
    lower_follows = following.strip()[:1].islower()
    if marks.endswith(("…", "..")):
        return _Rank.CLAUSE if lower_follows or not spaced else _Rank.SENTENCE
    if marks == ".":
        word = text[text.rfind(" ", 0, match.start()) + 1 : match.start()].lstrip("\"'([{\u00ab\u201c\u2018\u201e")
        lowered = word.lower()
        if _ABBREVIATION.fullmatch(lowered):
            return _Rank.WORD
        if _BEFORE_NUMBER.fullmatch(lowered) and following.strip()[:1].isdigit():
            return _Rank.WORD
        if len(word) == 1 and word.isupper() and word != "I":  # an initial
            return _Rank.WORD
        if "." in word or (word.isdigit() and len(word) <= 2):  # p.m. and 3. may end a sentence or not
            return _Rank.LOOSE_SENTENCE
    return _Rank.LOOSE_SENTENCE if lower_follows else _Rank.SENTENCE


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8"))
