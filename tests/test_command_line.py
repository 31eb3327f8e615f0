"""`python -m fishjax`: what works; and mistakes of every kind: one sentence, exit code 2, before a model is loaded."""

from __future__ import annotations

import io
import json
import sys
import time

import numpy as np
import pytest
import soundfile

from fishjax import __main__ as command_line
from fishjax.status_line import StatusLine

TONE = (0.3 * np.sin(2 * np.pi * 180 * np.arange(44_100) / 22_050)).astype(np.float32)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a command line in this process: (exit code, stdout, stderr)."""

    def command(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fishjax", *map(str, arguments)])
        code = 0
        try:
            command_line.main()
        except SystemExit as end:
            code = end.code or 0
        return code, *capsys.readouterr()

    return command


@pytest.fixture
def refused(run, monkeypatch):
    """Runs a command line that must be refused, before a model is loaded; returns its sentence."""

    def command(*arguments: object) -> str:
        with monkeypatch.context() as patch:
            patch.setattr("fishjax.speech.load_model", lambda *_: pytest.fail("a model was loaded"))
            code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and err.count("\n") == 1
        return err

    return command


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--temperature", "nan", "temperature must be above 0 and below 2, not nan"),
        ("--temperature", "0", "not 0.0"),
        ("--temperature", "2", "not 2.0"),
        ("--top-p", "1.01", "top_p must be above 0 and at most 1, not 1.01"),
        ("--top-k", "0", "top_k must be a whole number in 1"),
        ("--max-frames", "0", "max_frames must be a whole number in 1"),
        ("-o", "no/such/folder.wav", "the folder no/such does not exist"),
        ("-o", ".", "it is a folder"),
        ("-o", "x" * 300, "File name too long"),
        ("--voice", "clip.wav", "--voice and --voice-text go together"),
        ("--voice-text", "hello", "--voice and --voice-text go together"),
    ],
)
def test_wrong_options_are_named_before_anything_is_loaded(refused, option, value, says):
    assert says in refused("say", "hello", option, value)


@pytest.mark.parametrize("text", ["", " \n\t"])
def test_blank_text_is_refused(refused, text):
    assert "TEXT is empty" in refused("say", text)


def test_a_place_without_permission_is_refused(refused, monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    assert "no permission" in refused("say", "hello", "-o", tmp_path / "x.wav")


def sound_file(audio_T, suffix="WAV", rate_hz=22_050, **options) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, audio_T, rate_hz, format=suffix, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no such file"),
        (b"", "is empty"),
        (b"this is text\n" * 20, "cannot be decoded"),
        (sound_file(TONE)[:30], "cannot be decoded"),
        (sound_file(TONE[:1]), "lasts 0.00 s"),
        (sound_file(np.tile(TONE, 40)), "longer than 60 s"),
    ],
)
def test_a_clip_that_is_no_voice_is_refused(refused, tmp_path, content, says):
    clip = tmp_path / "clip.wav"
    if content is not None:
        clip.write_bytes(content)
    assert says in refused("say", "hello", "--voice", clip, "--voice-text", "hello")


def test_a_clip_without_words_is_refused(refused, tmp_path):
    clip = tmp_path / "clip.wav"
    clip.write_bytes(sound_file(TONE))
    assert "--voice-text is blank" in refused("say", "hello", "--voice", clip, "--voice-text", " ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("verify", "nowhere"), "there is no folder nowhere"),
        (("convert", "nowhere", "out"), "there is no model folder at nowhere"),
        (("convert", "nowhere", "out", "--precision", "slow=fp9"), "slow takes one of fp32, bf16, fp8, mxfp8"),
    ],
)
def test_other_verbs_refuse_as_well(refused, arguments, says):
    assert says in refused(*arguments)


def test_a_model_that_is_not_there_is_one_sentence(run):
    code, out, err = run("say", "hello", "--model", "nowhere")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == "error: there is no model folder at nowhere"


def test_a_missing_extra_says_what_to_install(run, monkeypatch, tmp_path):
    clip = tmp_path / "clip.wav"
    clip.write_bytes(sound_file(TONE))
    monkeypatch.setitem(sys.modules, "soundfile", None)
    monkeypatch.delitem(sys.modules, "fishjax.audio.read", raising=False)
    monkeypatch.delattr("fishjax.audio.read", raising=False)
    code, _, err = run("say", "hello", "--voice", clip, "--voice-text", "hello")
    assert (code, err) == (2, "error: this needs the package soundfile: pip install 'fishjax[audio]'\n")


def test_help_names_every_default(run):
    for verb in ("say", "convert", "verify"):
        code, out, _ = run(verb, "--help")
        assert code == 0
        words = " ".join(out.replace("│", " ").split())
        if verb == "say":
            assert "minnow, which ships with fishjax" in words and "the model's own" in words
        if verb == "convert":
            assert "a module that is not named is bf16" in words


def test_say_follows_a_clip_and_writes_what_it_reports(run, tmp_path):
    clip, out_path = tmp_path / "clip.mp3", tmp_path / "out.wav"
    clip.write_bytes(sound_file(np.stack([TONE, TONE], 1), "MP3", 44_100))
    options = ("--max-len", 256, "--max-frames", 3, "--seed", 1, "-o", out_path, "--json")
    code, out, err = run("say", "open the door", "--voice", clip, "--voice-text", "open", *options)
    assert code == 0
    report = json.loads(out.splitlines()[-1])
    audio_T, rate_hz = soundfile.read(out_path)
    assert report["frames"] == 3 and report["finish_reason"] == "length"
    assert (len(audio_T), rate_hz) == (3 * 1024, 22_050)
    assert report["audio_seconds"] == round(len(audio_T) / rate_hz, 3)
    assert "reading minnow" in err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_status_line_on_a_terminal_is_written_over_and_taken_away():
    stream = Terminal()
    with StatusLine(stream) as status:
        status("reading")
        status("compiling")
    assert stream.getvalue() == "\r\x1b[Kreading\r\x1b[Kcompiling\r\x1b[K"


def test_a_status_line_in_a_file_is_whole_lines_and_not_too_many(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    stream = io.StringIO()
    status = StatusLine(stream)
    for now_s, what in ((100.0, "a"), (100.5, "b"), (101.9, "c"), (102.0, "d"), (111.9, "d"), (115.0, "e")):  # noqa: B007
        status(what)
    assert stream.getvalue() == "a\nd\ne\n"
