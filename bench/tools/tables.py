"""Fill the tables of the documentation with the results in `bench/results`.

    python -m bench tables            # write the tables into the pages
    python -m bench tables --check    # fail if a page differs from the results

A result file, NAME.json, is the latest answer to one question on one kind of machine. A page names the results it
shows, and everything down to the end mark is generated:

    <!-- results: NAME#TITLE -->    one of its tables, and nothing else
    <!-- results: NAME -->          its other tables, their source, and the commands that measure them again
    <!-- answers: PAGE PAGE -->     a row for each result of these pages: question, machine, answer
    <!-- machines -->               the kinds of machines
    <!-- end -->
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bench import markdown
from bench.arguments import parser_of

ROOT = Path(__file__).parent.parent.parent
WIDTH = 116
MARK = re.compile(r"<!-- (results|answers|machines)(?:: (.+?))? -->\n(.*?)<!-- end -->", re.DOTALL)
OPENING = re.compile(r"<!-- (?:results|answers|machines)\b")


class TablesError(Exception):
    """An unusable page or result file."""


@dataclass(frozen=True)
class Table:
    """A table of figures, as printed by the benchmark."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def __post_init__(self) -> None:
        if not self.title or any(len(row) != len(self.columns) for row in self.rows):
            raise TablesError(
                f"table {self.title!r}: a title is missing, or a row does not have {len(self.columns)} cells"
            )

    @property
    def markdown(self) -> str:
        return "\n".join(markdown.table(self.columns, self.rows))


@dataclass(frozen=True)
class Machine:
    """A kind of machine, by the factors that decide the speed of matrix products."""

    cores: str
    processor: str
    avx512: str
    bf16: str
    amx: str
    note: str


@dataclass(frozen=True)
class Result:
    name: str
    question: str
    answer: str
    machine: str
    date: str
    commit: str
    source: str
    versions: dict[str, str]
    commands: list[str]
    note: str
    tables: list[Table]

    @classmethod
    def read(cls, file: Path) -> Result:
        try:
            fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            tables = [Table(**table) for table in fields.pop("tables")]
            found = cls(name=file.stem, source=fields.pop("from"), tables=tables, **fields)
        except (ValueError, KeyError, TypeError, TablesError) as error:
            raise TablesError(f"{file.name}: {error}") from error
        if not found.name.endswith(f"-{found.machine}"):
            raise TablesError(f"{file.name}: its name does not end with its machine, {found.machine}")
        return found

    def table(self, title: str) -> Table:
        for table in self.tables:
            if table.title == title:
                return table
        raise TablesError(f"{self.name} has no table {title!r}")


