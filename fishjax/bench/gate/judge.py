"""The judges: words that pocketsphinx hears over the closed vocabulary, and the log10-mel distance of two sounds.

pocketsphinx (BSD, its US English model inside the wheel; extra `bench`) hears with a grammar that allows any words of
the closed vocabulary in any order: nothing tells it that a colour comes before a noun. Knows sound and words only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import signal

from .texts import CLOSED_VOCABULARY

_JUDGE_RATE_HZ = 16000
GRAMMAR = f"#JSGF V1.0;\ngrammar closed;\npublic <prompt> = ({' | '.join(CLOSED_VOCABULARY)})+;\n"


def word_errors(wanted: Sequence[str], heard: Sequence[str]) -> int:
    """Edit distance in words: substitutions, insertions and deletions cost one each."""
    row = list(range(len(heard) + 1))
    for i, word in enumerate(wanted, start=1):
        previous, row[0] = row[0], i
        for j, other in enumerate(heard, start=1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1]


def hear(audio_T: np.ndarray, rate_hz: int, *, second_search: bool = True) -> str:
    """What pocketsphinx hears in float audio (-1 to 1, mono): words of the closed vocabulary, "" for nothing.

    Its second search, for the best path among all it considered, takes minutes over seconds of noise.
    """
    import pocketsphinx

    common = int(np.gcd(rate_hz, _JUDGE_RATE_HZ))
    audio = signal.resample_poly(np.asarray(audio_T, np.float32), _JUDGE_RATE_HZ // common, rate_hz // common)
    # Silence on both sides: the recogniser needs a little of it to settle.
    audio = np.pad(audio, _JUDGE_RATE_HZ // 5)
    pcm = (np.clip(audio, -1, 1) * 32767).astype(np.int16)
    # A new one each time (0.15 s): one that has heard something hears the next sound a little differently.
    decoder = pocketsphinx.Decoder(
        hmm=pocketsphinx.get_model_path("en-us/en-us"),
        dict=pocketsphinx.get_model_path("en-us/cmudict-en-us.dict"),
        lm=None,
        bestpath=second_search,
        loglevel="FATAL",
    )
    decoder.add_jsgf_string("closed", GRAMMAR)
    decoder.activate_search("closed")
    decoder.start_utt()
    decoder.process_raw(pcm.tobytes(), no_search=False, full_utt=True)
    decoder.end_utt()
    hypothesis = decoder.hyp()
    return "" if hypothesis is None else hypothesis.hypstr


def mel_filters(rate_hz: int, window: int, bands: int) -> np.ndarray:
    """Triangles on the mel scale (HTK formula), each summing to about its width's share: (bands, window / 2 + 1)."""
    top = 2595 * np.log10(1 + rate_hz / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, bands + 2) / 2595) - 1)
    freqs = np.linspace(0, rate_hz / 2, window // 2 + 1)
    rising = (freqs - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - freqs) / (edges[2:] - edges[1:-1])[:, None]
    filters = np.maximum(0, np.minimum(rising, falling))
    # A band narrower than a bin would be empty: give it its nearest bin.
    empty = np.flatnonzero(filters.sum(axis=1) < 0.5)
    filters[empty, np.abs(freqs[None] - edges[1:-1][empty, None]).argmin(axis=1)] = 1.0
    return (filters / np.maximum(filters.sum(axis=1, keepdims=True), 1.0)).astype(np.float32)


def log_mel(audio_T: np.ndarray, rate_hz: int = 22050, window: int = 1024, bands: int = 80) -> np.ndarray:
    """log10 of mel-banded magnitudes, floored at 1e-2 (a lower floor lets digital silence rule): (frames, bands)."""
    hop = window // 4
    padded = np.pad(np.asarray(audio_T, np.float32), window // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::hop] * signal.get_window("hann", window)
    magnitude = np.abs(np.fft.rfft(frames, axis=-1))
    return np.log10(np.maximum(magnitude @ mel_filters(rate_hz, window, bands).T, 1e-2))


def mel_distance(audio_T: np.ndarray, other_T: np.ndarray, rate_hz: int = 22050) -> float:
    """Mean absolute difference of the log10-mels (1,024-sample window, 80 bands). Recognisers like less than 0.12."""
    length = min(len(audio_T), len(other_T))
    return float(np.abs(log_mel(audio_T[:length], rate_hz) - log_mel(other_T[:length], rate_hz)).mean())
