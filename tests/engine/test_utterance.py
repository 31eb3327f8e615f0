"""A request's text logic without a device: segments, prefixes, limits, reasons to end."""

from __future__ import annotations

import numpy as np
import pytest

from fishjax.config import SpeechProfile
from fishjax.engine.sampling_params import SamplingParams
from fishjax.engine.utterance import Accepted, FinishReason, Utterance, least_max_len
from fishjax.errors import InvalidRequest, PromptTooLong
from fishjax.text.prompt import Prompter, Reference
from fishjax.text.tokenizer import Tokenizer

FRAME_RATE_HZ = 21.5


@pytest.fixture(scope="module")
def prompter(golden):
    return Prompter(Tokenizer.from_file(golden / "prompt_format" / "tokenizer.json"), num_codebooks=4)


@pytest.fixture
def make(prompter):
    def utterance(text, references=(), max_len=512, max_frames=None, **profile):
        return Utterance(
            text,
            references,
            SamplingParams(max_frames=max_frames),
            prompter=prompter,
            profile=SpeechProfile(**profile),
            max_len=max_len,
            frame_rate_hz=FRAME_RATE_HZ,
        )

    return utterance


def frame(number: int) -> np.ndarray:
    return np.array([number % 64, (3 * number) % 32, 5, 7], np.int32)


def speak(utterance: Utterance, frames_per_segment: int) -> list:
    """Drive an utterance as the loop does; returns its prompts."""
    prompts, number = [], 0
    while (prompt := utterance.next_prompt()) is not None:
        prompts.append(prompt)
        for spoken in range(frames_per_segment + 1):
            accepted = utterance.accept(frame(number), is_end=spoken == frames_per_segment)
            number += 1
            if accepted.segment_done:
                break
    return prompts


@pytest.mark.parametrize("max_segment_frames", [1024, 43, 5])
def test_the_smallest_slot_takes_a_letter_and_a_smaller_one_nothing(make, prompter, max_segment_frames):
    least = least_max_len(prompter, SpeechProfile(max_segment_frames=max_segment_frames), FRAME_RATE_HZ)
    assert make("I", max_len=least, max_segment_frames=max_segment_frames).next_prompt() is not None
    for text in ("I", "é", "hello"):
        with pytest.raises(PromptTooLong):
            make(text, max_len=least - 1, max_segment_frames=max_segment_frames)


def test_one_segment_ends_when_the_model_says_so(make):
    utterance = make("hello world")
    prompt = utterance.next_prompt()
    assert prompt.prefix_length == 0
    assert utterance.accept(frame(1), is_end=False).keep
    last = utterance.accept(frame(2), is_end=True)
    assert (last.keep, last.segment_done, last.finish_reason) == (False, True, FinishReason.STOP)
    assert utterance.num_frames == 1
    assert utterance.next_prompt() is None


@pytest.mark.parametrize("references", [[], [Reference("hello there", np.ones((4, 9), np.int32))]])
def test_the_first_prompt_says_how_much_of_it_is_the_voice(make, references):
    texts = ("One two. Three four.", "Other.")
    (first, second), (other,) = (speak(make(text, references, segment_bytes=12), 4) for text in texts)
    voice_length = first.voice_length
    assert voice_length > 10 and voice_length == other.voice_length
    np.testing.assert_array_equal(first.columns_CT[:, :voice_length], other.columns_CT[:, :voice_length])
    assert second.voice_length == 0 and second.prefix_length >= voice_length
    voiced = speak(make(texts[0], [Reference("other", np.ones((4, 20), np.int32))]), 4)[0]
    assert voiced.voice_length > voice_length


def test_an_end_at_the_first_frame_is_empty_not_sound(make):
    utterance = make("hello world")
    utterance.next_prompt()
    accepted = utterance.accept(frame(1), is_end=True)
    assert accepted.finish_reason is FinishReason.EMPTY
    assert not accepted.keep
    assert utterance.num_frames == 0


def test_the_frame_at_the_limit_is_kept_and_the_reason_is_length(make):
    utterance = make("hello world", max_frames=3)
    utterance.next_prompt()
    assert not utterance.accept(frame(1), is_end=False).segment_done
    assert not utterance.accept(frame(2), is_end=False).segment_done
    last = utterance.accept(frame(3), is_end=False)
    assert (last.keep, last.segment_done, last.finish_reason) == (True, True, FinishReason.LENGTH)
    assert utterance.num_frames == 3


