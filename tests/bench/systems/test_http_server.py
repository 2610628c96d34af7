"""If a server fails to start, the error quotes the relevant line of the server's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.systems.http_server import last_words


@pytest.mark.parametrize(
    ("log", "why"),
    [
        ("", "no output"),
        ("loading\nbye\n", "bye"),
        ("loading\nerror: no such file\nexiting", "error: no such file"),
        ("WARNING errors like `OSError: too many files`\nready", "ready"),
        (
            "ERROR Traceback\nERROR  File 1\n(Worker) ERROR ValueError: no room\nRuntimeError: see above",
            "ValueError: no room",
        ),
    ],
)
def test_the_line_that_says_why_is_told(log: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    assert last_words(tmp_path / "log") == why
