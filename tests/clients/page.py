"""The page with the results, docs/clients.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.clients.runs import Result

MAX_ERROR_CHARACTERS = 160

HEAD = """\
# Clients

Which third-party clients were run against the HTTP server and the orchestrator, and what worked. `make clients`
installs them into `build/clients`, runs them and writes this page; `make clients CLIENTS="openai codex"` runs some.

- The server is what `specdec up --openai-port` starts, with copies of the demo pair whose chat template knows tools.
- Answers are greedy: a text must be the one that plain HTTP gives, whole and streamed, unless the client adds words to
  the prompt. Structured answers and calls must fit their schema.
- "A turn" of a coding agent ends without an error; the demo pair says nothing that an agent could use.
- Each use is a function in [tests/clients/checks](../tests/clients/checks).
- Codex as it is installed offers OpenAI's web search too, which is left out and named in `specdec.ignored`.
"""


def page(results: Sequence[Result]) -> str:
    """Return the page in Markdown."""
    dates = sorted({result.date for result in results})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    passed = sum(result.passed for result in results)
    count = f"Run on {when}: {len(results)} clients, {passed} without a failure."
    return "\n".join((HEAD, count, "", *table(results))) + "\n"


def table(results: Iterable[Result]) -> list[str]:
    """Return the lines of the table."""
    head = ["| Client | Version | Works | Does not |", "|---|---|---|---|"]
    return head + [row(result) for result in results]


def row(result: Result) -> str:
    """Return the row of a client."""
    bad = [f"{use}: `{_short(error)}`" for use, error in result.fails.items()]
    if result.problem is not None:
        bad.insert(0, _short(result.problem))
    cells = (
        f"`{result.package}` ({result.registry})",
        result.version,
        "; ".join(result.works) or "-",
        "; ".join(bad) or "-",
    )
    return f"| {' | '.join(cells)} |"


def _short(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|").replace("`", "'")
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[:MAX_ERROR_CHARACTERS]}..."
