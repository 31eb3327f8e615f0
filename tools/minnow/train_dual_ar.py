"""Trains minnow's DualAR on a corpus that is encoded while it is made; see README.md.

Worker processes make the batches (serving's prompts), a thread encodes new shards, another one judges: greedy
speech of held-out prompts, decoded by the codec and heard by pocketsphinx. The best by word error rate is kept.
Writes `dual_ar/` (public layout) and results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fishjax.bench.gate.texts import NUM_CHOOSING, NUM_HELD_OUT, held_out
from fishjax.config import ModelConfig
from fishjax.model.dual_ar import DualAR, candidate_ids
from fishjax.model.layers import Embedding
from fishjax.text.prompt import Prompter, Reference
from fishjax.text.tokenizer import Tokenizer
from fishjax.weights.load import dual_ar_to_public, load_dual_ar
from tools.minnow import shapes, training
from tools.minnow.batches import MAX_REFERENCE_FRAMES, Bucket, Recipe, start_workers
from tools.minnow.codes import Encoder, encode_corpus, read_codes
from tools.minnow.convs import convolutions
from tools.minnow.judge import Judges
from tools.minnow.speak import greedy_codes, prompts, spoken_frames
from tools.minnow.voices import DEFAULT_VOICE

BUCKETS = (Bucket(128, 352), Bucket(192, 240), Bucket(288, 160), Bucket(416, 104))
SMOKE_BUCKETS = (Bucket(192, 12), Bucket(416, 4))
_FAST_FRAMES = 32  # frames of each prompt that the fast transformer learns from in one step
_CORRUPT = 0.1  # share of the frames heard that are replaced by random codes


class WideTable(Embedding):
    """A table in float32 that gives bfloat16 rows: its gradient sums thousands of rows, too many for bfloat16."""

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Rows of the ids, bfloat16."""
        return self.weight[...][ids].astype(jnp.bfloat16)


_TABLES = ("slow.embeddings.weight", "slow.codebook_embeddings.weight", "fast.embeddings.weight")


def for_training(config: ModelConfig) -> training.Model:
    """The DualAR with `WideTable`s; parameter names as ever."""
    module = DualAR(config, rngs=nnx.Rngs(1))
    rngs = nnx.Rngs(2)
    module.slow.embeddings = WideTable(config.vocab_size, config.slow.dim, rngs=rngs)
    module.slow.codebook_embeddings = WideTable(config.num_codebooks * config.codebook_size, config.slow.dim, rngs=rngs)
    module.fast.embeddings = WideTable(config.codebook_size, config.fast.dim, rngs=rngs)
    return training.Model(module)


def cast_for_compute(params: training.Params) -> training.Params:
    """bfloat16 for everything but the tables."""
    return {name: p if name in _TABLES else p.astype(jnp.bfloat16) for name, p in params.items()}


def corrupt(columns_BKT: jax.Array, config: ModelConfig, key: jax.Array) -> jax.Array:
    """Random codes in place of one frame in ten, so that the model learns to go on after a mistake of its own."""
    is_frame_BT = columns_BKT[:, 0] >= config.semantic_begin_id
    is_frame_BT &= columns_BKT[:, 0] <= config.semantic_end_id
    pick_key, code_key = jax.random.split(key)
    shape = (columns_BKT.shape[0], config.num_codebooks, columns_BKT.shape[2])
    codes_BKT = jax.random.randint(code_key, shape, 0, config.codebook_size)
    noise_BKT = jnp.concatenate([codes_BKT[:, :1] + config.semantic_begin_id, codes_BKT], axis=1)
    pick_BT = is_frame_BT & (jax.random.uniform(pick_key, is_frame_BT.shape) < _CORRUPT)
    return jnp.where(pick_BT[:, None], noise_BKT, columns_BKT)


