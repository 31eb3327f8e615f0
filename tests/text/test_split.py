# ruff: noqa: RUF001 (texts in many scripts)
import json
import time
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fishjax.errors import InvalidRequest
from fishjax.text.reference_split import clean_text, group_turns_into_batches, split_text_by_speaker
from fishjax.text.split import SPEAKER_TAG, split_for_speech, strip_tags

CASES = json.loads((Path(__file__).parents[1] / "golden" / "prompt_format" / "cases.json").read_text(encoding="utf-8"))
FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
TAG = regex.compile(r"\[[^\[\]]{1,300}\]|<\|[^<>|\s]{1,64}\|>")
INVISIBLE = regex.compile(r"[\s\p{Z}\p{Cc}\p{Cf}]")
SPACES = regex.compile(r"[\s\x1c-\x1f]+")


def size(text: str) -> int:
    return len(text.encode("utf-8"))


def bare(text: str) -> str:
    """Without speaker tags and white space: what must survive."""
    return SPACES.sub("", SPEAKER_TAG.sub("", text))


# --- reference mode


@pytest.mark.parametrize("case", CASES["split_text_by_speaker"], ids=lambda case: case["text"][:20])
def test_golden_turns(case):
    assert split_text_by_speaker(case["text"]) == case["turns"]


@pytest.mark.parametrize(
    "case", CASES["group_turns_into_batches"], ids=lambda c: f"{c['max_speakers']}-{c['max_bytes']}"
)
def test_golden_groups(case):
    assert group_turns_into_batches(case["turns"], case["max_speakers"], case["max_bytes"]) == case["batches"]


@pytest.mark.parametrize("case", CASES["clean_text"], ids=lambda case: case["text"][:12])
def test_golden_cleaning(case):
    assert clean_text(case["text"]) == case["cleaned"]


# --- fixed mode: examples


@pytest.mark.parametrize(
    ("text", "max_bytes", "segments"),
    [
        ("One. Two! Three?", 6, ["One.", "Two!", "Three?"]),
        ("One. Two! Three?", 9, ["One. Two!", "Three?"]),
        ("It costs 3.14 dollars. Really.", 24, ["It costs 3.14 dollars.", "Really."]),
        ("Mr. Smith met Dr. Jones. They spoke.", 30, ["Mr. Smith met Dr. Jones.", "They spoke."]),
        ("J. S. Bach wrote it. We play.", 22, ["J. S. Bach wrote it.", "We play."]),
        ("See no. 5 of fig. 3. Then go.", 24, ["See no. 5 of fig. 3.", "Then go."]),
        ('He said "stop." Then he left.', 20, ['He said "stop."', "Then he left."]),
        ("hello there. how are you. fine.", 26, ["hello there. how are you.", "fine."]),
        ("Visit example.com at 12:30 today, please do.", 40, ["Visit example.com at 12:30 today,", "please do."]),
        ("first, second; third: fourth", 15, ["first, second;", "third: fourth"]),
        ("no marks at all here", 12, ["no marks at", "all here"]),
        (
            "今天天气很好，我们去公园散步吧。你说呢？「好的。」",
            48,
            ["今天天气很好，我们去公园散步吧。", "你说呢？「好的。」"],
        ),
        ("今天天气很好，我们去公园散步吧。", 30, ["今天天气很好，", "我们去公园散步吧。"]),
        ("こんにちは、世界。今日はいい天気です。", 30, ["こんにちは、世界。", "今日はいい天気です。"]),
        ("مرحبا بالعالم. هل أنت هنا؟ نعم، أنا هنا", 48, ["مرحبا بالعالم. هل أنت هنا؟", "نعم، أنا هنا"]),
        ("नमस्ते दुनिया। आप कैसे हैं? मैं ठीक हूँ।", 75, ["नमस्ते दुनिया। आप कैसे हैं?", "मैं ठीक हूँ।"]),
        ("Γεια σου; Ναι. Καλά.", 18, ["Γεια σου;", "Ναι. Καλά."]),
        (FAMILY * 3, 20, [FAMILY] * 3),
        ("e\u0301" * 6, 7, ["e\u0301" * 2] * 3),
        ("\U0001f1eb\U0001f1f7\U0001f1e9\U0001f1ea", 8, ["\U0001f1eb\U0001f1f7", "\U0001f1e9\U0001f1ea"]),
        ("a", 1, ["a"]),
        (FAMILY, 1, [FAMILY]),
        ("x" * 10, 4, ["x" * 4, "x" * 3, "x" * 3]),
    ],
)
def test_where_it_cuts(text, max_bytes, segments):
    assert split_for_speech(text, max_bytes) == segments


def test_white_space_runs_speak_like_single_spaces():
    assert split_for_speech("  a \t b\r\n\n c\u3000d  ", 200) == ["a b c d"]
    assert split_for_speech("10\u00a0000 km", 8) == ["10\u00a0000", "km"]  # a no-break space holds


