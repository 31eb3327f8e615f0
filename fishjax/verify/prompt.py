"""Replays a folder like `prompt_format/`: tokenizer, splitters and prompt matrices, in reference mode.

Recognised by content: a `cases.json` that holds one of the lists below, beside a `tokenizer.json`. Each field of
each case is an entry: taken as an input or compared, and everything must be identical. A field that nobody knows
stays untouched and so fails the run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fishjax.config import read_json
from fishjax.errors import FishjaxError, WeightsError
from fishjax.text.prompt import Conversation, Item, Mode, Prompter, Reference
from fishjax.text.reference_split import clean_text, group_turns_into_batches, split_text_by_speaker
from fishjax.text.split import MAX_TURNS
from fishjax.text.tokenizer import Tokenizer
from fishjax.verify.report import FileReport, GoldenFile

_NOT_COMPARED = ("provenance", "comment", "name")


def recognises(folder: Path) -> bool:
    """Whether `folder` holds prompt cases."""
    if not (folder / "tokenizer.json").is_file() or not (folder / "cases.json").is_file():
        return False
    try:
        return not _REPLAYS.keys().isdisjoint(read_json(folder / "cases.json"))
    except WeightsError:
        return False


def verify(folder: Path, root: Path) -> list[FileReport]:
    """Replay the cases of `folder`; [] when it holds none. Raises WeightsError for an unreadable tokenizer."""
    if not recognises(folder):
        return []
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    content = read_json(folder / "cases.json")
    golden = GoldenFile(folder / "cases.json", _flatten(content), root)
    for name in golden.names():
        if name.rsplit("/", 1)[-1] in _NOT_COMPARED:
            golden.read(name)
    _compare_ids(golden, tokenizer)
    num_codebooks = golden.read("num_codebooks") if "num_codebooks" in golden else 1
    for list_name, replay in _REPLAYS.items():
        for case in _case_names(list_name, content.get(list_name)):
            try:
                replay(golden, case, tokenizer, num_codebooks)
            except (FishjaxError, TypeError, ValueError, KeyError) as error:
                golden.check(case, float("inf"), 0, note=f"cannot be replayed: {error}")
    reports = [golden.report()]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            used = GoldenFile(folder / name, {name: None}, root)
            used.read(name)
            reports.append(used.report())
    return reports


def _case_names(list_name: str, cases: Any) -> list[str]:
    if not isinstance(cases, list):
        return []
    return [f"{list_name}/{i}.{case['name']}" if "name" in case else f"{list_name}/{i}" for i, case in enumerate(cases)]


def _flatten(content: dict[str, Any]) -> dict[str, Any]:
    """Entries: one per field of a case in a known list, one per special id, and everything else as it is."""
    entries: dict[str, Any] = {}
    for name, value in content.items():
        if name in _REPLAYS and isinstance(value, list):
            for case_name, case in zip(_case_names(name, value), value, strict=True):
                entries |= {f"{case_name}/{field}": fields for field, fields in case.items()}
        elif name == "special_ids" and isinstance(value, dict):
            entries |= {f"{name}/{token}": id_ for token, id_ in value.items()}
        else:
            entries[name] = value
    return entries


def _compare_ids(golden: GoldenFile, tokenizer: Tokenizer) -> None:
    found = {
        "codebook_size": tokenizer.num_semantic,
        "semantic_begin_id": tokenizer.semantic_begin_id,
        "semantic_end_id": tokenizer.semantic_end_id,
    }
    for name, value in found.items():
        if name in golden:
            golden.compare(name, value, 0)
    for entry in golden.names("special_ids/"):
        token = entry.removeprefix("special_ids/")
        try:
            golden.compare(entry, tokenizer.token_id(token), 0)
        except WeightsError as error:
            golden.check(entry, float("inf"), 0, entries=[entry], note=str(error))


def _generate_long(golden: GoldenFile, case: str, tokenizer: Tokenizer, num_codebooks: int) -> None:
    """The long-text loop: every batch's text and prompt, with the recorded codes fed back."""
    text, chunk_length = golden.read(f"{case}/text"), golden.read(f"{case}/chunk_length")
    texts, codes = golden.read(f"{case}/reference_texts"), golden.read(f"{case}/reference_codes")
    fed_back = golden.read(f"{case}/generated_codes_fed_back")
    references = []
    if texts and codes:  # the original ignores one without the other
        references = [Reference(ref, np.array(ref_codes)) for ref, ref_codes in zip(texts, codes, strict=True)]
    turns = split_text_by_speaker(text)
    batches = group_turns_into_batches(turns, MAX_TURNS, chunk_length) if turns else [text]
    golden.compare(f"{case}/batches", batches, 0)
    conversation = Conversation(Prompter(tokenizer, num_codebooks, mode=Mode.REFERENCE))
    conversation.system(references)
    prompts = []
    for batch, batch_codes in zip(batches, fed_back, strict=True):
        conversation.user(batch)
        conversation.assistant_header()
        prompts.append(conversation.columns_CT.tolist())
        conversation.assistant_history(np.array(batch_codes))
    golden.compare(f"{case}/prompts", prompts, 0)


def _content_sequence(golden: GoldenFile, case: str, tokenizer: Tokenizer, num_codebooks: int) -> None:
    modality = golden.read(f"{case}/modality")
    items = []
    for item in golden.read(f"{case}/items"):
        parts = tuple(part["text"] if part["type"] == "text" else np.array(part["codes"]) for part in item["parts"])
        items.append(Item(parts, item["speaker"], item["add_end"]))
    layout = "interleave" if modality == "interleave" else "chat"
    encoded = Prompter(tokenizer, num_codebooks, layout, Mode.REFERENCE).sequence(items, modality)
    golden.compare(f"{case}/matrix", encoded.columns_CT.tolist(), 0)
    for field, row in (("shifted_tokens", encoded.columns_CT[0]), ("vq_mask_tokens", encoded.is_frame_T.astype(int))):
        if f"{case}/{field}" in golden:
            golden.compare(f"{case}/{field}", row[:-1].tolist(), 0)


def _encode(golden: GoldenFile, case: str, tokenizer: Tokenizer, num_codebooks: int) -> None:
    del num_codebooks
    golden.compare(f"{case}/ids", tokenizer.encode(golden.read(f"{case}/text"), allow_special=True), 0)


def _split(golden: GoldenFile, case: str, tokenizer: Tokenizer, num_codebooks: int) -> None:
    del tokenizer, num_codebooks
    golden.compare(f"{case}/turns", split_text_by_speaker(golden.read(f"{case}/text")), 0)


def _group(golden: GoldenFile, case: str, tokenizer: Tokenizer, num_codebooks: int) -> None:
    del tokenizer, num_codebooks
    turns, max_speakers = golden.read(f"{case}/turns"), golden.read(f"{case}/max_speakers")
    batches = group_turns_into_batches(turns, max_speakers, golden.read(f"{case}/max_bytes"))
    golden.compare(f"{case}/batches", batches, 0)


def _clean(golden: GoldenFile, case: str, tokenizer: Tokenizer, num_codebooks: int) -> None:
    del tokenizer, num_codebooks
    golden.compare(f"{case}/cleaned", clean_text(golden.read(f"{case}/text")), 0)


_REPLAYS: dict[str, Callable[[GoldenFile, str, Tokenizer, int], None]] = {
    "generate_long": _generate_long,
    "content_sequence": _content_sequence,
    "encode": _encode,
    "split_text_by_speaker": _split,
    "group_turns_into_batches": _group,
    "clean_text": _clean,
}
