from __future__ import annotations

import base64
import dataclasses
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from fishjax.config import CodecConfig
from fishjax.errors import InvalidRequest, WeightsError
from fishjax.weights import checkpoint, model_folder
from fishjax.weights.checkpoint import restore_module, save_module
from fishjax.weights.codec_names import public_shapes
from fishjax.weights.convert import convert
from fishjax.weights.load import load_dual_ar
from fishjax.weights.load_codec import abstract_codec
from fishjax.weights.model_folder import Description, load_model, open_model_folder
from fishjax.weights.precision import Precision
from fishjax.weights.quantize import abstract_model, apply_precision

FP32 = Precision.default("cpu")
POLICIES = ["fp32", "bf16", "slow=fp8,fast=bf16,head=fp8,kv=fp8,codec=bf16", "slow=mxfp8,fast=fp8"]


def policy(text: str) -> Precision:
    return Precision.parse(text, FP32)


def same_bits(a: nnx.Module, b: nnx.Module) -> bool:
    """Same structure, types and bits in every array."""
    a_leaves, a_tree = jax.tree.flatten(nnx.state(a))
    b_leaves, b_tree = jax.tree.flatten(nnx.state(b))
    return a_tree == b_tree and all(
        x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(a_leaves, b_leaves, strict=True)
    )


def outputs(model) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    columns = rng.integers(0, 64, (1, 5, 6)).astype(np.int32)
    columns[0, 0, 3:] += model.config.semantic_begin_id

    @jax.jit
    def forward(model):
        hidden_BTD, logits_BTV = model.generate_forward(columns)
        return logits_BTV, model.fast_logits(model.fast_hidden(hidden_BTD)[0], columns[0, 1:].T)

    logits_BTV, fast = forward(model)
    return np.asarray(logits_BTV), np.asarray(fast)


@pytest.fixture(scope="module")
def converted(folders, tmp_path_factory) -> Path:
    """The nested folder with slow in FP8. Copy before changing."""
    out = tmp_path_factory.mktemp("converted") / "voice"
    convert(folders["nested"], out, policy("slow=fp8,fast=bf16,codec=bf16"))
    return out


@pytest.fixture
def copy(converted, tmp_path) -> Path:
    return shutil.copytree(converted, tmp_path / "copy")


@pytest.mark.parametrize("text", POLICIES)
def test_saved_and_loaded_is_the_same_bit_for_bit(folders, tmp_path, text):
    out = tmp_path / "out"
    report = convert(folders["nested"], out, policy(text))
    wanted = load_dual_ar(folders["nested"])[1]
    apply_precision(wanted, policy(text))
    loaded, direct = load_model(out), load_model(folders["nested"], policy(text))
    assert loaded.precision == direct.precision == policy(text)
    assert same_bits(loaded.dual_ar, wanted) and same_bits(direct.dual_ar, wanted)
    assert same_bits(loaded.codec, direct.codec)
    for restored, original in zip(outputs(loaded.dual_ar), outputs(wanted), strict=True):
        assert restored.tobytes() == original.tobytes()
    assert loaded.config == direct.config == wanted.config and loaded.codec.config == direct.codec.config
    assert (loaded.profile.temperature, loaded.profile.top_k, loaded.profile.top_p) == (0.7, 20, 0.8)
    description = Description.read(out / "fishjax.json")
    assert report.num_tensors == sum(description.num_tensors.values())
    assert description.num_tensors["dual_ar"] == len(load_file(folders["nested"] / "model.safetensors"))
    assert report.bytes_out == sum(f.stat().st_size for f in out.rglob("*") if f.is_file()) > 0
    assert report.bytes_in > 0 and report.seconds > 0 and report.peak_rss_bytes > 100 << 20


def test_both_layouts_convert_to_the_same_tree(folders, converted, tmp_path):
    convert(folders["flat"], tmp_path / "flat", policy("slow=fp8,fast=bf16,codec=bf16"))
    a, b = load_model(converted), load_model(tmp_path / "flat")
    assert same_bits(a.dual_ar, b.dual_ar) and same_bits(a.codec, b.codec)
    assert a.config == dataclasses.replace(b.config, prompt_layout="chat")


def test_a_codec_with_a_spectral_decoder_is_converted_too(nested, tmp_path):
    raw = json.loads((nested / "codec" / "config.json").read_text())
    raw |= {"decoder": "spectral", "decoder_dim": 8, "decoder_rates": [24], "decoder_layers": 1}
    (nested / "codec" / "config.json").write_text(json.dumps(raw))
    shapes = public_shapes(abstract_codec(CodecConfig.from_dict(raw)))
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, nested / "codec" / "model.safetensors")
    convert(nested, tmp_path / "out", FP32)
    loaded, direct = load_model(tmp_path / "out", FP32), load_model(nested, FP32)
    assert loaded.codec.config == direct.codec.config and loaded.codec.config.decoder == "spectral"
    assert same_bits(loaded.codec, direct.codec)


