"""Prompt matrices: what the slow transformer reads before it speaks.

Place in the flow: segments and reference codes -> *prompt* -> prefill. NumPy only.

    columns int32 (C+1, T), C codebooks
      text column   token id over C zeros
      frame column  semantic_begin_id + codes[0] over codes[0..C-1]  (row 1 repeats the semantic code)

Every header, text part and footer is tokenised on its own; byte pairs never merge across them. Prompts only grow:
the prompt of the next segment starts with the last prompt and the frames spoken to it, so a cache that holds
those columns can be read on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from fishjax.config import PromptLayout
from fishjax.errors import InvalidRequest
from fishjax.text.split import SPEAKER_TAG
from fishjax.text.tokenizer import IM_END, IM_START, Tokenizer

_SYSTEM = "convert the provided text to speech"
_SYSTEM_WITH_REFERENCES = "convert the provided text to speech reference to the following:\n\nText:\n"
_SPEECH = "\n\nSpeech:\n"
_VOICE = "<|voice|>"


class Mode(Enum):
    """How texts are read: as users need it, or with the original's defects, for comparison with it."""

    FIXED = "fixed"  # special tokens inside a text are ordinary characters
    REFERENCE = "reference"  # they are parsed, as in the original


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A transcript and the codes (C, T) int32 of its sound. Finished segments of a request are kept as these too."""

    text: str
    codes_KT: np.ndarray

    def __post_init__(self):
        object.__setattr__(self, "codes_KT", _as_codes(self.codes_KT))


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One entry of a sequence: parts in order, each a text or codes (C, T), after its speaker's tag if it has one."""

    parts: tuple[str | np.ndarray, ...]
    speaker: int | str | None = None
    add_end: bool = True  # close with <|im_end|>


@dataclass(frozen=True, slots=True, eq=False)
class EncodedSequence:
    """Columns (C+1, T) int32 and which of them are frames (T,) bool."""

    columns_CT: np.ndarray
    is_frame_T: np.ndarray


class Prompter:
    """Makes prompts for one model.

    Raises WeightsError when the tokenizer lacks a token of the layout, InvalidRequest for codes that do not fit.
    """

    def __init__(
        self, tokenizer: Tokenizer, num_codebooks: int, layout: PromptLayout = "chat", mode: Mode = Mode.FIXED
    ):
        self.tokenizer = tokenizer
        self.num_codebooks = num_codebooks
        self.layout = layout
        self.mode = mode
        for name in (IM_START, _VOICE) if layout == "chat" else ("<|interleave|>",):
            tokenizer.token_id(name)

    def prompt(self, references: Sequence[Reference], history: Sequence[Reference], text: str) -> np.ndarray:
        """Columns (C+1, T) int32 that ask for `text`, after `history`: the segments already spoken, oldest first.

        Layout "chat": a system message with the references, then one user and one assistant message a segment.

        Layout "interleave": `<|interleave|>`, then for each reference and each spoken segment `<|speaker:0|>`, its
        text, its frames, `<|im_end|>`; then `<|speaker:0|>` and `text`. So a spoken segment is one more reference,
        and the next prompt begins with this one. The original never spoke a second segment in this layout. In
        fixed mode a text that begins with a speaker tag keeps its own in the place of `<|speaker:0|>`.
        """
        if self.layout == "chat":
            conversation = Conversation(self)
            conversation.system(references)
            for segment in history:
                conversation.user(segment.text)
                conversation.assistant_history(segment.codes_KT)
            conversation.user(text)
            conversation.assistant_header()
            return conversation.columns_CT
        items = [self._interleaved(done.text, done.codes_KT) for done in (*references, *history)]
        return self.sequence([*items, self._interleaved(text)], modality="interleave").columns_CT

    def voice(self, references: Sequence[Reference]) -> np.ndarray:
        """What every prompt with these references begins with, whatever is spoken: columns (C+1, T) int32."""
        if self.layout == "chat":
            conversation = Conversation(self)
            conversation.system(references)
            return conversation.columns_CT
        items = [self._interleaved(reference.text, reference.codes_KT) for reference in references]
        return self.sequence(items, modality="interleave").columns_CT

    def sequence(self, items: Iterable[Item], modality: str | None) -> EncodedSequence:
        """Items one after the other, after the token of the modality: "interleave", "text", "voice" or None."""
        parts: list[tuple[np.ndarray, bool]] = []
        first: str | np.ndarray | None = None
        for item in items:
            tag = () if item.speaker is None else (f"<|speaker:{item.speaker}|>",)
            for part in (*tag, *item.parts):
                first = part if first is None else first
                if isinstance(part, str):
                    parts.append((self.text_columns(part), False))
                else:
                    parts.append((self.frame_columns(part), True))
            if item.add_end:
                first = IM_END if first is None else first
                parts.append((self._control_columns(IM_END), False))
        if modality is not None:
            token = f"<|{modality}|>"
            already = self.mode is Mode.REFERENCE and isinstance(first, str) and first.startswith(token)
            if not already:
                parts.insert(0, (self._control_columns(token), False))
        return EncodedSequence(
            self._join([columns_CT for columns_CT, _ in parts]),
            np.concatenate([np.zeros(0, bool), *(np.full(c.shape[1], is_frame) for c, is_frame in parts)]),
        )

    def text_columns(self, text: str) -> np.ndarray:
        """A caller's text, tokenised on its own, as columns (C+1, T) int32."""
        return self._columns_of(self.tokenizer.encode(text, allow_special=self.mode is Mode.REFERENCE))

    def frame_columns(self, codes_KT: np.ndarray) -> np.ndarray:
        """Codes (C, T) as columns (C+1, T) int32. Raises InvalidRequest when their shape or values do not fit."""
        codes_KT = _as_codes(codes_KT)
        if codes_KT.shape[0] != self.num_codebooks:
            raise InvalidRequest(f"codes have {codes_KT.shape[0]} codebooks, this model has {self.num_codebooks}")
        if codes_KT.size and (codes_KT.min() < 0 or codes_KT[0].max() >= self.tokenizer.num_semantic):
            raise InvalidRequest(
                f"codes run from {codes_KT.min()} to {codes_KT[0].max()} in the semantic codebook, "
                f"which has 0..{self.tokenizer.num_semantic - 1}"
            )
        return np.concatenate([codes_KT[:1] + np.int32(self.tokenizer.semantic_begin_id), codes_KT])

    def _interleaved(self, text: str, codes_KT: np.ndarray | None = None) -> Item:
        speaker, body = 0, text
        if self.mode is Mode.FIXED and (tag := SPEAKER_TAG.match(text)):
            speaker, body = tag[0][len("<|speaker:") : -len("|>")], text[tag.end() :]
        if codes_KT is None:
            return Item((body,), speaker, add_end=False)
        return Item((body, codes_KT), speaker)

    def _control_columns(self, text: str) -> np.ndarray:
        """Our own scaffolding: its special tokens count in both modes."""
        return self._columns_of(self.tokenizer.encode(text, allow_special=True))

    def _columns_of(self, ids: list[int]) -> np.ndarray:
        columns_CT = np.zeros((self.num_codebooks + 1, len(ids)), np.int32)
        columns_CT[0] = ids
        return columns_CT

    def _join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([np.zeros((self.num_codebooks + 1, 0), np.int32), *parts], axis=1)