@pytest.mark.parametrize("text", ["", " ", "\n\t ", "\u00a0\u200b", "<|speaker:0|>", " <|speaker:0|>\n<|speaker:1|> "])
def test_blank_text_is_refused(text):
    with pytest.raises(InvalidRequest, match="blank, only tags, spaces or invisible characters"):
        split_for_speech(text, 200)


def test_text_before_the_first_speaker_tag_is_kept():
    text = "Intro. <|speaker:0|>One.<|speaker:1|>Two."
    assert split_text_by_speaker(text) == ["<|speaker:0|>One.", "<|speaker:1|>Two."]  # the original loses it
    assert split_for_speech(text, 200) == ["Intro.\n<|speaker:0|>One.\n<|speaker:1|>Two."]


def test_turns_are_grouped_by_five_and_by_size():
    turns = [f"<|speaker:{i % 2}|>Turn {i}." for i in range(7)]
    assert split_for_speech("".join(turns), 1000) == ["\n".join(turns[:5]), "\n".join(turns[5:])]
    assert split_for_speech("".join(turns), 2 * size(turns[0]) + 1) == [
        "\n".join(turns[i : i + 2]) for i in range(0, 7, 2)
    ]


def test_tagged_text_is_grouped_as_the_original_groups_it_when_newlines_fit():
    case = next(case for case in CASES["generate_long"] if case["name"] == "long_chunked_max5")
    assert split_for_speech(case["text"], case["chunk_length"]) == case["batches"]


def test_a_long_turn_repeats_its_speaker_and_an_empty_one_is_dropped():
    text = "<|speaker:1|> First sentence here. Second one here.<|speaker:2|><|speaker:0|>Bye."
    assert split_for_speech(text, 40) == [
        "<|speaker:1|> First sentence here.",
        "<|speaker:1|> Second one here.",
        "<|speaker:0|>Bye.",
    ]


def test_a_tag_is_never_cut_and_goes_with_the_words_behind_it():
    text = "I walked home. [whisper in small voice] And then it rained again."
    assert split_for_speech(text, 52) == ["I walked home.", "[whisper in small voice] And then it rained again."]
    for max_bytes in range(1, 70):
        assert sum(segment.count("[whisper in small voice]") for segment in split_for_speech(text, max_bytes)) == 1


def test_thai_without_spaces_is_cut_between_graphemes():
    text = "สวัสดีครับวันนี้อากาศดีมากเราไปเดินเล่นที่สวนสาธารณะกันเถอะ"
    segments = split_for_speech(text, 60)
    assert "".join(segments) == text
    assert len(segments) >= size(text) // 60
    assert all(size(segment) <= 60 for segment in segments)
    assert not any(regex.match(r"[\p{M}ะาำ]", segment) for segment in segments)


def test_two_thousand_words_are_spoken_whole_in_sentences():
    sentence = "The committee, which met on Tuesday, heard from Dr. Lee that 3.5 percent is enough."
    text = " ".join([sentence] * 134)
    assert len(text.split()) >= 2000
    segments = split_for_speech(text, 200)
    assert len(segments) > 50
    assert all(size(segment) <= 200 and segment.endswith("enough.") for segment in segments)
    assert " ".join(segments) == text
    golden = next(case for case in CASES["generate_long"] if case["name"] == "long_untagged_is_one_batch")
    assert golden["batches"] == [golden["text"]]  # the original never splits it
    assert len(split_for_speech(golden["text"], golden["chunk_length"])) > 1


@pytest.mark.parametrize(
    "text",
    ["[" * 50_000, "." * 50_000, "a" * 50_000, "今" * 50_000, "a, " * 20_000, "[a" * 20_000, "\u00a0" * 50_000 + "a"],
)
def test_hostile_texts_take_no_long_time(text):
    start = time.perf_counter()
    segments = split_for_speech(text, 200)
    assert bare("".join(segments)) == bare(text)
    assert time.perf_counter() - start < 5


def test_a_lone_surrogate_does_no_harm():
    assert split_for_speech("a \ud83d b", 200) == ["a \ufffd b"]


def test_a_limit_below_one_is_an_error():
    with pytest.raises(ValueError, match="max_bytes"):
        split_for_speech("a", 0)


def test_strip_tags():
    assert strip_tags("[laugh] Oh, hi [sigh], you [x] there").split() == ["Oh,", "hi,", "you", "there"]
    assert strip_tags("<|speaker:0|>hey[sigh]you") == " hey you"
    with pytest.raises(InvalidRequest):
        split_for_speech(strip_tags("[laugh]"), 200)