def test_a_folder_converted_before_there_were_two_kinds_of_decoder(copy):
    edit(copy, lambda raw: [raw["codec"].pop(name) for name in ("decoder", "decoder_layers")])
    assert load_model(copy).codec.config.decoder == "waveform"


def test_any_orbax_reads_the_trees(converted, folders):
    with ocp.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(converted / "dual_ar")
        codec = checkpointer.restore(converted / "codec")
    weight = tree["slow"]["layers"]["1"]["attention"]["wqkv"]["weight"]
    assert weight["values_NK"].shape == (512, 256) and weight["scale_NbKb"].shape == (4, 2)
    name = "text_model.model.layers.1.attention.wqkv.weight"
    plain = load_file(folders["nested"] / "model.safetensors")[name]
    scale = np.repeat(np.repeat(np.asarray(weight["scale_NbKb"]), 128, 0), 128, 1)
    np.testing.assert_allclose(np.asarray(weight["values_NK"], np.float32) * scale, plain, rtol=0.07, atol=1e-2)
    assert tree["slow"]["embeddings"]["weight"].dtype == jnp.bfloat16
    assert codec["decoder"]["model"]["0"]["conv"]["weight"].shape == (7, 64, 48)


def test_the_description_has_no_absolute_path(converted, folders):
    text = (converted / "fishjax.json").read_text()
    assert str(folders["nested"].parent) not in text
    raw = json.loads(text)
    assert raw["format"] == "fishjax-model" and raw["precision"].startswith("slow=fp8,fast=bf16")
    assert raw["source"]["model.safetensors"] == (folders["nested"] / "model.safetensors").stat().st_size


def test_one_tensor_exists_at_a_time(folders, tmp_path, monkeypatch):
    """Each tensor is read when its turn comes, and none is held when the next one is."""
    events, alive = [], set()

    class Watched(np.ndarray):
        def __del__(self):
            alive.discard(id(self))

    real = model_folder.read_checkpoint

    def read(folder, stem="model"):
        path, tensors = real(folder, stem)

        def watch(name, stored):
            def take():
                array = stored.read().view(Watched)
                events.append((name, len(alive)))
                alive.add(id(array))
                return array

            return dataclasses.replace(stored, read=take)

        return path, {name: watch(name, stored) for name, stored in tensors.items()}

    monkeypatch.setattr(model_folder, "read_checkpoint", read)
    said = []
    convert(folders["nested"], tmp_path / "out", policy("slow=fp8,fast=bf16"), said.append)
    assert len(events) == len({name for name, _ in events}) == len(load_file(folders["nested"] / "model.safetensors"))
    assert max(count for _, count in events) <= 2
    assert said[-1].startswith(f"{len(events)}/{len(events)} ") or any(line.startswith("1/") for line in said)


def test_a_converted_folder_in_another_precision(converted):
    as_stored = load_model(converted)
    other = load_model(converted, "kv=fp8,head=fp8,codec=fp32,fast=fp8")
    assert str(other.precision) == "slow=fp8,fast=fp8,head=fp8,kv=fp8,codec=fp32"
    assert same_bits(other.dual_ar.slow, as_stored.dual_ar.slow)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(other.codec))} == {jnp.dtype("float32")}
    with pytest.raises(WeightsError, match="stored as fp8 and cannot become bf16"):
        load_model(converted, "bf16")
    with pytest.raises(InvalidRequest, match="'fp5' does not exist"):
        load_model(converted, "fp5")


def test_a_wrong_planted_layout_is_seen_after_restoring(folders, converted):
    """A converter that stored the scale grid transposed would load (the grid is square), and be measurably wrong."""
    right, wrong = load_model(converted).dual_ar, load_model(converted).dual_ar
    weight = wrong.slow.layers[0].attention.wo.weight
    weight.set_value(dataclasses.replace(weight.get_value(), scale_NbKb=weight.get_value().scale_NbKb.T))
    reference = outputs(load_dual_ar(folders["nested"])[1])[0].astype(np.float64)

    def error(model) -> float:
        return float(np.linalg.norm(outputs(model)[0] - reference) / np.linalg.norm(reference))

    assert error(right) < 0.1 < error(wrong)


