import copy
import json
import shutil
from pathlib import Path

import pytest

from fishjax.errors import WeightsError
from fishjax.verify.prompt import recognises, verify

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "prompt_format" / "cases.json").read_text(encoding="utf-8"))


def replay(folder: Path, cases: dict):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "prompt_format" / name, folder / name)
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    return verify(folder, folder)


def test_the_recorded_cases_are_all_compared_and_equal():
    reports = verify(GOLDEN / "prompt_format", GOLDEN)
    assert [report.file for report in reports] == [
        f"prompt_format/{name}" for name in ("cases.json", "tokenizer.json", "tokenizer_config.json")
    ]
    assert all(report.ok for report in reports)
    cases = reports[0]
    num_results = {"generate_long": 2, "content_sequence": 3}  # compared fields of a case
    lists = ("generate_long", "content_sequence", "encode")
    lists += ("split_text_by_speaker", "group_turns_into_batches", "clean_text")
    wanted = sum(len(CASES[name]) * num_results.get(name, 1) for name in lists) + len(CASES["special_ids"]) + 3
    assert cases.compared == len(cases.checks) == wanted
    assert cases.inputs + cases.compared == cases.present


def first_number(value):
    """Path to a number inside nested lists."""
    path = []
    while isinstance(value, list):
        path.append(0)
        value = value[0]
    return path


@pytest.mark.parametrize(
    ("list_name", "field"),
    [
        ("generate_long", "prompts"),
        ("content_sequence", "matrix"),
        ("content_sequence", "shifted_tokens"),
        ("content_sequence", "vq_mask_tokens"),
        ("encode", "ids"),
    ],
)
def test_one_changed_number_fails(tmp_path, list_name, field):
    cases = copy.deepcopy(CASES)
    target, path = cases[list_name][1][field], first_number(cases[list_name][1][field])
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] += 1e-2
    assert not replay(tmp_path, cases)[0].ok


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c["special_ids"].update({"<|voice|>": 428}),
        lambda c: c["special_ids"].update({"<|nothing|>": 1}),
        lambda c: c.update(semantic_begin_id=431),
        lambda c: c.update(codebook_size=63),
        lambda c: c.update(num_codebooks=5),
        lambda c: c["generate_long"][9]["batches"].pop(),
        lambda c: c["generate_long"][9]["generated_codes_fed_back"].pop(),
        lambda c: c["generate_long"][0].update(surprise=1),
        lambda c: c["generate_long"][0].pop("text"),
        lambda c: c["content_sequence"][1]["items"][0]["parts"][1].update(codes=[[1, 2]]),
        lambda c: c["split_text_by_speaker"][3]["turns"].append("x"),
        lambda c: c["group_turns_into_batches"][0].update(max_bytes=101_000),
        lambda c: c["clean_text"][0].update(cleaned="hi "),
        lambda c: c.update(new_list=[{"text": "a"}]),
    ],
)
def test_one_changed_case_fails(tmp_path, change):
    cases = copy.deepcopy(CASES)
    change(cases)
    assert not replay(tmp_path, cases)[0].ok


def test_a_part_of_the_lists_is_enough(tmp_path):
    reports = replay(tmp_path, {"encode": CASES["encode"]})
    assert reports[0].ok
    assert reports[0].compared == len(CASES["encode"])


def test_other_folders_are_not_recognised(tmp_path):
    assert not recognises(tmp_path)
    assert verify(tmp_path, tmp_path) == []
    assert replay(tmp_path, {"cases": []}) == []
    (tmp_path / "cases.json").write_text("[]", encoding="utf-8")
    assert verify(tmp_path, tmp_path) == []


def test_a_wrong_tokenizer_is_an_error(tmp_path):
    replay(tmp_path, CASES)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(WeightsError, match=r"tokenizer\.json"):
        verify(tmp_path, tmp_path)