class Conversation:
    """A chat prompt that only grows: `columns_CT` at any time is a prefix of `columns_CT` later.

    system -> (user -> assistant_header -> assistant_history) per segment; generate after assistant_header.
    """

    def __init__(self, prompter: Prompter):
        self._prompter = prompter
        self._parts: list[np.ndarray] = []
        self._header_open = False

    @property
    def columns_CT(self) -> np.ndarray:
        """Everything so far, (C+1, T) int32."""
        return self._prompter._join(self._parts)

    def system(self, references: Sequence[Reference] = ()) -> None:
        """The task and the voices. A reference without a speaker tag is tagged with its place in the list."""
        self._header("system")
        if references:
            texts = [
                ref.text if SPEAKER_TAG.search(ref.text) else f"<|speaker:{i}|>{ref.text}"
                for i, ref in enumerate(references)
            ]
            self._parts.append(self._prompter.text_columns(_SYSTEM_WITH_REFERENCES))
            self._parts.append(self._prompter.text_columns("\n".join(texts)))
            self._parts.append(self._prompter.text_columns(_SPEECH))
            self._parts.extend(self._prompter.frame_columns(ref.codes_KT) for ref in references)
        else:
            self._parts.append(self._prompter.text_columns(_SYSTEM))
        self._footer()

    def user(self, text: str) -> None:
        """The text of a segment, verbatim."""
        self._header("user")
        self._parts.append(self._prompter.text_columns(text))
        self._footer()

    def assistant_header(self) -> None:
        """Open the assistant's message: the model speaks from here."""
        self._header("assistant", _VOICE)
        self._header_open = True

    def assistant_history(self, codes_KT: np.ndarray) -> None:
        """What the assistant spoke, codes (C, T), closed. Opens the message first if it is not open."""
        if not self._header_open:
            self.assistant_header()
        self._header_open = False
        self._parts.append(self._prompter.frame_columns(codes_KT))
        self._footer()

    def _header(self, role: str, modality: str = "") -> None:
        if self._header_open:
            raise ValueError("the assistant's message is open: assistant_history must close it first")
        self._parts.append(self._prompter._control_columns(f"{IM_START}{role}\n{modality}"))

    def _footer(self) -> None:
        self._parts.append(self._prompter._control_columns(f"{IM_END}\n"))


def _as_codes(codes_KT: np.ndarray) -> np.ndarray:
    codes_KT = np.asarray(codes_KT)
    if codes_KT.ndim != 2 or (codes_KT.size and not np.issubdtype(codes_KT.dtype, np.integer)):
        raise InvalidRequest(
            f"codes must be integers of shape (codebooks, frames), not {codes_KT.dtype} {codes_KT.shape}"
        )
    return codes_KT.astype(np.int32)