def losses(
    model: DualAR, columns_BKT: jax.Array, labelled_BT: jax.Array, im_end_id: int, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross-entropy of the next token (semantic or end) + 0.5 x that of the residual codes, and their accuracies."""
    config = model.config
    corrupt_key, pick_key = jax.random.split(key)
    # Embedded as in generation: that is how it will be served.
    heard_BKT = corrupt(columns_BKT, config, corrupt_key)
    hidden_BTD = model.slow.forward(model.slow.embed(heard_BKT, generation=True))
    head_ND = model.slow.head_weight()[candidate_ids(config, im_end_id)].astype(hidden_BTD.dtype)
    normed_BTD = model.slow.norm(hidden_BTD)
    logits_BTN = jnp.einsum("btd,nd->btn", normed_BTD, head_ND, preferred_element_type=jnp.float32)
    next_BKT = jnp.concatenate([columns_BKT[:, :, 1:], columns_BKT[:, :, :1]], axis=2)
    is_end_BT = next_BKT[:, 0] == im_end_id
    size = config.semantic_end_id - config.semantic_begin_id + 1
    label_BT = jnp.where(is_end_BT, size, jnp.clip(next_BKT[:, 0] - config.semantic_begin_id, 0, size - 1))
    weight_BT = labelled_BT.astype(jnp.float32)
    total = jnp.maximum(weight_BT.sum(), 1)
    nll_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTN, label_BT)
    semantic = jnp.sum(weight_BT * nll_BT) / total
    accuracy = jnp.sum(weight_BT * (logits_BTN.argmax(-1) == label_BT)) / total

    # The fast part: a random few of the frames of each prompt.
    score_BT = jnp.where(labelled_BT & ~is_end_BT, jax.random.uniform(pick_key, label_BT.shape, minval=0.1), 0.0)
    count = min(_FAST_FRAMES, score_BT.shape[1])
    found_BF, at_BF = jax.lax.top_k(score_BT, count)
    hidden_ND = jnp.take_along_axis(hidden_BTD, at_BF[..., None], axis=1).reshape(-1, hidden_BTD.shape[-1])
    codes_BFK = jnp.take_along_axis(next_BKT[:, 1:].transpose(0, 2, 1), at_BF[..., None], axis=1)
    codes_NK = codes_BFK.reshape(-1, config.num_codebooks)
    logits_NKV = model.fast_logits(model.fast_hidden(hidden_ND), codes_NK)[:, 1:].astype(jnp.float32)
    weight_N1 = (found_BF.reshape(-1, 1) > 0).astype(jnp.float32)
    nll_NK = optax.softmax_cross_entropy_with_integer_labels(logits_NKV, codes_NK[:, 1:])
    residual = jnp.sum(weight_N1 * nll_NK) / jnp.maximum(weight_N1.sum() * nll_NK.shape[1], 1)
    loss = semantic + 0.5 * residual
    return loss, {"loss": loss, "semantic": semantic, "residual": residual, "accuracy": accuracy}


def make_step(model: training.Model, optimiser, im_end_id: int):
    """The jitted update: (state, columns int16, labelled, rate) -> (state, parts)."""

    def step(state: dict[str, Any], columns_BKT, labelled_BT, rate):
        key, loss_key = jax.random.split(state["key"])

        def objective(params):
            module = model.build(cast_for_compute(params))
            return losses(module, columns_BKT.astype(jnp.int32), labelled_BT, im_end_id, loss_key)

        grads, parts = jax.grad(objective, has_aux=True)(state["params"])
        updates, opt = optimiser.update(grads, state["opt"], state["params"])
        params = training.apply(state["params"], updates, rate)
        decay = jnp.minimum(0.999, (1 + state["step"]) / (10 + state["step"]))
        ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, state["ema"], params)
        return {"params": params, "ema": ema, "opt": opt, "key": key, "step": state["step"] + 1}, parts

    return jax.jit(step, donate_argnums=0)


class Listener:
    """Greedy speech of the held-out prompts, and what the judge hears. The first `num_choosing` choose the best."""

    def __init__(
        self,
        model: training.Model,
        codec,
        prompter: Prompter,
        judges: Judges,
        num_choosing: int,
        num_reporting: int,
        num_frames: int,
    ):
        self.codec_model, self._judges = training.Model(codec), judges
        self._config, self._prompter = codec.config, prompter
        im_end_id = prompter.tokenizer.im_end_id
        self.num_frames, self.num_choosing, self._prompt_len = num_frames, num_choosing, 352
        texts = held_out()
        self.choosing, self.reporting = texts[:num_choosing], texts[num_choosing : num_choosing + num_reporting]

        def run(params, codec_params, columns_BKT, lengths_B):
            codes_BKT, ended_BT = greedy_codes(model.build(params), columns_BKT, lengths_B, im_end_id, num_frames)
            with convolutions({}, "im2col"):
                audio_BT = self.codec_model.build(codec_params).decode(codes_BKT)
            return codes_BKT, ended_BT, audio_BT

        self._run = jax.jit(run)

    def speak(self, params, texts: list[str], reference: Reference | None = None) -> list[np.ndarray]:
        """Sound of each text, by calls of `num_choosing` rows; float32."""
        sounds = []
        for first in range(0, len(texts), self.num_choosing):
            some = texts[first : first + self.num_choosing]
            padded = some + some[:1] * (self.num_choosing - len(some))
            references = [[reference] if reference else []] * len(padded)
            length = self._prompt_len if reference else 144
            columns, lengths = prompts(self._prompter, padded, references, length)
            _, ended_BT, audio_BT = self._run(params, self.codec_model.params, columns, lengths)
            frames = spoken_frames(np.asarray(ended_BT)) * self._config.samples_per_frame
            sounds += [np.asarray(audio[:n]) for audio, n in zip(np.asarray(audio_BT), frames, strict=True)][
                : len(some)
            ]
        return sounds

    def judge(self, texts: list[str], sounds: list[np.ndarray]) -> tuple[float, list[str]]:
        """(word error rate, what was heard)."""
        return self._judges.wer(texts, sounds, self._config.sample_rate_hz)


class Trainer:
    """The run: encode, step, judge, save."""

    def __init__(self, arguments: argparse.Namespace, clock: training.Clock, out: Path, log: training.Log):
        self.arguments, self.clock, self.out, self.log = arguments, clock, out, log
        codec, _ = shapes.load_codec(arguments.codec)
        tokenizer = Tokenizer.from_file(arguments.tokenizer)
        self.im_end_id = tokenizer.im_end_id
        self.raw = shapes.dual_ar(
            -(-tokenizer.vocab_size // 64) * 64,
            tokenizer.semantic_begin_id,
            tokenizer.semantic_end_id,
            smoke=arguments.smoke,
        )
        if arguments.resume:
            self.raw = json.loads((arguments.resume / "config.json").read_text(encoding="utf-8"))
            config, dual_ar = load_dual_ar(arguments.resume)
        else:
            config = ModelConfig.from_dict(self.raw)
            dual_ar = DualAR(config, rngs=nnx.Rngs(1))
        self.config, self.model = config, training.Model(dual_ar)
        self.optimiser = training.adamw(0.9, 0.95, 0.1)
        self.step = 0
        self.state = {
            "params": jax.tree.map(jnp.array, self.model.params),
            "ema": jax.tree.map(jnp.array, self.model.params),
            "opt": self.optimiser.init(self.model.params),
            "key": jax.random.key(arguments.seed),
            "step": jnp.int32(0),
        }
        self.stop = threading.Event()
        self.threads = ThreadPoolExecutor(8)
        self.encoding = self.threads.submit(
            encode_corpus, Encoder(codec), arguments.corpus, arguments.codes, self.stop, arguments.max_shards
        )
        self.buckets = SMOKE_BUCKETS if arguments.smoke else BUCKETS
        recipe = Recipe(arguments.codes, arguments.tokenizer, config.num_codebooks, self.buckets)
        self.queue, self.workers = start_workers(recipe, arguments.workers, seed=arguments.seed)
        self.judges = Judges(arguments.judges)
        prompter = Prompter(tokenizer, config.num_codebooks)
        sizes = (6, 6, 40) if arguments.smoke else (NUM_CHOOSING, NUM_HELD_OUT - NUM_CHOOSING, 112)
        self.listener = Listener(self.model, codec, prompter, self.judges, *sizes)
        self.history: list[dict[str, Any]] = []
        self.best_wer = float("inf")
        self.judging: Future | None = None
        log(f"DualAR of {training.count_parameters(self.model.params):,} parameters")

    def _rate(self) -> jax.Array:
        return jnp.float32(training.cosine_rate(self.clock.progress, self.arguments.rate, 5e-5, self.step, 200))

    def _shipped(self):
        """The averaged parameters as they are shipped: bfloat16 values, computed with in float32."""
        return jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), self.state["ema"])

    def _judge(self, params, step: int) -> None:
        texts = self.listener.choosing
        sounds = self.listener.speak(params, texts)
        wer, heard = self.listener.judge(texts, sounds)
        self.history.append({"step": step, "wer_percent": 100 * wer, "seconds": self.clock.elapsed_s})
        wrong = [f"'{text}' -> '{other}'" for text, other in zip(texts, heard, strict=True) if text != other]
        self.log(f"  judged at step {step}: WER {100 * wer:.2f} %; {'; '.join(wrong[:3])}")
        if wer <= self.best_wer:
            self.best_wer = wer
            self._save_model(params)
        self._save_results()

    def _begin_judging(self) -> None:
        if self.judging is None or self.judging.done():
            if self.judging is not None:
                self.judging.result()
            self.judging = self.threads.submit(self._judge, self._shipped(), self.step)

    def _save_model(self, params) -> None:
        folder = self.out / "dual_ar"
        module = self.model.build({name: p.astype(jnp.bfloat16) for name, p in params.items()})
        training.save_tensors(folder / "model.safetensors", dual_ar_to_public(module))
        shapes.write_json(folder / "config.json", self.raw)

    def _save_results(self, **report: Any) -> None:
        shapes.write_json(self.out / "dual_ar_results.json", {"history": self.history, "step": self.step, **report})

    def _compile(self) -> dict[int, Any]:
        """All buckets' programs, compiled side by side while the first shards are encoded; by length."""
        step = make_step(for_training(self.config), self.optimiser, self.im_end_id)
        futures = {}
        for bucket in self.buckets:
            columns = jax.ShapeDtypeStruct((bucket.rows, 11, bucket.length), jnp.int16)
            labelled = jax.ShapeDtypeStruct((bucket.rows, bucket.length), jnp.bool_)
            futures[bucket.length] = self.threads.submit(
                step.lower(self.state, columns, labelled, self._rate()).compile
            )
        return {length: future.result() for length, future in futures.items()}

    def run(self) -> None:
        """Trains until the clock is out, then judges the best on prompts that chose nothing, and by reference."""
        arguments, log = self.arguments, self.log
        programs = self._compile()
        log("compiled")
        reserve_s = 6 if arguments.smoke else 40
        printed = judged = self.clock.elapsed_s
        counted, waited, shown = self.step, 0.0, None
        while self.clock.elapsed_s < 60 * arguments.minutes - reserve_s:
            if self.encoding.done():
                self.encoding.result()
            began = time.monotonic()
            batch = self.queue.get(timeout=120)
            waited += time.monotonic() - began
            program = programs[batch.columns_BKT.shape[2]]
            self.state, shown = program(self.state, batch.columns_BKT, batch.labelled_BT, self._rate())
            self.step += 1
            now = self.clock.elapsed_s
            if now - printed > 10:
                parts = {name: float(value) for name, value in shown.items()}
                now = self.clock.elapsed_s
                ms = 1000 * (now - printed) / max(1, self.step - counted)
                text = " ".join(f"{name} {value:.4f}" for name, value in parts.items())
                share = 100 * waited / (now - printed)
                shards = len(list(arguments.codes.glob("[0-9]*.npz")))
                log(f"step {self.step} {ms:.1f} ms | {text} | waited {share:.0f} % | {shards} shards encoded")
                printed, counted, waited = now, self.step, 0.0
                if not np.isfinite(parts["loss"]):
                    raise FloatingPointError(f"the loss is {parts['loss']} at step {self.step}")
            if now - judged > (20 if arguments.smoke else 90):
                self._begin_judging()
                judged = now
        self.stop.set()
        for worker in self.workers:
            worker.terminate()
        self._finish()

    def _finish(self) -> None:
        if self.judging is not None:
            self.judging.result()
        self._judge(self._shipped(), self.step)
        best = training.Model(load_dual_ar(self.out / "dual_ar")[1]).params
        report: dict[str, Any] = {"chosen_by_wer_percent": 100 * self.best_wer}
        texts, sounds = self.listener.reporting, self.listener.speak(best, self.listener.reporting)
        wer, heard = self.listener.judge(texts, sounds)
        report["wer_percent"] = 100 * wer
        report["wrong"] = [f"{a} -> {b}" for a, b in zip(texts, heard, strict=True) if a != b]
        self.log(f"held out, never chosen by ({len(texts)} prompts): WER {report['wer_percent']:.2f} %")
        self._save_results(report=report)
        pcm = {f"prompt{i}": (sound * 32767).astype(np.int16) for i, sound in enumerate(sounds[:24])}
        report["by_reference"] = {}
        for voice, reference in self._references().items():
            spoken = self.listener.speak(best, self.listener.choosing, reference)
            wer, _ = self.listener.judge(self.listener.choosing, spoken)
            report["by_reference"][voice] = 100 * wer
            pcm[f"reference_{voice}"] = (np.concatenate(spoken[:3]) * 32767).astype(np.int16)
        self.log(f"with a reference: {report['by_reference']}")
        self._save_results(report=report)
        np.savez(self.out / "dual_ar_samples.npz", **pcm)
        self.judges.close()
        self.log("done")

    def _references(self) -> dict[str, Reference]:
        """One short reference of the default voice and of two others."""
        found: dict[str, Reference] = {}
        for path in sorted(self.arguments.codes.glob("[0-9]*.npz")):
            for record, codes_KT in read_codes(path):
                wanted = record["voice"] in (DEFAULT_VOICE, "rms", "heart-120") and record["kind"] == "closed"
                if wanted and 35 < codes_KT.shape[1] <= MAX_REFERENCE_FRAMES:
                    found.setdefault(record["voice"], Reference(record["text"], codes_KT))
            if len(found) == 3:
                break
        return found


def main() -> None:
    """Command line; see README.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="shards of make_corpus")
    parser.add_argument("--codec", type=Path, required=True, help="trained codec folder")
    parser.add_argument("--tokenizer", type=Path, default=Path("fishjax/minnow/tokenizer.json"))
    parser.add_argument("--codes", type=Path, default=Path("/tmp/minnow_codes"), help="where codes are kept")
    parser.add_argument("--out", type=Path, help="results; default $OUT")
    parser.add_argument("--resume", type=Path, help="folder of a DualAR to go on from (config.json, model.safetensors)")
    parser.add_argument("--seed", type=int, default=1, help="of batches and corruption: another for each stage")
    parser.add_argument("--minutes", type=float, default=8.5, help="wall clock, compiling and judging included")
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--workers", type=int, default=6, help="processes that make batches")
    parser.add_argument("--judges", type=int, default=4, help="processes that run pocketsphinx")
    parser.add_argument("--max-shards", type=int, help="encode at most so many shards")
    parser.add_argument("--smoke", action="store_true", help="small model, tiny batches: only whether it runs")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.workers = arguments.judges = 1
    clock = training.Clock(arguments.minutes)
    out = training.out_folder(arguments.out)
    log = training.Log(out / "dual_ar_log.txt", clock)
    training.enable_compile_cache()
    shutil.rmtree(arguments.codes, ignore_errors=True)  # codes of another codec must not be mixed in
    log(f"devices {jax.devices()}, jax {jax.__version__}")
    Trainer(arguments, clock, out, log).run()
    sys.stdout.flush()
    os._exit(0)  # threads that still encode or compile are not waited for


if __name__ == "__main__":
    main()
