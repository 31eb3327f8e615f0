"""Trains minnow's codec on the shards of `make_corpus`, from the first hour on; see README.md.

The corpus lies on the device (int16), crops are cut there, and several steps run in one call, so the host only
feeds shards, sets the rate, judges and saves. Writes `codec/` (public layout) and results.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fishjax.bench.gate.judge import mel_distance
from fishjax.codec import Codec
from fishjax.config import CodecConfig
from tools.minnow import codec_loss, training
from tools.minnow.convs import KINDS, Table, convolutions, measure
from tools.minnow.judge import Judges
from tools.minnow.make_corpus import HELD_OUT_SHARD, finished_shards, read_shard
from tools.minnow.shapes import CODEC, SMOKE_CODEC, load_codec, save_codec, write_json

_CHUNK_ROWS = 4096


class Feeder:
    """Reads finished shards in a thread and hands them over as (rows, samples_per_frame) int16 chunks."""

    def __init__(self, folder: Path, row: int, chunk_rows: int, max_rows: int):
        self._folder, self._row, self._chunk_rows, self._max_rows = folder, row, chunk_rows, max_rows
        self.chunks: queue.Queue[np.ndarray] = queue.Queue(maxsize=8)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        seen: set[Path] = set()
        held, held_size, sent = [], 0, 0
        wanted = self._row * self._chunk_rows
        while sent + self._chunk_rows <= self._max_rows:
            last = (self._folder / "done").exists()
            for path in finished_shards(self._folder):
                if path in seen:
                    continue
                seen.add(path)
                pcm, _, _ = read_shard(path)
                held.append(pcm)
                held_size += len(pcm)
                while held_size >= wanted and sent + self._chunk_rows <= self._max_rows:
                    joined = np.concatenate(held)
                    self.chunks.put(joined[:wanted].reshape(self._chunk_rows, self._row))
                    held, held_size, sent = [joined[wanted:]], held_size - wanted, sent + self._chunk_rows
            if last:
                return
            time.sleep(1.0)


def make_steps(
    model: training.Model, optimiser, config: CodecConfig, batch: int, frames: int, steps: int, decoder_only: bool
):
    """The jitted `steps` updates: (state, audio_RS, num_rows, rate, quantise, refresh) -> (state, mean parts)."""
    rate_hz, row = config.sample_rate_hz, config.samples_per_frame

    def step(state: dict[str, Any], audio_RS, num_rows, rate, quantise, refresh):
        key, crop_key, gain_key, book_key, seed_key = jax.random.split(state["key"], 5)
        first_B = jax.random.randint(crop_key, (batch,), 0, num_rows - frames)
        crops = jax.vmap(lambda first: jax.lax.dynamic_slice(audio_RS, (first, 0), (frames, row)))(first_B)
        gain_key, which_key = jax.random.split(gain_key)
        gains = jax.random.uniform(gain_key, (batch, 1), minval=0.4, maxval=1.2)
        gains = jnp.where(jax.random.uniform(which_key, (batch, 1)) < 0.6, 1.0, gains)
        wanted_BT = jnp.clip(crops.reshape(batch, -1).astype(jnp.float32) / 32768 * gains, -1, 1)

        def objective(params):
            codec = model.build(codec_loss.cast_for_compute(params))
            if decoder_only:
                return codec_loss.decoder_loss(codec, wanted_BT, rate_hz)
            return codec_loss.loss(codec, wanted_BT, book_key, quantise, rate_hz)

        grads, parts = jax.grad(objective, has_aux=True)(state["params"])
        updates, opt = optimiser.update(grads, state["opt"], state["params"])
        params, use_KN = training.apply(state["params"], updates, rate), state["use_KN"]
        if decoder_only:
            frozen = {n: p for n, p in state["params"].items() if not n.startswith(codec_loss.DECODER_SIDE)}
            params = {**params, **frozen}
        else:
            params, use_KN = codec_loss.refresh_books(params, use_KN, parts, seed_key, refresh)
        shown = {name: part for name, part in parts.items() if part.ndim == 0}
        return {"params": params, "opt": opt, "use_KN": use_KN, "key": key}, shown

    def many(state, audio_RS, num_rows, rate, quantise, refresh):
        def body(state, _):
            return step(state, audio_RS, num_rows, rate, quantise, refresh)

        state, shown = jax.lax.scan(body, state, None, length=steps)
        return state, jax.tree.map(lambda x: jnp.mean(x), shown)

    return jax.jit(many, donate_argnums=0)


def quiet_start(params: training.Params) -> training.Params:
    """Residual branches at a quarter and the last convolution at a twentieth, so that tanh does not start saturated."""
    last = max(int(name.split(".")[2]) for name in params if name.startswith("decoder.model."))

    def scale(name: str) -> float:
        if name == f"decoder.model.{last}.conv.weight":
            return 0.05
        return 0.25 if name.endswith(".block.3.conv.weight") else 1.0

    return {name: scale(name) * value for name, value in params.items()}


class Evaluation:
    """The held-out clips, padded to one shape, and what is measured on them."""

    def __init__(self, corpus: Path, config: CodecConfig, num_closed: int, num_free: int):
        pcm, starts, records = read_shard(corpus / f"{HELD_OUT_SHARD:05d}.npz")
        clips = [pcm[a:b].astype(np.float32) / 32768 for a, b in itertools.pairwise(starts)]
        closed = [i for i, record in enumerate(records) if record["kind"] == "closed"][:num_closed]
        free = [i for i, record in enumerate(records) if record["kind"] == "free"][:num_free]
        self.num_closed, row = len(closed), config.samples_per_frame
        self.clips, self.texts = [clips[i] for i in closed + free], [records[i]["text"] for i in closed + free]
        longest = -(-max(map(len, self.clips)) // row) * row
        self._padded_BT = np.stack([np.pad(clip, (0, longest - len(clip))) for clip in self.clips])
        self._rate_hz = config.sample_rate_hz

    def reconstruct(self, run, params) -> list[np.ndarray]:
        """The clips through the codec (`run(params, audio_BT) -> audio_BT`), at their own lengths."""
        pieces = [np.asarray(run(params, self._padded_BT[i : i + 16])) for i in self._batches()]
        made = np.concatenate(pieces)
        return [audio[: len(clip)] for audio, clip in zip(made, self.clips, strict=False)]

    def _batches(self) -> range:
        missing = -len(self._padded_BT) % 16
        if missing:
            self._padded_BT = np.pad(self._padded_BT, ((0, missing), (0, 0)))
        return range(0, len(self._padded_BT), 16)

    def mel(self, made: list[np.ndarray]) -> tuple[float, float]:
        """Mean log10-mel L1 of the closed-vocabulary clips and of the free ones."""
        distances = [mel_distance(a, b, self._rate_hz) for a, b in zip(made, self.clips, strict=True)]
        free = distances[self.num_closed :]
        return float(np.mean(distances[: self.num_closed])), float(np.mean(free)) if free else float("nan")

    def wer(self, judges: Judges, made: list[np.ndarray]) -> tuple[float, list[str]]:
        """Word error rate of the closed-vocabulary clips."""
        return judges.wer(self.texts[: self.num_closed], made[: self.num_closed], self._rate_hz)


def main() -> None:
    """Command line; see README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, help="results; default $OUT")
    parser.add_argument("--resume", type=Path, help="folder of a codec to go on from (config.json, model.safetensors)")
    parser.add_argument("--seed", type=int, default=0, help="of crops and gains: another for each stage")
    parser.add_argument("--decoder-only", action="store_true", help="with --resume: the codes stay as they are")
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
    parser.add_argument("--judges", type=int, default=4, help="processes that run pocketsphinx")
    parser.add_argument("--smoke", action="store_true", help="tiny codec, tiny batches: only whether it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.batch, arguments.frames, arguments.steps_per_call = 2, 16, 2
        arguments.plain_steps, arguments.first_minutes_of_audio, arguments.capacity_hours = 10, 3, 0.2
        arguments.judges = 1
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
        codec = Codec(CodecConfig.from_dict(self.raw), rngs=nnx.Rngs(0))
        if arguments.resume:
            codec, self.raw = load_codec(arguments.resume)
            arguments.plain_steps = 0
        self.config = codec.config
        self.model = training.Model(codec)
        if not arguments.resume:
            self.model.params = quiet_start(self.model.params)
        self.optimiser = training.adamw(0.8, 0.99, 1e-2)
        self.step = 0
        books = (self.config.num_codebooks, self.config.semantic_codebook_size)
        self.state = {
            "params": jax.tree.map(jnp.array, self.model.params),
            "opt": self.optimiser.init(self.model.params),
            "use_KN": jnp.ones(books),
            "key": jax.random.key(arguments.seed),
        }
        self.threads = ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2))
        self.judges = Judges(arguments.judges)
        self.judging: Future | None = None
        self.history: list[dict[str, Any]] = []
        log(f"codec of {training.count_parameters(self.model.params):,} parameters")

    # --- the corpus on the device

    def _make_buffer(self) -> None:
        row = self.config.samples_per_frame
        chunk_rows = 512 if self.arguments.smoke else _CHUNK_ROWS
        rows = int(self.arguments.capacity_hours * 3600 * self.config.frame_rate_hz) // chunk_rows * chunk_rows
        self.audio_RS, self.num_rows = jnp.zeros((rows, row), jnp.int16), 0
        self.feeder = Feeder(self.arguments.corpus, row, chunk_rows, rows)
        self._put = jax.jit(
            lambda audio, chunk, at: jax.lax.dynamic_update_slice(audio, chunk, (at, 0)), donate_argnums=0
        )

    def _feed(self) -> None:
        while not self.feeder.chunks.empty():
            chunk = self.feeder.chunks.get()
            self.audio_RS = self._put(self.audio_RS, chunk, self.num_rows)
            self.num_rows += len(chunk)

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
        steps = make_steps(
            self.model,
            self.optimiser,
            self.config,
            batch,
            frames,
            arguments.steps_per_call,
            arguments.decoder_only,
        )
        with convolutions(self.table, "im2col" if arguments.conv == "auto" else arguments.conv):
            return steps.lower(self.state, self.audio_RS, *self._controls())

    def _compile(self, batch: int, frames: int):
        """The program of the training steps; the corpus is fed meanwhile."""
        began = time.monotonic()
        lowered = self._lower(batch, frames)
        traced = time.monotonic()
        program = self.threads.submit(lowered.compile)
        while not program.done():
            self._feed()
            time.sleep(0.1)
        self.log(f"traced in {traced - began:.0f} s, compiled in {time.monotonic() - traced:.0f} s")
        return program.result()

    def _controls(self):
        """(num_rows, rate, quantise, refresh) of this moment, as the compiled programs take them."""
        progress, arguments = self.clock.progress, self.arguments
        rate = training.cosine_rate(progress, arguments.rate, 5e-5, self.step, 100)
        quantise = self.step >= arguments.plain_steps
        refresh = 2 if not quantise else int(progress < 0.7)
        return jnp.int32(self.num_rows), jnp.float32(rate), jnp.bool_(quantise), jnp.int32(refresh)

    def _call(self, program) -> dict[str, jax.Array]:
        self.state, shown = program(self.state, self.audio_RS, *self._controls())
        self.step += self.arguments.steps_per_call
        return shown

    # --- measuring and saving

    def _judge(self, made: list[np.ndarray], step: int, progress: float) -> None:
        mel, mel_free = self.evaluation.mel(made)
        wer, _ = self.evaluation.wer(self.judges, made)
        row = {"step": step, "mel_closed": mel, "mel_free": mel_free, "wer_percent": 100 * wer}
        self.history.append(row)
        self.log(f"  judged at step {step}: log10-mel L1 {mel:.4f} (free {mel_free:.4f}), WER {100 * wer:.2f} %")

    def _begin_judging(self) -> None:
        if self.judging is not None and not self.judging.done():
            return
        made = self.evaluation.reconstruct(self.run_codec, self._rounded())
        self.judging = self.threads.submit(self._judge, made, self.step, self.clock.progress)

    def _rounded(self):
        """The parameters as they are shipped: bfloat16 values, computed with in float32."""
        return jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), self.state["params"])

    def _save(self) -> None:
        save_codec(self.out / "codec", self.model, self.state["params"], self.raw)
        write_json(self.out / "codec_results.json", {"history": self.history, "step": self.step})

    def run(self) -> None:
        """Trains until the clock is out, then saves, judges once more and saves samples."""
        arguments, log = self.arguments, self.log
        self._make_buffer()
        first_rows = int(arguments.first_minutes_of_audio * 60 * self.config.frame_rate_hz)
        while self.num_rows < first_rows:
            time.sleep(0.2)
            self._feed()
            if (arguments.corpus / "done").exists() and self.feeder.chunks.empty() and self.num_rows:
                time.sleep(2.0)
                self._feed()
                break
        log(f"{self.num_rows / self.config.frame_rate_hz / 3600:.2f} h of audio on the device")
        self.evaluation = Evaluation(arguments.corpus, self.config, *((8, 2) if arguments.smoke else (64, 24)))
        self.run_codec = jax.jit(lambda params, audio: self._whole(params, audio))
        self._choose_convolutions()
        program = self._compile(arguments.batch, arguments.frames)
        long_batch = max(1, round(arguments.batch * arguments.frames / max(1, arguments.long_frames)))
        long_program = None
        if arguments.long_frames:
            lowered = self._lower(long_batch, arguments.long_frames)
            long_program = self.threads.submit(lowered.compile)
        reserve_s = 3 if arguments.smoke else 25  # for the last judging and saving
        printed = judged = saved = self.clock.elapsed_s
        counted, shown = self.step, None
        while self.clock.elapsed_s < 60 * arguments.minutes - reserve_s:
            self._feed()
            if long_program is not None and self.clock.progress > 0.62 and long_program.done():
                program, long_program = long_program.result(), None
                log(f"crops of {arguments.long_frames} frames, batch {long_batch}, from step {self.step}")
            for _ in range(3):
                shown = self._call(program)
            shown = {name: float(value) for name, value in shown.items()}
            now = self.clock.elapsed_s
            if now - printed > 10:
                use = np.mean(np.asarray(self.state["use_KN"]) > 0.02, axis=1)
                parts = " ".join(f"{name} {value:.4f}" for name, value in shown.items())
                ms = 1000 * (now - printed) / max(1, self.step - counted)
                log(
                    f"step {self.step} {ms:.1f} ms | {parts} | books used {use.min():.2f}-{use.max():.2f}"
                    f" | {self.num_rows / self.config.frame_rate_hz / 3600:.1f} h"
                )
                printed, counted = now, self.step
                if not np.isfinite(shown["loss"]):
                    raise FloatingPointError(f"the loss is {shown['loss']} at step {self.step}")
            if now - judged > (15 if arguments.smoke else 75):
                self._begin_judging()
                judged = now
            if now - saved > 120:
                self._save()
                saved = now
        if self.judging is not None:
            self.judging.result()
        made = self.evaluation.reconstruct(self.run_codec, self._rounded())
        self._judge(made, self.step, 1.0)
        self._save()
        pcm = {f"clip{i}": (made[i] * 32767).astype(np.int16) for i in (*range(4), *range(len(made) - 4, len(made)))}
        np.savez(self.out / "codec_samples.npz", **pcm)
        log(f"done: {json.dumps(self.history[-1])}")
        self.judges.close()

    def _whole(self, params, audio_BT: jax.Array) -> jax.Array:
        codec = self.model.build(params)
        return codec.decode(codec.encode(audio_BT)[0])


if __name__ == "__main__":
    main()
