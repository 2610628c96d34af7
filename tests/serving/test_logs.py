"""Logging never raises, never blocks, and limits its volume."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog

from specdec.serving.process import logs
from specdec.serving.process.logs import (
    BURST,
    LINES_A_SECOND,
    MAX_LINE_BYTES,
    MAX_VALUE_CHARACTERS,
    LimitRate,
    LossyStream,
    cut_values,
)


@contextmanager
def pipe() -> Iterator[tuple[int, LossyStream]]:
    """Yield a pipe's reading end, and a stream that writes into the pipe."""
    reading, writing = os.pipe()
    try:
        yield reading, LossyStream(writing)
    finally:
        os.close(writing)
        os.close(reading)


def test_a_full_disk_loses_lines_and_raises_nothing() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream = LossyStream(descriptor)
    for _ in range(3):
        assert stream.write("a line\n") == 7
    assert stream.lost == 3
    os.close(descriptor)


def test_a_reader_that_has_left_loses_lines_and_raises_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = LossyStream(writing)
    stream.write("a line\n")
    assert stream.lost == 1
    os.close(writing)


def test_a_closed_descriptor_loses_lines_and_raises_nothing() -> None:
    descriptor = os.open("/dev/null", os.O_WRONLY)
    stream = LossyStream(descriptor)
    os.close(descriptor)
    stream.write("a line\n")
    assert stream.lost == 1


def test_a_reader_that_does_not_read_holds_up_nobody() -> None:
    """Once it reads again, lines are whole; a torn line is ended first."""
    with pipe() as (reading, stream):
        writer = threading.Thread(target=lambda: [stream.write("x" * 3000 + "\n") for _ in range(100)], daemon=True)
        writer.start()
        writer.join(30)
        assert not writer.is_alive()
        assert stream.lost > 0
        before = b""
        while select.select([reading], [], [], 0)[0]:
            before += os.read(reading, 1 << 16)
        lost = stream.lost
        stream.write("whole\n")
        assert stream.lost == lost
        after = os.read(reading, 1 << 16)
        assert (before + after).splitlines()[-1] == b"whole"
        assert {len(line) for line in before.splitlines()[:-1]} == {3000}


def test_a_line_without_end_is_cut() -> None:
    with pipe() as (reading, stream):
        chunks: list[bytes] = []
        reader = threading.Thread(target=lambda: chunks.append(os.read(reading, 1 << 20)))
        stream.write("x" * (MAX_LINE_BYTES // 2))
        reader.start()
        reader.join()
        assert sum(map(len, chunks)) == MAX_LINE_BYTES // 2
        assert stream.write("x" * (10 * MAX_LINE_BYTES)) == 10 * MAX_LINE_BYTES  # the writer notices no cut


def test_long_values_are_cut() -> None:
    event = cut_values(None, "info", {"event": "e", "why": "x" * 10**6, "exception": "y" * 10**6 + "END", "n": 3})
    assert len(event["why"]) < MAX_VALUE_CHARACTERS + 100
    assert "1000000 characters" in event["why"]
    assert event["exception"].endswith("END")
    assert len(json.dumps(event)) < 12_000
    assert event["n"] == 3


def test_an_event_that_comes_too_often_is_counted() -> None:
    now = 0.0
    limit = LimitRate(lambda: now)
    told = 0
    for _ in range(10_000):
        try:
            limit(None, "info", {"event": "flood"})
            told += 1
        except structlog.DropEvent:
            pass
    assert told == BURST
    assert limit(None, "info", {"event": "another"}) == {"event": "another"}
    assert limit(None, "critical", {"event": "flood"}) == {"event": "flood"}
    now += 1.0 / LINES_A_SECOND
    assert limit(None, "info", {"event": "flood"})["suppressed"] == 10_000 - BURST


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Configure logging as services do, into a file."""
    before, root = structlog.get_config(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    file = tmp_path / "log"
    with file.open("w") as sink:
        monkeypatch.setattr("sys.stderr", sink)
        logs.configure("test")
        yield file
    structlog.configure(**before)
    structlog.contextvars.clear_contextvars()
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class Odd:
    """A value whose repr raises."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_what_cannot_be_spelt_is_no_exception(configured: Path) -> None:
    log = structlog.get_logger()
    log.info("odd", value=Odd())
    log.info("next")
    (line,) = lines(configured)
    assert line["event"] == "next"
    assert line["lost_lines"] == 1


def test_libraries_log_the_same_way(configured: Path) -> None:
    library = logging.Logger("some.library")  # not captured by pytest's handler
    library.handlers = [
        handler for handler in logging.getLogger().handlers if type(handler).__module__ == logs.__name__
    ]
    library.warning("%d of %s", 1, "x" * 10**6)
    library.warning("%d", "no number")
    try:
        raise KeyError("here")
    except KeyError:
        library.exception("it failed")
    one, two, three = lines(configured)
    assert (one["event"], one["logger"], one["level"]) == ("library", "some.library", "warning")
    assert len(json.dumps(one)) < 3000
    assert two["message"] == "%d"
    assert "KeyError" in three["exception"]


def test_a_caller_that_has_left_is_no_fault(configured: Path) -> None:
    """gRPC logs a traceback if the caller that should get a status has left."""
    library = logging.Logger("grpc._cython.cygrpc")
    library.handlers = [
        handler for handler in logging.getLogger().handlers if type(handler).__module__ == logs.__name__
    ]
    try:
        raise grpc.aio.InternalError("execute_batch")
    except grpc.aio.InternalError:
        library.exception("raised in core")
    assert lines(configured) == []


@pytest.mark.parametrize("mode", ["wb", "ab"])
def test_one_file_takes_both_stdout_and_stderr(tmp_path: Path, mode: str) -> None:
    """As with `specdec verifier ... > verifier.log 2>&1`."""
    script = (
        "import sys; from specdec.serving.process.logs import guard_stderr; guard_stderr();"
        "print('first', file=sys.stderr); print('ready', flush=True); print('last', file=sys.stderr)"
    )
    with (tmp_path / "log").open(mode) as log:
        subprocess.run([sys.executable, "-c", script], stdout=log, stderr=log, check=True)
    assert (tmp_path / "log").read_text().split() == ["first", "ready", "last"]
