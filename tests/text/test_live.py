"""Text in pieces: what is cut, when, and that it does not matter where the pieces begin and end."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fishjax.text import live as live_text
from fishjax.text.live import LiveText
from fishjax.text.split import sentence_ends, split_for_speech

MAX_BYTES = 200


def feed_all(pieces, max_bytes=MAX_BYTES, **options):
    live = LiveText(max_bytes, **options)
    return [segment for piece in pieces for segment in live.feed(piece)] + live.flush()


def test_a_sentence_is_given_once_the_next_begins():
    live = LiveText(MAX_BYTES)
    assert live.feed("The door") == []
    assert live.feed(" is open.") == []  # "open.3" and "open..." may follow
    assert live.feed(" ") == []
    assert live.feed("C") == ["The door is open."]
    assert live.feed("lose it! Now? Ye") == ["Close it!", "Now?"]
    assert live.flush() == ["Ye"]
    assert live.flush() == []


@pytest.mark.parametrize("piece", ["Mr. Smith", "It costs 3.50 now", "Visit example.com today", "J. S. Bach", "Wait"])
def test_a_stop_inside_a_sentence_ends_nothing(piece):
    live = LiveText(MAX_BYTES)
    assert [segment for character in piece for segment in live.feed(character)] == []
    assert live.flush() == [piece]


def test_a_doubtful_end_counts_when_half_a_segment_is_there():
    assert LiveText(MAX_BYTES).feed("open the door. close the") == []
    assert LiveText(28).feed("open the door. close the") == ["open the door."]


def test_long_text_without_an_end_does_not_wait_for_one():
    live = LiveText(40)
    segments = live.feed("one two three four five six seven eight nine zero one two")
    assert segments
    assert all(len(segment) <= 40 for segment in segments)
    assert " ".join([*segments, *live.flush()]) == "one two three four five six seven eight nine zero one two"


def test_tags_are_not_cut_where_pieces_end():
    pieces = ["Stop. [low", " voice. Slow", "ly] Go on", ". Yes."]
    assert feed_all(pieces) == ["Stop.", "[low voice. Slowly] Go on.", "Yes."]
    assert feed_all(pieces, keep_tags=False) == ["Stop.", "Go on.", "Yes."]
    assert feed_all(["[laugh]", " "], keep_tags=False) == []


def test_a_speakers_tag_ends_what_was_before_and_holds_on():
    pieces = ["Hi <|spea", "ker:1|>", " Hello. How are", " you? Fine.<|speaker:0|>Good. Bye."]
    assert feed_all(pieces) == [
        "Hi",
        "<|speaker:1|> Hello.",
        "<|speaker:1|> How are you?",
        "<|speaker:1|> Fine.",
        "<|speaker:0|>Good.",
        "<|speaker:0|>Bye.",
    ]


def test_blank_pieces_say_nothing():
    assert feed_all(["", " ", "\n\t", "\u200b"]) == []


@pytest.mark.parametrize("character", ["\u0301", "\u202e", "\u1100", "[laugh]"])
@pytest.mark.parametrize("keep_tags", [True, False])
def test_what_cannot_be_cut_is_not_read_over_and_over(monkeypatch, character, keep_tags):
    read = []
    monkeypatch.setattr(live_text, "sentence_ends", lambda text: read.append(len(text)) or sentence_ends(text))
    pieces = ["Hello. E", *([character] * 3000), " <|speaker:1|>Bye. Now"]
    segments = feed_all(pieces, keep_tags=keep_tags)
    assert segments[0] == "Hello." and segments[-1] == "<|speaker:1|>Now"[0 if keep_tags else 13 :]
    assert sum(read) < 300 * sum(map(len, pieces))  # read with each piece it is 1,500 times


words = st.sampled_from(
    [
        *("Open", "the", "door", "Mr.", "3.5", "p.m.", "No.", "7", "e.g.", "J.", "well...", "Really?!", "now.", "Go!"),
        *("\u201cYes.\u201d", "\u4f60\u597d\u3002", "\u5f00\u95e8\uff01", "\u00bfC\u00f3mo?", "na\u00efve"),
        *("[laugh]", "[soft. voice]", "<|speaker:1|>", "<|speaker:2|> ", "\n", "  "),
    ]
)


@settings(deadline=None)
@given(st.lists(words, max_size=20), st.lists(st.integers(0, 150), max_size=30))
@example(["<|speaker:1|>", "Go!", "now.", "Open"], [12, 13, 14])
def test_where_pieces_begin_and_end_does_not_matter(words, cuts):
    text = " ".join(words)
    cuts = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    # Segments of a length that no sentence here reaches.
    segments = feed_all(pieces, max_bytes=400)
    assert segments == feed_all([text], max_bytes=400)
    assert segments == feed_all(text, max_bytes=400)
    # Each is a prompt's worth of text, and nothing is lost.
    for segment in segments:
        assert split_for_speech(segment, 400) == [segment]

    def letters(text):
        return "".join(text.split())

    spoken = letters(text)
    for tag in ("<|speaker:1|>", "<|speaker:2|>"):
        spoken = spoken.replace(tag, "")
        segments = [segment.removeprefix(tag) for segment in segments]
    assert letters("".join(segments)) == spoken