def test_every_fault_of_a_folder_is_named_at_once_and_nothing_is_left(nested, tmp_path):
    tensors = load_file(nested / "model.safetensors")
    del tensors["text_model.model.norm.weight"]
    tensors["text_model.model.surplus.weight"] = np.zeros(3, np.float32)
    tensors["audio_decoder.output.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, nested / "model.safetensors")
    with pytest.raises(WeightsError) as error:
        convert(nested, tmp_path / "out", policy("fp8"))
    for name in ("text_model.model.norm.weight", "text_model.model.surplus.weight", "audio_decoder.output.weight is"):
        assert name in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["nested"]


@pytest.mark.parametrize(
    ("remove", "says"),
    [
        ("codec", "has no codec and no codec.pth"),
        ("tokenizer.json", "tokenizer.tiktoken and special_tokens.json"),
        ("model.safetensors", "holds no weights"),
        ("config.json", "is no model folder"),
    ],
)
def test_what_a_published_folder_lacks_is_named(nested, tmp_path, remove, says):
    path = nested / remove
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(WeightsError, match=says) as error:
        convert(nested, tmp_path / "out", FP32)
    assert "\n" not in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["nested"]
    with pytest.raises(WeightsError):
        load_model(nested)


def test_widths_that_cannot_be_fp8_are_named(golden, nested, tmp_path):
    for name in ("config.json", "model.safetensors.index.json"):
        shutil.copyfile(golden / "dualar_tiny" / "s2_layout" / name, nested / name)
    (nested / "model.safetensors").unlink()
    for shard in (golden / "dualar_tiny" / "s2_layout").glob("model-*.safetensors"):
        shutil.copyfile(shard, nested / shard.name)
    with pytest.raises(WeightsError, match=r"slow\.layers\.0\.feed_forward\.w2\.weight has K = 96, and fp8 needs"):
        convert(nested, tmp_path / "out", policy("slow=fp8"))
    assert not (tmp_path / "out").exists()
    convert(nested, tmp_path / "out", policy("bf16"))
    assert load_model(tmp_path / "out").config.slow.dim == 64


def test_a_failure_while_writing_leaves_nothing(folders, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fishjax.weights.convert.write_tree", full)
    with pytest.raises(WeightsError, match=r"cannot write .*: No space left on device"):
        convert(folders["nested"], tmp_path / "out", FP32)
    monkeypatch.setattr("fishjax.weights.convert.write_tree", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert(folders["nested"], tmp_path / "out", FP32)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_is_one_sentence(folders, tmp_path):
    """A real refusal of the operating system, by a limit on the size of files."""
    process = subprocess.run(
        [sys.executable, "-m", "fishjax", "convert", str(folders["nested"]), str(tmp_path / "out")],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
        capture_output=True,
        text=True,
    )
    assert process.returncode == 2
    assert "Traceback" not in process.stderr
    last = process.stderr.splitlines()[-1]
    assert last.startswith("error: cannot write ") and last.endswith(": File too large")
    assert list(tmp_path.iterdir()) == []


def test_where_out_may_be(folders, converted, nested, tmp_path):
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "thesis.txt").write_text("mine")
    with pytest.raises(WeightsError, match="not empty and was not made by convert"):
        convert(nested, busy, FP32)
    with pytest.raises(WeightsError, match="two folders"):
        convert(nested, nested, FP32)
    with pytest.raises(WeightsError, match="two folders"):
        convert(nested, nested / "inside", FP32)
    with pytest.raises(WeightsError, match="is a file"):
        convert(nested, busy / "thesis.txt", FP32)
    with pytest.raises(WeightsError, match="is converted already"):
        convert(converted, tmp_path / "again", FP32)
    with pytest.raises(WeightsError, match="there is no model folder at"):
        convert(tmp_path / "nowhere", tmp_path / "again", FP32)
    assert (busy / "thesis.txt").read_text() == "mine"

    earlier = shutil.copytree(converted, tmp_path / "earlier")
    (earlier / "notes.txt").write_text("mine")
    with pytest.raises(WeightsError, match=r"holds 'notes.txt', which convert did not write"):
        convert(nested, earlier, FP32)
    (earlier / "notes.txt").unlink()
    (tmp_path / "earlier.partial").mkdir()  # of a conversion that was killed
    (tmp_path / "earlier.partial" / "dual_ar.orbax-checkpoint-tmp").mkdir()
    convert(nested, earlier, FP32)
    assert load_model(earlier).precision == FP32
    empty = tmp_path / "empty"
    empty.mkdir()
    convert(nested, empty, FP32)
    assert open_model_folder(empty).kind == "converted" and open_model_folder(nested).kind == "public"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["busy", "earlier", "empty", "nested"]


# Orbax leaves half-read arrays behind when one of them cannot be read.
abandoned = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@abandoned
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: shutil.rmtree(f / "dual_ar"), "dual_ar is not there"),
        (lambda f: shutil.rmtree(f / "codec"), "has no codec"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: (f / "dual_ar" / "_METADATA").unlink(), "damaged or incomplete"),
        (lambda f: shutil.rmtree(f / "dual_ar" / "ocdbt.process_0"), "damaged or incomplete"),
        (lambda f: (f / "fishjax.json").write_text("{"), "cannot read .*fishjax.json"),
        (lambda f: (f / "fishjax.json").write_text("{}"), "does not describe a converted model"),
        (lambda f: edit(f, lambda raw: raw.update(format_version=9)), "format version 9 and this fishjax reads 1"),
        (lambda f: edit(f, lambda raw: raw.pop("model")), "fishjax.json is damaged"),
        (lambda f: edit(f, lambda raw: raw.update(precision="slow=fp9")), "fishjax.json is damaged"),
        (lambda f: edit(f, lambda raw: raw["model"].update(vocab_size=600)), r"embeddings.weight is .*\(512, 256\)"),
        (lambda f: edit(f, lambda raw: raw.update(precision="bf16")), "missing: .*extra: .*"),
    ],
)
def test_a_broken_converted_folder_is_one_sentence(copy, damage, says):
    damage(copy)
    with pytest.raises(WeightsError, match=says) as error:
        load_model(copy)
    assert "\n" not in str(error.value)


