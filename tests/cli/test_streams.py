"""What commands do with their standard streams: results alone on stdout, and streams that are closed, full or gone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LOOK = """
import os
from specdec.cli.failure import say
from specdec.local.upkeep import Upkeep
from specdec.serving.process import logs

class Dead:
    name, command = "draft", ("-m", "draft_service")
    process = type("Process", (), {"poll": lambda _: 1})()
    def ending(self):
        return "exit status 1"

class Stack:
    children, addresses = {"draft": Dead()}, {"draft": "127.0.0.1:1"}

reader, writer = os.pipe()
os.dup2(writer, 2)
logs.configure("up", "warning")
os.close(reader)
Upkeep(Stack(), say, lambda: 0).look()
print("looked")
"""
"""A look at a service that has died, which says a line to a stderr without a reader."""


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], text=True, timeout=100, check=False, **options)


def test_services_do_not_depend_on_a_reader_of_stderr() -> None:
    done = run("-c", LOOK, capture_output=True)
    assert (done.returncode, done.stdout) == (0, "looked\n")


@pytest.mark.verify
@pytest.mark.parametrize("words", [("doctor", "--json", "--model"), ("up", "--json", "--target")])
def test_a_warning_does_not_mix_with_results(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is no complete model, so every command ends after the warning."""
    file = tmp_path / "cut.gguf"
    file.write_bytes(b"GGUF\x03\0\0\0" + bytes(12))
    (tmp_path / "cache").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = run("-m", "specdec.cli", *words, str(file), capture_output=True)
    assert done.returncode == 1
    assert "cache_not_used" in done.stderr
    if words[0] == "doctor":
        assert "was not converted" in json.loads(done.stdout)["problem"]
    else:
        assert done.stdout == ""


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        ("api-key | true", 141, ""),
        ("api-key > /dev/full", 1, "specdec: output: No space left on device\n"),
        ("chat --address 127.0.0.1:1 <&-", 0, ""),
        ("api-key >&-", 0, ""),
        ("stats nowhere:1 2>&-", 69, ""),
        ("generate x --address 127.0.0.1:1 <&- >&- 2>&-", 69, ""),
    ],
)
def test_streams_may_be_gone_or_full(command: str, status: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # output that fits the buffer is written at the end
    script = f"set -o pipefail; {sys.executable} -m specdec.cli {command}"
    done = subprocess.run(["bash", "-c", script], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (status, said)
