"""The page with the answers, docs/http-compatibility.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from tests.compatibility.answers import Answer, Answers
from tests.compatibility.asked import Asked

MAX_PROBLEM_CHARACTERS = 140

HEAD = """\
# HTTP requests beside vLLM's and llama.cpp's servers

What three servers answer to the same requests: each field of OpenAI, vLLM and llama.cpp alone, options that belong
together, forms of messages and tools, JSON schemas, and routes. Written by

    python -m tests.compatibility --vllm URL --llama-cpp URL --page docs/http-compatibility.md

- *200*: accepted. *200, ignored*: the answer lists the field as ignored, because it is unknown or changes no text. The
  other servers ignore unknown fields silently, so their 200 does not mean that a field has an effect.
- specdec refuses unsupported fields that would change the text, and names an alternative if there is one
  ([the fields](openai-api.md#fields)).
- *fits*: the answer, or the arguments of the call, fit the schema. A schema with a plain *200*: the 64 tokens were too
  few to end the answer, or the schema cannot be checked here.
- All serve copies of the demo target; the template has tools. Requests are greedy, so vLLM refuses `n` above 1.
"""

REST = """\
Requests that are not listed below are taken by every server, and nothing in them is ignored.
"""


def page(asked: Sequence[Asked], answers: Sequence[Answers]) -> str:
    """Return the page in Markdown."""
    versions = ", ".join(f"{each.system} {each.version} ({each.date})" for each in answers)
    parts = [HEAD, f"Servers: {versions}.\n", *_counts(asked, answers), "", REST]
    titles = {"fields": "Fields", "together": "Options, messages and tools", "schemas": "Schemas", "routes": "Routes"}
    for group, title in titles.items():
        parts += [f"## {title}", "", *_table([each for each in asked if each.group == group], answers), ""]
    return "\n".join(parts).rstrip() + "\n"


def _counts(asked: Sequence[Asked], answers: Sequence[Answers]) -> list[str]:
    """Return a table of the number of requests that each server accepts."""

    def count(group: str, has: Callable[[Answer], bool]) -> list[str]:
        of_group = [each for each in asked if each.group == group]
        found = [[server.to(each) for each in of_group] for server in answers]
        return [str(sum(answer is not None and has(answer) for answer in each)) for each in found]

    def number(group: str) -> int:
        return sum(each.group == group for each in asked)

    rows = [
        (f"fields taken, of {number('fields')}", count("fields", lambda answer: answer.taken)),
        ("fields said to be ignored", count("fields", lambda answer: bool(answer.ignored))),
        (f"options, messages and tools taken, of {number('together')}", count("together", lambda a: a.taken)),
        (f"schemas taken, of {number('schemas')}", count("schemas", lambda answer: answer.taken)),
        ("answers to schemas that ended, and fit", count("schemas", lambda answer: answer.fits is True)),
        ("answers to schemas that ended, and do not fit", count("schemas", lambda answer: answer.fits is False)),
        (f"routes, of {number('routes')}", count("routes", lambda answer: answer.taken)),
    ]
    names = [each.system for each in answers]
    return [_row(["", *names]), "|---" * (len(names) + 1) + "|", *(_row([name, *counts]) for name, counts in rows)]


def _table(asked: Iterable[Asked], answers: Sequence[Answers]) -> list[str]:
    """Return the table of the requests that some server refuses, or accepts with a remark."""
    rows: dict[str, list[list[str]]] = {}  # by name: one list of cells for each route
    for each in asked:
        cells = [_cell(server.to(each)) for server in answers]
        rows.setdefault(_name(each), []).append(cells)
    lines = [_row(["request", *(each.system for each in answers)]), "|---" * (len(answers) + 1) + "|"]
    for name, of_routes in rows.items():
        cells = [" / ".join(dict.fromkeys(of_server)) for of_server in zip(*of_routes, strict=True)]
        if any(cell not in ("200", "200, fits") for cell in cells):
            lines.append(_row([f"`{_safe(name)}`", *cells]))
    return lines


def _name(asked: Asked) -> str:
    """Return the name of a request's row; a field that was tried with both routes has a single row."""
    if asked.group == "schemas":
        return asked.name.partition(": ")[2]
    return asked.name


def _cell(answer: Answer | None) -> str:
    if answer is None:
        return "-"
    if not answer.taken:
        return f"{answer.status} {_safe(answer.problem)}".strip()
    return (
        "200"
        + (", ignored" if answer.ignored else "")
        + {None: "", True: ", fits", False: ", does not fit"}[answer.fits]
    )


def _safe(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
    return text if len(text) <= MAX_PROBLEM_CHARACTERS else f"{text[:MAX_PROBLEM_CHARACTERS]}..."


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
