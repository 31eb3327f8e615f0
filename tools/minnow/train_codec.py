"""Trains minnow's codec on the shards of `make_corpus`, from the first hour on; see README.md.

The corpus lies on the device (int16), crops are cut there, and several steps run in one call, so the host only
feeds shards, sets the rate, judges and saves. Writes `codec/` (public layout), the weights that were judged best, and
results.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.bench.gate.judge import mel_distance
from fishjax.codec import Codec
from fishjax.config import CodecConfig
from tools.minnow import training
from tools.minnow.codec_steps import decoder_state, make_decoder_steps, make_steps
from tools.minnow.codes import Encoder
from tools.minnow.convs import KINDS, Table, convolutions, measure, plain_kind
from tools.minnow.feeder import Feeder, cut_audio, cut_audio_and_codes
from tools.minnow.judge import Judges
from tools.minnow.make_corpus import HELD_OUT_SHARD, read_shard
from tools.minnow.shapes import CODEC, SMOKE_CODEC, SPECTRAL_DECODER, load_codec, save_codec, write_json

_CHUNK_ROWS = 4096
_CRITICS_RATE = 3e-4
_EVALUATED = 16  # held-out clips a call


def quiet_start(params: training.Params) -> training.Params:
    """Residual branches at a quarter and the last convolution at a twentieth, so that tanh does not start saturated."""
    last = max(int(name.split(".")[2]) for name in params if name.startswith("decoder.model."))

    def scale(name: str) -> float:
        if name == f"decoder.model.{last}.conv.weight":
            return 0.05
        return 0.25 if name.endswith(".block.3.conv.weight") else 1.0

    return {name: scale(name) * value for name, value in params.items()}


def fresh_spectral_decoder(
    model: training.Model, raw: dict[str, Any], seed: int
) -> tuple[CodecConfig, training.Model, dict[str, Any]]:
    """The codec of `model` with a new spectral decoder, its blocks' branches each at their share; raw config too."""
    raw = {**raw, **SPECTRAL_DECODER, "decoder_rates": [math.prod(raw["decoder_rates"])]}
    codec = Codec(CodecConfig.from_dict(raw), rngs=nnx.Rngs(seed))
    made = training.Model(codec)
    share = 1 / codec.config.decoder_layers

    def start(name: str, value: jax.Array) -> jax.Array:
        if not name.startswith("decoder."):
            return model.params[name]
        return jnp.full_like(value, share) if name.endswith(".gamma") else value

    made.params = {name: start(name, value) for name, value in made.params.items()}
    return codec.config, made, raw