def edit(folder: Path, change) -> None:
    raw = json.loads((folder / "fishjax.json").read_text())
    change(raw)
    (folder / "fishjax.json").write_text(json.dumps(raw))


@abandoned
def test_a_truncated_tree_is_noticed(copy):
    data = [path for path in (copy / "dual_ar").rglob("*") if path.is_file() and path.parent.name == "d"]
    largest = max(data, key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(WeightsError, match="damaged or incomplete"):
        load_model(copy)


def test_restoring_needs_no_second_copy(converted, monkeypatch):
    """What Orbax is asked for are arrays on a device, in pieces of a bounded size."""
    seen = []
    real = ocp.args.PyTreeRestore
    monkeypatch.setattr(checkpoint.ocp.args, "PyTreeRestore", lambda *a, **k: seen.append(k) or real(*a, **k))
    load_model(converted)
    asked = [arg for kwargs in seen for arg in jax.tree.leaves(kwargs["restore_args"])]
    assert asked and all(isinstance(arg, ocp.ArrayRestoreArgs) and arg.sharding is not None for arg in asked)


def test_a_module_saved_by_itself(small_config, folders, tmp_path):
    model = load_dual_ar(folders["nested"])[1]
    apply_precision(model, policy("slow=mxfp8,fast=fp8"))
    save_module(tmp_path / "tree", model)
    restored = abstract_model(small_config, policy("slow=mxfp8,fast=fp8"))
    restore_module(tmp_path / "tree", restored)
    assert same_bits(model, restored)
    with pytest.raises(WeightsError, match=r"missing: .*scale_NbKb"):
        restore_module(tmp_path / "tree", abstract_model(small_config, policy("slow=fp8,fast=fp8")))


def test_s1_tokenizer_is_made(folders, tmp_path):
    source = shutil.copytree(folders["flat"], tmp_path / "s1")
    (source / "tokenizer.json").unlink()
    order = np.random.default_rng(0).permutation(256)
    lines = [f"{base64.b64encode(bytes([int(byte)])).decode()} {rank}" for rank, byte in enumerate(order)]
    (source / "tokenizer.tiktoken").write_text("\n".join(lines))
    names = ["<|im_start|>", "<|im_end|>", "<|voice|>", "<|interleave|>", *(f"<|semantic:{i}|>" for i in range(64))]
    (source / "special_tokens.json").write_text(json.dumps({name: 256 + i for i, name in enumerate(names)}))
    with pytest.raises(WeightsError, match="convert the folder first"):
        load_model(source)
    convert(source, tmp_path / "out", FP32)
    loaded = load_model(tmp_path / "out")
    assert (loaded.config.semantic_begin_id, loaded.config.semantic_end_id) == (260, 323)
    assert loaded.config.prompt_layout == "interleave" and loaded.tokenizer == tmp_path / "out" / "tokenizer.json"


@pytest.mark.parametrize("wrapped", [False, True])
def test_pth_with_and_without_its_wrapper(folders, converted, tmp_path, wrapped):
    torch = pytest.importorskip("torch")
    source = shutil.copytree(folders["flat"], tmp_path / "pth")
    for stem, prefix in (("model", ""), ("codec/model", "generator.")):
        path = source / f"{stem}.safetensors"
        tensors = {prefix + name: torch.from_numpy(array) for name, array in load_file(path).items()}
        path.unlink()
        torch.save({"state_dict": tensors} if wrapped else tensors, path.with_suffix(".pth"))
    convert(source, tmp_path / "out", policy("slow=fp8,fast=bf16,codec=bf16"))
    a, b = load_model(converted), load_model(tmp_path / "out")
    assert same_bits(a.dual_ar, b.dual_ar) and same_bits(a.codec, b.codec)