@pytest.mark.timeout(30)  # a guard against hanging: what grows with the square takes minutes
@pytest.mark.parametrize(
    "unit",
    [
        " ",
        "\n",
        "\u00a0",
        "[",
        "[a",
        "<|",
        "<|speaker:",
        "[x] ",
        ".",
        ". ",
        '."',
        "1.",
        ",",
        "字",
        "\u0301",
        "\U0001f1e6",
    ],
)
def test_the_longest_text_of_any_kind_is_cut_without_hanging(unit):
    text = unit * (65_000 // size(unit)) + "a"
    assert bare(strip_tags(text)).endswith("a")
    assert split_for_speech(text, 200)


# --- fixed mode: properties

# fmt: off
WORDS = st.sampled_from([
    "a", "Hello", "don't", "well-known", "3.14", "Mr.", "e.g.", "x" * 40, "go.", "what?", "yes,", '"so."', "…",
    "今天天气很好，", "散步吧。", "コンピューター", "한국어", "สวัสดีครับ", "مرحبا،", "هنا؟", "हूँ।",
    FAMILY, "e\u0301\u0302", "\U0001f1eb\U0001f1f7", "\u00a0", "[laugh]", "[whisper in small voice]", "[", "]", "(a b)",
])
# fmt: on
TEXTS = st.lists(st.tuples(WORDS, st.sampled_from([" ", "", "  ", "\n", "\t"])), min_size=1, max_size=40).map(
    lambda pairs: "".join(word + gap for word, gap in pairs)
)
TAGGED = st.lists(
    st.tuples(st.sampled_from(["", "<|speaker:0|>", "<|speaker:12|>"]), TEXTS), min_size=1, max_size=6
).map(lambda pairs: "".join(tag + text for tag, text in pairs))
LIMITS = st.integers(1, 300)


def unblank(text: str) -> bool:
    return bool(regex.search(r"[^\s\p{Z}\p{Cc}\p{Cf}]", text))


@settings(max_examples=150, deadline=None)
@given(TAGGED.filter(lambda text: unblank(SPEAKER_TAG.sub("", text))), LIMITS)
@example("Hi [a b]", 1)
def test_nothing_is_lost_or_reordered(text, max_bytes):
    segments = split_for_speech(text, max_bytes)
    assert all(segment.strip() for segment in segments)
    assert "".join(bare(segment) for segment in segments) == bare(text)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200).filter(lambda text: unblank(text) and not SPEAKER_TAG.search(text)), LIMITS)
def test_nothing_of_any_text_is_lost(text, max_bytes):
    segments = split_for_speech(text, max_bytes)
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert INVISIBLE.sub("", "".join(segments)) == INVISIBLE.sub("", whole)
    assert all(size(s) <= max_bytes for s in segments if len(regex.findall(r"\X", s)) > 1 and not TAG.search(s))


@settings(max_examples=150, deadline=None)
@given(TEXTS.filter(unblank), LIMITS)
def test_segments_keep_to_the_limit_and_cut_no_grapheme_and_no_tag(text, max_bytes):
    folded = SPACES.sub(lambda m: m[0] if set(m[0]) <= {"\u00a0"} else " ", text)
    segments = split_for_speech(text, max_bytes)
    for segment in segments:
        unsplittable = TAG.fullmatch(segment) or len(regex.findall(r"\X", segment)) == 1
        assert size(segment) <= max_bytes or unsplittable
    graphemes = regex.findall(r"\X", folded)
    spoken = [g for s in segments for g in regex.findall(r"\X", s)]
    assert [g for g in spoken if g.strip()] == [g for g in graphemes if g.strip()]
    assert [tag for s in segments for tag in TAG.findall(s)] == TAG.findall(folded.strip(" "))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text("abcdefgh", min_size=1, max_size=12), min_size=1, max_size=60), st.integers(12, 80))
def test_a_word_that_fits_is_never_cut(words, max_bytes):
    segments = split_for_speech(" ".join(words), max_bytes)
    assert [word for segment in segments for word in segment.split(" ")] == words
    assert all(size(segment) <= max_bytes for segment in segments)
    # No needless cuts: two neighbours do not fit in half of the limit together.
    assert all(size(a) + size(b) + 1 > max_bytes / 2 for a, b in pairwise(segments))


@settings(max_examples=150, deadline=None)
@given(TAGGED.filter(lambda text: unblank(SPEAKER_TAG.sub("", text))), LIMITS)
def test_every_segment_keeps_its_speaker(text, max_bytes):
    speakers = []
    for segment in split_for_speech(text, max_bytes):
        for line in segment.split("\n"):
            tag = SPEAKER_TAG.match(line)
            body = bare(line)
            speakers.extend([tag[0] if tag else ""] * len(body))
    expected, tag = [], ""
    for piece in regex.split(r"(<\|speaker:\d+\|>)", text):
        if SPEAKER_TAG.fullmatch(piece):
            tag = piece
        elif unblank(piece):
            expected.extend([tag] * len(bare(piece)))
    assert speakers == expected
