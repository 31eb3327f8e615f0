"""Many texts through the engine's slots, greedily, a text a slot: the next one takes the slot that came free."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fishjax.engine.sampling_params import SamplingParams
from fishjax.engine.utterance import FinishReason, Utterance
from fishjax.errors import InvalidRequest
from fishjax.speech import SpeechModel


@dataclass(frozen=True)
class Spoken:
    """A text as it was spoken.

    prompt_CT int32 (C+1, P) what the model was asked; codes_KT int32 (C, T) its frames; audio_T float32 mono;
    ended: whether the model said itself that the text is over.
    """

    text: str
    prompt_CT: np.ndarray
    codes_KT: np.ndarray
    audio_T: np.ndarray
    ended: bool

    @property
    def num_frames(self) -> int:
        """Frames of sound."""
        return self.codes_KT.shape[1]


class _Speaker:
    """One text while it is being spoken."""

    def __init__(self, index: int, text: str, speech: SpeechModel):
        self.index, self.text = index, text
        self.utterance: Utterance = speech.utterance(text, sampling=SamplingParams(top_k=1))
        prompt = self.utterance.next_prompt()
        assert prompt is not None
        self.prompt_CT = prompt.columns_CT
        self._codes: list[np.ndarray] = []
        self._audio: list[np.ndarray] = []

    def hear(self, codes_K: np.ndarray, is_end: bool, audio_s: np.ndarray) -> bool:
        """Take a frame; whether it was the last."""
        accepted = self.utterance.accept(codes_K, is_end)
        if accepted.keep:
            self._codes.append(codes_K)
            self._audio.append(audio_s)
        if accepted.segment_done and accepted.finish_reason is None:
            raise InvalidRequest(f"the gate needs '{self.text}' in one segment: the model's segment_bytes are too few")
        return accepted.segment_done

    def spoken(self) -> Spoken:
        num_codebooks = self.prompt_CT.shape[0] - 1
        return Spoken(
            text=self.text,
            prompt_CT=self.prompt_CT,
            codes_KT=np.stack(self._codes, axis=1) if self._codes else np.zeros((num_codebooks, 0), np.int32),
            audio_T=np.concatenate(self._audio) if self._audio else np.zeros(0, np.float32),
            ended=self.utterance.finish_reason is FinishReason.STOP,
        )


def speak_all(speech: SpeechModel, texts: Sequence[str], say: Callable[[str], None]) -> list[Spoken]:
    """Every text, greedily, in the order given; `say` hears how far it is.

    Raises InvalidRequest for a text that the model would cut in two, PromptTooLong for one that fits no slot.
    """
    engine = speech.engine
    waiting = deque(enumerate(texts))
    free = deque(range(engine.num_slots))
    running: dict[int, _Speaker] = {}
    done: dict[int, Spoken] = {}
    while waiting or running:
        while waiting and free:
            slot, speaker = free.popleft(), _Speaker(*waiting.popleft(), speech)
            engine.insert(engine.prefill(speaker.prompt_CT, speaker.utterance.sampling), slot)
            running[slot] = speaker
        frames = engine.step(running).result()
        for slot, speaker in list(running.items()):
            if speaker.hear(frames.codes_BK[slot], bool(frames.is_end_B[slot]), frames.audio_Bs[slot]):
                done[speaker.index] = speaker.spoken()
                del running[slot]
                engine.free(slot)
                free.append(slot)
        say(f"spoken: {len(done)} of {len(texts)} texts")
    return [done[index] for index in range(len(texts))]