class Evaluation:
    """Some of the held-out clips, padded to the longest of all, and what is measured on them.

    `prepare(audio_BT)` makes, once, what a codec is given to reconstruct them from: the sound itself, or its codes.
    """

    def __init__(self, corpus: Path, config: CodecConfig, closed_items: slice, num_free: int, prepare: Callable):
        pcm, starts, records = read_shard(corpus / f"{HELD_OUT_SHARD:05d}.npz")
        clips = [pcm[a:b].astype(np.float32) / 32768 for a, b in itertools.pairwise(starts)]
        closed = [i for i, record in enumerate(records) if record["kind"] == "closed"][closed_items]
        free = [i for i, record in enumerate(records) if record["kind"] == "free"][:num_free]
        self.num_closed, row = len(closed), config.samples_per_frame
        self.clips, self.texts = [clips[i] for i in closed + free], [records[i]["text"] for i in closed + free]
        longest = -(-max(map(len, clips)) // row) * row
        padded_BT = np.zeros((-(-len(self.clips) // _EVALUATED) * _EVALUATED, longest), np.float32)
        for row_T, clip in zip(padded_BT, self.clips, strict=False):
            row_T[: len(clip)] = clip
        self._given = [prepare(padded_BT[i : i + _EVALUATED]) for i in range(0, len(padded_BT), _EVALUATED)]
        self._rate_hz = config.sample_rate_hz

    def reconstruct(self, run: Callable, params: training.Params) -> list[np.ndarray]:
        """The clips through the codec (`run(params, given) -> audio_BT`), at their own lengths."""
        made = np.concatenate([np.asarray(run(params, given)) for given in self._given])
        return [audio[: len(clip)] for audio, clip in zip(made, self.clips, strict=False)]

    def mel(self, made: list[np.ndarray]) -> tuple[float, float]:
        """Mean log10-mel L1 of the closed-vocabulary clips and of the free ones."""
        distances = [mel_distance(a, b, self._rate_hz) for a, b in zip(made, self.clips, strict=True)]
        free = distances[self.num_closed :]
        return float(np.mean(distances[: self.num_closed])), float(np.mean(free)) if free else float("nan")

    def energy(self, made: list[np.ndarray]) -> float:
        """Energy of what was made over that of the clips."""
        return float(sum(np.sum(np.square(a)) for a in made) / sum(np.sum(np.square(b)) for b in self.clips))

    def wer(self, judges: Judges, made: list[np.ndarray]) -> tuple[float, list[str]]:
        """Word error rate of the closed-vocabulary clips."""
        return judges.wer(self.texts[: self.num_closed], made[: self.num_closed], self._rate_hz)


def main() -> None:
    """Command line; see README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--codes", type=Path, help="with --decoder-only: keeps the codes here; none: made in each run")
    parser.add_argument("--out", type=Path, help="results; default $OUT")
    parser.add_argument("--resume", type=Path, help="folder of a codec to go on from (config.json, model.safetensors)")
    parser.add_argument("--seed", type=int, default=0, help="of crops and gains: another for each stage")
    parser.add_argument("--decoder-only", action="store_true", help="with --resume: the codes stay as they are")
    parser.add_argument(
        "--new-spectral-decoder", action="store_true", help="with --decoder-only: in place of the codec's own decoder"
    )
    parser.add_argument("--adversarial", action="store_true", help="with --decoder-only: against critics as well")
    parser.add_argument("--critics-alone", type=int, default=300, help="steps before the decoder feels the critics")
    parser.add_argument("--critics-weight", type=float, default=1.0, help="in what the decoder minimises")
    parser.add_argument("--minutes", type=float, default=8.5, help="wall clock, compiling and judging included")
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--frames", type=int, default=64, help="frames a crop")
    parser.add_argument(
        "--long-frames", type=int, default=0, help="frames a crop in the last third, batch shrunk; 0: one shape"
    )
    parser.add_argument("--steps-per-call", type=int, default=10)
    parser.add_argument("--rate", type=float, default=8e-4)
    parser.add_argument("--plain-steps", type=int, default=300, help="steps as an autoencoder before quantising")
    parser.add_argument("--conv", choices=["auto", *KINDS], default="auto")
    parser.add_argument("--first-minutes-of-audio", type=float, default=40)
    parser.add_argument("--capacity-hours", type=float, default=26)
    parser.add_argument(
        "--judge-every-s", type=float, default=75, help="the held-out clips; on a CPU it takes its time"
    )
    parser.add_argument("--judges", type=int, default=4, help="processes that run pocketsphinx")
    parser.add_argument("--smoke", action="store_true", help="tiny codec, tiny batches: only whether it runs")
    arguments = parser.parse_args()
    if arguments.adversarial and not arguments.decoder_only:
        parser.error("--adversarial trains the decoder side only: add --decoder-only")
    if arguments.new_spectral_decoder and not (arguments.decoder_only and arguments.resume):
        parser.error("--new-spectral-decoder takes all else from a codec: add --decoder-only and --resume")
    if arguments.smoke:
        arguments.batch, arguments.frames, arguments.steps_per_call = 2, 16, 2
        arguments.plain_steps, arguments.first_minutes_of_audio, arguments.capacity_hours = 10, 3, 0.2
        arguments.critics_alone, arguments.judges, arguments.judge_every_s = 10, 1, 15
    clock = training.Clock(arguments.minutes)
    out = training.out_folder(arguments.out)
    log = training.Log(out / "codec_log.txt", clock)
    training.enable_compile_cache()
    log(f"devices {jax.devices()}, jax {jax.__version__}")
    Trainer(arguments, clock, out, log).run()
    sys.stdout.flush()
    os._exit(0)  # threads that still compile or read are not waited for


class Trainer:
    """The run: feed, step, judge, save."""

    def __init__(self, arguments: argparse.Namespace, clock: training.Clock, out: Path, log: training.Log):
        self.arguments, self.clock, self.out, self.log = arguments, clock, out, log
        self.raw = SMOKE_CODEC if arguments.smoke else CODEC
        if arguments.resume:
            codec, self.raw = load_codec(arguments.resume)
            arguments.plain_steps = 0
        else:
            codec = Codec(CodecConfig.from_dict(self.raw), rngs=nnx.Rngs(0))
        self.config = codec.config
        self.model = training.Model(codec)
        if arguments.new_spectral_decoder:
            self.config, self.model, self.raw = fresh_spectral_decoder(self.model, self.raw, arguments.seed)
        if not arguments.resume:
            self.model.params = quiet_start(self.model.params)
        self.optimiser = training.adamw(0.8, 0.99, 1e-2)
        self.step = 0
        if arguments.decoder_only:
            self.state = decoder_state(
                self.model.params, self.optimiser, arguments.seed, adversarial=arguments.adversarial
            )
        else:
            self.state = {
                "params": jax.tree.map(jnp.array, self.model.params),
                "opt": self.optimiser.init(self.model.params),
                "use_KN": jnp.ones((self.config.num_codebooks, self.config.semantic_codebook_size)),
                "key": jax.random.key(arguments.seed),
            }
        self.threads = ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2))
        self.judges = Judges(arguments.judges)
        self.judging: Future | None = None
        self.history: list[dict[str, Any]] = []
        self.best: tuple[float, training.Params] = (float("inf"), self.model.params)
        log(f"codec of {training.count_parameters(self.model.params):,} parameters")

    # --- the corpus on the device

    def _start_feeding(self) -> None:
        """Waits for the first minutes of audio; by then the encoder's programs have been traced too."""
        arguments, row = self.arguments, self.config.samples_per_frame
        rows_a_minute = 60 * self.config.frame_rate_hz
        cut = cut_audio_and_codes(row, self._encoder(), arguments.codes) if arguments.decoder_only else None
        self.feeder = Feeder(
            arguments.corpus,
            cut or cut_audio(row),
            512 if arguments.smoke else _CHUNK_ROWS,
            int(60 * arguments.capacity_hours * rows_a_minute),
        )
        while self.feeder.num_rows < arguments.first_minutes_of_audio * rows_a_minute and not self.feeder.done:
            time.sleep(0.2)
            self.feeder.feed()
        if not self.feeder.num_rows:
            training.fail(f"{arguments.corpus} holds less sound than is fed at a time")
        self.log(f"{self._hours():.2f} h of audio on the device")

    def _encoder(self) -> Encoder:
        return Encoder(self.model.build(self.model.params), rows=4 if self.arguments.smoke else 64)

    def _hours(self) -> float:
        return self.feeder.num_rows / self.config.frame_rate_hz / 3600

    # --- programs

    def _choose_convolutions(self) -> None:
        """How each width and dilation of the residual units is run: measured here, at this batch."""
        arguments, config = self.arguments, self.config
        self.table: Table = {}
        if arguments.conv != "auto":
            return
        widths = {}
        steps = arguments.frames * config.samples_per_frame
        for index, rate in enumerate(config.encoder_rates):
            widths[config.encoder_dim * 2**index] = steps
            steps //= rate
        shapes = [(channels, size, dilation) for channels, size in widths.items() for dilation in (1, 3, 9)]
        self.table = measure(shapes, arguments.batch, self.threads, self.log)

    def _lower(self, batch: int, frames: int):
        arguments = self.arguments
        make = make_decoder_steps if arguments.decoder_only else make_steps
        steps = make(self.model, self.optimiser, self.config, batch, frames, arguments.steps_per_call)
        with convolutions(self.table, "im2col" if arguments.conv == "auto" else arguments.conv):
            return steps.lower(self.state, self.feeder.arrays, *self._controls())

    def _compile(self, batch: int, frames: int):
        """The program of the training steps; the corpus is fed meanwhile."""
        began = time.monotonic()
        lowered = self._lower(batch, frames)
        traced = time.monotonic()
        program = self.threads.submit(lowered.compile)
        while not program.done():
            self.feeder.feed()
            time.sleep(0.1)
        self.log(f"traced in {traced - began:.0f} s, compiled in {time.monotonic() - traced:.0f} s")
        return program.result()

    def _controls(self):
        """What the compiled programs are told at this moment; see `codec_steps`."""
        progress, arguments = self.clock.progress, self.arguments
        rows = jnp.int32(self.feeder.num_rows)
        rate = jnp.float32(training.cosine_rate(progress, arguments.rate, 5e-5, self.step, 100))
        if arguments.decoder_only:
            felt = min(1.0, max(0.0, self.step / max(1, arguments.critics_alone) - 1))
            critics_rate = training.cosine_rate(progress, _CRITICS_RATE, 5e-5, self.step, 100)
            return rows, rate, jnp.float32(critics_rate), jnp.float32(arguments.critics_weight * felt)
        quantise = self.step >= arguments.plain_steps
        refresh = 2 if not quantise else int(progress < 0.7)
        return rows, rate, jnp.bool_(quantise), jnp.int32(refresh)

    def _call(self, program) -> dict[str, jax.Array]:
        self.state, shown = program(self.state, self.feeder.arrays, *self._controls())
        self.step += self.arguments.steps_per_call
        return shown

    # --- measuring and saving

    def _judge(self, params: training.Params, made: list[np.ndarray], step: int) -> None:
        """Keeps and saves the parameters if word error rate + mel distance is the least so far."""
        mel, mel_free = self.evaluation.mel(made)
        wer, _ = self.evaluation.wer(self.judges, made)
        energy = self.evaluation.energy(made)
        row = {"step": step, "mel_closed": mel, "mel_free": mel_free, "wer_percent": 100 * wer, "energy": energy}
        self.history.append(row)
        self.log(
            f"  judged at step {step}: log10-mel L1 {mel:.4f} (free {mel_free:.4f}), WER {100 * wer:.2f} %,"
            f" energy {energy:.3f}"
        )
        if wer + mel < self.best[0]:
            self.best = (wer + mel, params)
            save_codec(self.out / "codec", self.model, params, self.raw)
        self._write_results()

    def _write_results(self, **more: float) -> None:
        results = {"history": self.history, "best_wer_plus_mel": self.best[0], **more}
        write_json(self.out / "codec_results.json", results)

    def _begin_judging(self) -> None:
        if self.judging is not None and not self.judging.done():
            return
        params = self._rounded()
        made = self.evaluation.reconstruct(self.run_codec, params)
        self.judging = self.threads.submit(self._judge, params, made, self.step)

    def _rounded(self) -> training.Params:
        """The parameters as they are shipped: the averaged ones if any, bfloat16 values, computed with in float32."""
        params = {**self.state["params"], **self.state.get("average", {})}
        return jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), params)

    def run(self) -> None:
        """Trains until the clock is out, then saves, judges once more and saves samples."""
        arguments, log = self.arguments, self.log
        self._start_feeding()
        chosen_by, num_free = (8, 2) if arguments.smoke else (64, 24)
        prepare = self._prepare()
        self.evaluation = Evaluation(arguments.corpus, self.config, slice(chosen_by), num_free, prepare)
        self.run_codec = jax.jit(lambda params, given: self._sound(params, given))
        self._choose_convolutions()
        program = self._compile(arguments.batch, arguments.frames)
        long_batch = max(1, round(arguments.batch * arguments.frames / max(1, arguments.long_frames)))
        long_program = None
        if arguments.long_frames:
            lowered = self._lower(long_batch, arguments.long_frames)
            long_program = self.threads.submit(lowered.compile)
        reserve_s = 3 if arguments.smoke else 25  # for the last judging and saving
        if arguments.resume and not arguments.new_spectral_decoder:
            self._begin_judging()  # what is gone on from may stay the best
        printed = judged = self.clock.elapsed_s
        counted, shown = self.step, None
        while self.clock.elapsed_s < 60 * arguments.minutes - reserve_s:
            self.feeder.feed()
            if long_program is not None and self.clock.progress > 0.62 and long_program.done():
                program, long_program = long_program.result(), None
                log(f"crops of {arguments.long_frames} frames, batch {long_batch}, from step {self.step}")
            for _ in range(3):
                shown = self._call(program)
            shown = {name: float(value) for name, value in shown.items()}
            now = self.clock.elapsed_s
            if now - printed > 10:
                parts = " ".join(f"{name} {value:.4f}" for name, value in shown.items())
                ms = 1000 * (now - printed) / max(1, self.step - counted)
                log(f"step {self.step} {ms:.1f} ms | {parts} | {self._hours():.1f} h")
                printed, counted = now, self.step
                if not np.isfinite(shown["loss"]):
                    raise FloatingPointError(f"the loss is {shown['loss']} at step {self.step}")
            if now - judged > arguments.judge_every_s:
                self._begin_judging()
                judged = now
        if self.judging is not None:
            self.judging.result()
        params = self._rounded()
        self._judge(params, self.evaluation.reconstruct(self.run_codec, params), self.step)
        made = self.evaluation.reconstruct(self.run_codec, self.best[1])
        rest = slice(chosen_by, 2 * chosen_by if arguments.smoke else None)
        others = Evaluation(arguments.corpus, self.config, rest, 0, prepare)
        wer, _ = others.wer(self.judges, others.reconstruct(self.run_codec, self.best[1]))
        log(f"kept: WER + mel {self.best[0]:.4f}; on {others.num_closed} clips not chosen by: WER {100 * wer:.2f} %")
        self._write_results(others_wer_percent=100 * wer)
        pcm = {f"clip{i}": (made[i] * 32767).astype(np.int16) for i in (*range(4), *range(len(made) - 4, len(made)))}
        np.savez(self.out / "codec_samples.npz", **pcm)
        self.judges.close()

    def _prepare(self) -> Callable:
        """What is judged is made of the sound, or, when the codes stay as they are, of codes that are made once."""
        if not self.arguments.decoder_only:
            return lambda audio_BT: audio_BT

        def encode(params: training.Params, audio_BT: jax.Array) -> jax.Array:
            with convolutions({}, plain_kind()):
                return self.model.build(params).encode(audio_BT)[0]

        return partial(jax.jit(encode), self.model.params)

    def _sound(self, params: training.Params, given: jax.Array) -> jax.Array:
        codec = self.model.build(params)
        with convolutions({}, plain_kind()):
            return codec.decode(given if self.arguments.decoder_only else codec.encode(given)[0])


if __name__ == "__main__":
    main()
