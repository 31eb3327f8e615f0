"""`SpeechModel.speak`: one utterance at a time, and the slot is free however it ends."""

from __future__ import annotations

import numpy as np
import pytest

from fishjax.config import SpeechProfile
from fishjax.engine.sampling_params import SamplingParams
from fishjax.errors import InvalidRequest
from fishjax.speech import SpeechModel
from fishjax.text.prompt import Prompter
from fishjax.text.tokenizer import Tokenizer


@pytest.fixture
def speech(engine, golden):
    tokenizer = Tokenizer.from_file(golden / "prompt_format" / "tokenizer.json")
    return SpeechModel(engine, Prompter(tokenizer, engine.num_codebooks), SpeechProfile())


def spoken(speech, seed):
    utterance = speech.utterance("hello", sampling=SamplingParams(seed=seed, max_frames=6))
    return list(speech.speak(utterance))


def test_one_utterance_at_a_time(speech):
    """Two generators in turn would both step slot 0, and each would hear the other's frames."""
    wanted = spoken(speech, 1)
    first = speech.speak(speech.utterance("hello", sampling=SamplingParams(seed=1, max_frames=6)))
    heard = [next(first)]
    with pytest.raises(InvalidRequest, match="another utterance is being spoken"):
        spoken(speech, 2)
    heard += first
    np.testing.assert_array_equal(heard, wanted)


def test_an_utterance_that_is_left_makes_room(speech):
    wanted = spoken(speech, 1)
    left = speech.speak(speech.utterance("hello", sampling=SamplingParams(seed=2, max_frames=50)))
    next(left)
    left.close()
    with pytest.raises(InvalidRequest, match="empty"):
        speech.engine.step([0])
    np.testing.assert_array_equal(spoken(speech, 1), wanted)
