"""A model folder, ready to speak: what `fishjax.load` returns, and the shortest way from text to sound.

    load(folder) -> SpeechModel -> utterance(text, references) -> speak(utterance) -> samples, frame by frame

The server drives the same engine and utterances with many slots at once (`serving/loop.py`); this is the
one-request form of it, used by `python -m fishjax say`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fishjax.config import Fused, SpeechProfile
from fishjax.engine.engine import Engine
from fishjax.engine.sampling_params import SamplingParams
from fishjax.engine.utterance import Utterance, least_max_len
from fishjax.errors import InvalidRequest
from fishjax.text.live import LiveText
from fishjax.text.prompt import Prompter, Reference
from fishjax.text.tokenizer import Tokenizer
from fishjax.weights.model_folder import LoadedModel, load_model
from fishjax.weights.prepare import prepare

MINNOW = Path(__file__).parent / "minnow"


@dataclass(frozen=True)
class SpeechModel:
    """An engine and what the text side needs to know of its model."""

    engine: Engine
    prompter: Prompter
    profile: SpeechProfile
    _slot_0: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def utterance(
        self, text: str | None, references: Sequence[Reference] = (), sampling: SamplingParams | None = None
    ) -> Utterance:
        """A request ready to be spoken; with `text` None, its text comes by `extend`, cut by `live_text()`.

        Raises InvalidRequest for blank text, PromptTooLong for too long a prompt.
        """
        return Utterance(
            text,
            references,
            sampling or self.default_sampling(),
            prompter=self.prompter,
            profile=self.profile,
            max_len=self.engine.max_len,
            frame_rate_hz=self.engine.frame_rate_hz,
        )

    @property
    def least_max_len(self) -> int:
        """Positions of the smallest slot that takes a text at all, unless it asks for `max_frames`."""
        return least_max_len(self.prompter, self.profile, self.engine.frame_rate_hz)

    def live_text(self) -> LiveText:
        """Cuts text that arrives in pieces into segments for this model."""
        return LiveText(self.profile.segment_bytes, keep_tags=self.profile.keep_tags)

    def reference(self, audio_T: np.ndarray, transcript: str) -> Reference:
        """A voice to speak with: mono float32 samples (T,) at the engine's rate, and what is said in them.

        Raises InvalidRequest for another shape, and for samples that are NaN or infinite.
        """
        return Reference(transcript, self.engine.references.encode_whole(audio_T))

    def default_sampling(self, seed: int = 0) -> SamplingParams:
        """The model's own sampling defaults."""
        profile = self.profile
        return SamplingParams(profile.temperature, profile.top_p, profile.top_k, seed)

    def speak(self, utterance: Utterance) -> Iterator[np.ndarray]:
        """Sound of an utterance, one frame (samples_per_frame float32 samples) at a time, from slot 0.

        Raises InvalidRequest while another utterance is being spoken: one at a time, each to its end or closed.
        """
        if not self._slot_0.acquire(blocking=False):
            raise InvalidRequest("another utterance is being spoken: hear it to its end, or close it, before the next")
        try:
            yield from self._speak(utterance)
        finally:
            self.engine.free(0)
            self._slot_0.release()

    def _speak(self, utterance: Utterance) -> Iterator[np.ndarray]:
        engine = self.engine
        while (prompt := utterance.next_prompt()) is not None:
            prefix = engine.prefill(
                prompt.columns_CT,
                utterance.sampling,
                prefix_length=prompt.prefix_length,
                voice_length=prompt.voice_length,
                first_frame=prompt.first_frame,
            )
            engine.insert(prefix, 0)
            pending = engine.step([0])
            while True:
                # The next step is under way while this one is read.
                following = engine.step([0])
                frame = pending.result()
                accepted = utterance.accept(frame.codes_BK[0], bool(frame.is_end_B[0]))
                if accepted.keep:
                    yield frame.audio_Bs[0]
                if accepted.segment_done:
                    break
                pending = following


def load(
    folder: Path | str | None = None,
    *,
    num_slots: int = 1,
    max_len: int = 1024,
    precision: str | None = None,
    voice_bytes: int = 0,
    sound_group: int = 1,
    fused: Fused | None = None,
    progress: Callable[[str], None] | None = None,
    warm: bool = True,
) -> SpeechModel:
    """Load a model folder, public or converted (None: minnow, which ships), and compile it.

    It gets `num_slots` slots of `max_len` columns, and `voice_bytes` for snapshots of the voices that it reads. A
    `sound_group` above 1 is for a loop that calls `engine.sound`, as the server's does; `speak` does not. `fused` as
    of `Engine`.

    `precision` is a policy as in `Precision.parse`; None takes the platform's default. `progress` hears what is being
    done. `warm=False` leaves compiling to the caller (`engine.warmup`). Raises WeightsError for a folder that is not
    whole, InvalidRequest for a precision or a size that cannot be.
    """
    place = Path(folder) if folder is not None else MINNOW
    if progress:
        progress(f"reading {place.name}")
    speech = assemble(
        load_model(place, precision),
        num_slots=num_slots,
        max_len=max_len,
        voice_bytes=voice_bytes,
        sound_group=sound_group,
        fused=fused,
        model_name=place.resolve().name,
    )
    if warm:
        speech.engine.warmup(progress and (lambda what: progress(f"compiling the {what}")))
    return speech


def assemble(
    loaded: LoadedModel,
    *,
    num_slots: int,
    max_len: int,
    model_name: str,
    voice_bytes: int = 0,
    sound_group: int = 1,
    fused: Fused | None = None,
) -> SpeechModel:
    """An engine around a model in memory, nothing compiled yet. Raises InvalidRequest for a size that cannot be.

    The model's weights are laid out for decoding, in place.
    """
    prepare(loaded.dual_ar)
    tokenizer = Tokenizer.from_file(loaded.tokenizer)
    engine = Engine(
        loaded.dual_ar,
        loaded.codec,
        im_end_id=tokenizer.im_end_id,
        num_slots=num_slots,
        max_len=max_len,
        precision=loaded.precision,
        max_reference_s=loaded.profile.max_reference_s,
        voice_bytes=voice_bytes,
        sound_group=sound_group,
        fused=fused,
        model_name=model_name,
    )
    config = loaded.config
    return SpeechModel(engine, Prompter(tokenizer, config.num_codebooks, config.prompt_layout), loaded.profile)