def test_a_model_that_never_ends_is_stopped_and_the_next_segment_works(make):
    utterance = make("Hi. Bye.", segment_bytes=4)
    first = utterance.next_prompt()
    assert first is not None
    count = 0
    while not (accepted := utterance.accept(frame(count), is_end=False)).segment_done:
        count += 1
    assert FRAME_RATE_HZ < count + 1 < 6 * FRAME_RATE_HZ  # seconds, not minutes, for a word
    assert accepted.finish_reason is None
    assert utterance.next_prompt() is not None
    utterance.accept(frame(1), is_end=False)
    assert utterance.accept(frame(2), is_end=True).finish_reason is FinishReason.RUNAWAY


def test_later_segments_read_only_what_the_cache_does_not_hold(make, prompter):
    utterance = make("The first one is here. The second one is there. And a third.", segment_bytes=24)
    prompts = speak(utterance, frames_per_segment=5)
    assert len(prompts) == 3
    assert utterance.num_frames == 15
    held = np.zeros((5, 0), np.int32)
    number = 0
    for prompt in prompts:
        assert prompt.prefix_length == held.shape[1]
        held = np.concatenate([held, prompt.columns_CT], axis=1)
        codes = np.stack([frame(number + i) for i in range(5)], axis=1)
        number += 6  # the end takes a number too
        held = np.concatenate([held, prompter.frame_columns(codes)], axis=1)
    assert [prompt.first_frame for prompt in prompts] == [0, 5, 10]


def test_history_that_does_not_fit_is_dropped_oldest_first_and_the_first_segment_keeps_the_voice(make, prompter):
    text = " ".join(f"Sentence number {i} is said now." for i in range(8))
    utterance = make(text, segment_bytes=40, max_len=300, max_segment_frames=40)
    prompts = speak(utterance, frames_per_segment=12)
    assert len(prompts) == 8
    last = prompts[-1]
    assert last.prefix_length + last.columns_CT.shape[1] + 40 <= 300
    # Where history was dropped, the first segment's frames were read anew: as a reference, before the user's text.
    first_frames = prompter.frame_columns(np.stack([frame(i) for i in range(12)], axis=1))
    anew = [prompt for prompt in prompts[1:] if _find(prompt.columns_CT, first_frames) >= 0]
    assert len(anew) == 1
    assert anew[0].prefix_length < prompts[1].prefix_length
    at = anew[0].prefix_length + _find(anew[0].columns_CT, first_frames)
    assert last.prefix_length >= at + 12  # and from then on they stay in the cache


def test_dropping_history_makes_room_for_several_segments(make):
    """Most prompts go on from the whole cache; the old segments go in lots, not one with every segment."""
    text = " ".join(f"Sentence number {i} is said now." for i in range(30))
    prompts = speak(make(text, segment_bytes=40, max_len=400, max_segment_frames=40), frames_per_segment=12)
    assert len(prompts) == 30
    held, anew = 0, []
    for number, prompt in enumerate(prompts):
        if prompt.prefix_length < held:
            anew.append(number)
        held = prompt.prefix_length + prompt.columns_CT.shape[1] + 12
        assert prompt.prefix_length + prompt.columns_CT.shape[1] + 40 <= 400
    assert len(anew) >= 3
    assert min(np.diff(anew)) >= 3


def test_the_first_segment_keeps_the_voice_of_a_second_one_that_has_no_room_for_history(make, prompter):
    utterance = make(
        "Sentence number one is said. And so is two.", segment_bytes=30, max_len=220, max_segment_frames=99
    )
    second = speak(utterance, frames_per_segment=50)[1]
    first_frames = prompter.frame_columns(np.stack([frame(i) for i in range(50)], axis=1))
    assert _find(second.columns_CT, first_frames) >= 0


def test_a_first_segment_that_leaves_no_room_to_speak_is_dropped_not_refused(make):
    text = "Short. " + "This sentence is much longer than the first one was, and it must be said all the same."
    prompts = speak(make(text, segment_bytes=90, max_len=220, max_segment_frames=150), frames_per_segment=150)
    assert len(prompts) == 2
    assert not np.any(prompts[1].columns_CT[1:])


def _find(columns_CT: np.ndarray, wanted_CT: np.ndarray) -> int:
    width = wanted_CT.shape[1]
    places = range(columns_CT.shape[1] - width + 1)
    return next((i for i in places if np.array_equal(columns_CT[:, i : i + width], wanted_CT)), -1)