@dataclass(frozen=True)
class Book:
    """All results, and the pages that show them."""

    root: Path

    @cached_property
    def results(self) -> dict[str, Result]:
        files = sorted((self.root / "bench" / "results").glob("*.json"))
        return {file.stem: Result.read(file) for file in files if file.stem != "machines"}

    @cached_property
    def machines(self) -> dict[str, Machine]:
        file = self.root / "bench" / "results" / "machines.json"
        return {name: Machine(**fields) for name, fields in json.loads(file.read_text(encoding="utf-8")).items()}

    @cached_property
    def pages(self) -> list[Path]:
        return [self.root / "README.md", *sorted((self.root / "docs" / "benchmarks").glob("*.md"))]

    def filled(self, page: Path) -> str:
        """Return the page with every generated part updated from the results."""
        text = page.read_text(encoding="utf-8")
        marks = list(MARK.finditer(text))
        if len(marks) != len(OPENING.findall(text)) or len(marks) != text.count("<!-- end -->"):
            raise TablesError(f"{page.name}: a mark is not closed, or stands inside another")
        try:
            return MARK.sub(lambda mark: self._part(page, mark), text)
        except TablesError as error:
            raise TablesError(f"{page.name}: {error}") from error

    def problems(self) -> list[str]:
        """Return the problems: pages that differ from the results, tables shown on no page."""
        different = [page for page in self.pages if self.filled(page) != page.read_text(encoding="utf-8")]
        shown = {each for page in self.pages for each in self._shown(page)}
        unused = [
            f"{name}#{table.title} is shown on no page"
            for name, result in self.results.items()
            for table in result.tables
            if not {name, f"{name}#{table.title}"} & shown
        ]
        return [f"{page.name} differs from the results: run `python -m bench tables`" for page in different] + unused

    def _part(self, page: Path, mark: re.Match[str]) -> str:
        kind, what, _ = mark.groups()
        if kind == "machines":
            body = self._machine_table()
        elif kind == "answers":
            body = self._answers(page, what.split())
        else:
            name, _, title = what.partition("#")
            result = self._result(name)
            body = result.table(title).markdown if title else self._whole(page, result)
        return mark.group().partition("\n")[0] + f"\n\n{body}\n\n<!-- end -->"

    def _result(self, name: str) -> Result:
        if name not in self.results:
            raise TablesError(f"there is no bench/results/{name}.json")
        return self.results[name]

    def _shown(self, page: Path) -> list[str]:
        marks = MARK.finditer(page.read_text(encoding="utf-8"))
        return [mark.group(2) for mark in marks if mark.group(1) == "results"]

    def _whole(self, page: Path, result: Result) -> str:
        """Return all tables of a result, followed by the conditions and commands that a reader needs to repeat them."""
        parts = [f"**{table.title}**\n\n{table.markdown}" for table in self._not_alone(result)]
        if result.machine not in self.machines:
            raise TablesError(f"{result.name}: machines.json has no {result.machine}")
        file = os.path.relpath(self.root / "bench" / "results" / f"{result.name}.json", page.parent)
        machine = f"[{result.machine}]({os.path.relpath(self.pages[1], page.parent)}#machines)"
        lines = f"{machine}, {result.date}, commit {result.commit}, [result]({file}). {result.note}".strip()
        parts.append(textwrap.fill(lines, WIDTH, break_long_words=False, break_on_hyphens=False))
        if result.commands:
            parts.append("```\n" + "\n".join(map(shell, result.commands)) + "\n```")
        return "\n\n".join(parts)

    def _not_alone(self, result: Result) -> list[Table]:
        """Return the tables of a result that are not shown separately on a page."""
        alone = {each for page in self.pages for each in self._shown(page)}
        return [table for table in result.tables if f"{result.name}#{table.title}" not in alone]

    def _answers(self, page: Path, names: Iterable[str]) -> str:
        def rows() -> Iterator[list[str]]:
            for name in names:
                file = page.parent / f"{name}.md"
                if file not in self.pages:
                    raise TablesError(f"there is no page {name}.md")
                asked = ""
                for each in self._shown(file):
                    if "#" not in each:
                        result = self._result(each)
                        question = "" if result.question == asked else f"[{result.question}]({name}.md)"
                        asked = result.question
                        yield [question, result.machine, result.answer]

        return "\n".join(markdown.table(["question", "machine", "answer"], rows()))

    def _machine_table(self) -> str:
        heads = ["machine", "cores", "processor", "AVX-512", "bfloat16 products", "AMX", "note"]
        rows = ([name, *vars(machine).values()] for name, machine in self.machines.items())
        return "\n".join(markdown.table(heads, rows))


def shell(command: str) -> str:
    """Split a command into shell continuation lines; an option and its value stay together."""
    tied = re.sub(r"(--\S+) (?!-)", "\\1\0", command)
    lines = textwrap.wrap(tied, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines).replace("\0", " ")


def main(given: Sequence[str]) -> None:
    parser = parser_of("tables", __doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page would change")
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout with the pages to fill")
    args = parser.parse_args(given)
    book = Book(args.root)
    try:
        if not args.check:
            for page in book.pages:
                page.write_text(book.filled(page), encoding="utf-8")
        problems = book.problems()
    except TablesError as error:
        problems = [str(error)]
    if problems:
        raise SystemExit("\n".join(problems))
