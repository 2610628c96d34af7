"""Pages contain exactly the tables of `bench/results`."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from bench.tools.tables import ROOT, Book, TablesError, main, shell

NUMBER = re.compile(r"\d(?:[\d,]*\d)?(?:\.\d+)?")
PAGE = "docs/benchmarks/capacity.md"
RESULT = "bench/results/capacity-xeon.json"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the pages and results, to be modified."""
    for folder in ("bench/results", "docs/benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


def check(root: Path) -> str:
    """Return the complaints of `--check`."""
    with pytest.raises(SystemExit) as stopped:
        main(["--check", "--root", str(root)])
    return str(stopped.value)


def test_pages_show_the_results_and_all_of_them() -> None:
    book = Book(ROOT)
    assert len(book.results) > 30
    assert book.problems() == []
    main(["--check"])


def test_figures_of_answers_are_in_the_tables() -> None:
    for result in Book(ROOT).results.values():
        told = [result.note, *(f"{table.title} {table.markdown}" for table in result.tables)]
        known = set(NUMBER.findall(" ".join(told)))
        assert set(NUMBER.findall(result.answer)) <= known, result.name


def test_every_page_is_in_the_summary() -> None:
    folder = ROOT / "docs" / "benchmarks"
    summary = (folder / "README.md").read_text(encoding="utf-8")
    named = " ".join(re.findall(r"<!-- answers: (.+) -->", summary)).split()
    assert sorted(named) == sorted(page.stem for page in folder.glob("*.md") if page.stem != "README")


@pytest.mark.parametrize("file", [PAGE, RESULT])
def test_a_figure_changed_by_hand_is_found(copy: Path, file: str) -> None:
    replace(copy / file, "2549", "2594")
    assert "capacity.md differs from the results" in check(copy)


def test_the_readme_is_checked_too(copy: Path) -> None:
    replace(copy / "README.md", "1708 (3.99)", "1708 (4.99)")
    assert check(copy) == "README.md differs from the results: run `python -m bench tables`"


def test_pages_are_written_as_the_results_say(copy: Path) -> None:
    replace(copy / RESULT, "2549 (", "9999 (")
    main(["--root", str(copy)])
    assert "9999 (2301 to 2758)" in (copy / PAGE).read_text(encoding="utf-8")
    main(["--check", "--root", str(copy)])


def test_a_result_that_no_page_shows_is_found(copy: Path) -> None:
    shutil.copy(copy / RESULT, copy / "bench/results/other-xeon.json")
    assert check(copy) == "other-xeon#Session-steps is shown on no page"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "results: capacity-xeon",
            "results: capacity-none",
            "capacity.md: there is no bench/results/capacity-none.json",
        ),
        ("results: capacity-xeon", "results: capacity-xeon#None", "capacity.md: capacity-xeon has no table 'None'"),
        ("<!-- end -->", "", "capacity.md: a mark is not closed, or stands inside another"),
    ],
)
def test_a_mark_that_leads_nowhere_is_refused(copy: Path, old: str, new: str, message: str) -> None:
    replace(copy / PAGE, old, new)
    with pytest.raises(TablesError, match=re.escape(message)):
        Book(copy).filled(copy / PAGE)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("machine", "mars", "its name does not end with its machine, mars"),
        ("tables", [{"title": "a", "columns": ["b", "c"], "rows": [["d"]]}], "a row does not have 2 cells"),
        ("more", "", "unexpected keyword argument 'more'"),
    ],
)
def test_a_result_that_is_not_whole_is_refused(copy: Path, field: str, value: object, message: str) -> None:
    fields = json.loads((copy / RESULT).read_text(encoding="utf-8"))
    (copy / RESULT).write_text(json.dumps(fields | {field: value}), encoding="utf-8")
    assert message in check(copy)


def test_long_commands_are_broken_between_options() -> None:
    command = "python -m bench speed " + " ".join(f"--option-{number} value" for number in range(20))
    lines = shell(command).split(" \\\n    ")
    assert len(lines) > 2
    assert " ".join(lines) == command
    assert all(line.startswith("--") for line in lines[1:])