def test_no_history_for_models_that_were_trained_without(make):
    prompts = speak(make("One two. Three four.", segment_bytes=12, max_history_segments=0), frames_per_segment=4)
    assert len(prompts) == 2
    assert prompts[1].prefix_length > 0  # the system message is still shared
    assert not np.any(prompts[1].columns_CT[1:])


def test_max_frames_counts_the_whole_request(make):
    utterance = make("One two. Three four. Five six.", segment_bytes=10, max_frames=7)
    speak(utterance, frames_per_segment=5)
    assert utterance.num_frames == 7
    assert utterance.finish_reason is FinishReason.LENGTH


def test_a_prompt_without_room_is_refused_with_numbers(make):
    long_reference = Reference("hello", np.ones((4, 300), np.int32))
    with pytest.raises(PromptTooLong, match="256"):
        make("hello", references=[long_reference], max_len=256)


@pytest.mark.parametrize("text", ["", "  \n\t "])
def test_blank_text_is_refused(make, text):
    with pytest.raises(InvalidRequest, match="nothing to say"):
        make(text)


@pytest.mark.parametrize("text", ["<|im_end|>", "<|semantic:5|> <|speaker:0|>", "[laugh]", "\u200b"])
def test_a_text_of_tags_alone_is_not_called_empty(make, text):
    with pytest.raises(InvalidRequest, match="only tags, spaces or invisible characters"):
        make(text, keep_tags=False)


def test_tags_are_dropped_for_a_model_trained_without_them(make, prompter):
    kept = make("hello [laugh] world").next_prompt().columns_CT
    dropped = make("hello [laugh] world", keep_tags=False).next_prompt().columns_CT
    np.testing.assert_array_equal(dropped, make("hello world").next_prompt().columns_CT)
    assert kept.shape[1] > dropped.shape[1]


def end_segment(utterance: Utterance, frames: int):
    """Speak the segment at hand; the last answer."""
    for number in range(frames):
        assert not utterance.accept(frame(number), is_end=False).segment_done
    return utterance.accept(frame(0), is_end=True)


def test_text_that_arrives_while_it_is_spoken_gives_the_prompts_of_the_whole_text(make):
    first, second = "the first sentence is here", "and a second one"
    whole = make(f"{first}. {second}.", segment_bytes=30)
    live = make(None, segment_bytes=30)
    assert live.waits
    assert live.next_prompt() is None
    live.extend([f"{first}."])
    live.extend([f"{second}."])  # before the first is spoken, or after
    late = make(None, segment_bytes=30)
    late.extend([f"{first}."])
    wanted = whole.next_prompt()
    for utterance in (live, late):
        np.testing.assert_array_equal(utterance.next_prompt().columns_CT, wanted.columns_CT)
    assert end_segment(live, 3) == end_segment(whole, 3)
    assert not late.waits
    assert end_segment(late, 3) == Accepted(keep=False, segment_done=True)  # the request is not over
    assert (live.waits, late.waits) == (False, True)
    late.extend([f"{second}."])
    assert not late.waits
    wanted = whole.next_prompt()
    for utterance in (live, late):
        prompt = utterance.next_prompt()
        np.testing.assert_array_equal(prompt.columns_CT, wanted.columns_CT)
        assert (prompt.prefix_length, prompt.first_frame) == (wanted.prefix_length, wanted.first_frame)
        assert prompt.prefix_length > 0
    late.extend([], last=True)
    assert end_segment(late, 2).finish_reason is FinishReason.STOP
    end_segment(live, 2)
    assert live.waits
    live.extend([], last=True)
    assert (live.waits, live.finish_reason) == (False, FinishReason.STOP)


def test_text_that_never_came_is_empty(make):
    utterance = make(None)
    utterance.extend([], last=True)
    assert utterance.finish_reason is FinishReason.EMPTY


def test_a_limit_ends_text_that_is_still_arriving(make):
    utterance = make(None, max_frames=2)
    utterance.extend(["hello"])
    utterance.next_prompt()
    utterance.accept(frame(1), is_end=False)
    assert utterance.accept(frame(2), is_end=False).finish_reason is FinishReason.LENGTH
    utterance.extend(["more"])
    assert utterance.next_prompt() is None
    assert not utterance.waits
