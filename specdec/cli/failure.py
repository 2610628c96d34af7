"""Failures of a command: one line on stderr, and an exit status for the kind of failure."""

from __future__ import annotations

import errno
import functools
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, ParamSpec

import grpc
import typer

from specdec.client.errors import (
    ERRORS,
    AccessDenied,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PromptChanged,
    ServerError,
    SpecdecError,
    Unavailable,
    Unimplemented,
)
from specdec.exit_status import ExitStatus
from specdec.extras import hint

STATUS: Mapping[type[SpecdecError], ExitStatus] = MappingProxyType(
    {
        InvalidRequest: ExitStatus.REFUSED,
        NotFound: ExitStatus.REFUSED,
        AccessDenied: ExitStatus.REFUSED,
        PromptChanged: ExitStatus.REFUSED,
        Unimplemented: ExitStatus.REFUSED,
        Unavailable: ExitStatus.UNREACHABLE,
        Overloaded: ExitStatus.TRY_AGAIN,
        DeadlineExceeded: ExitStatus.TRY_AGAIN,
        Cancelled: ExitStatus.INTERNAL,  # by the server: a cancellation here ends as INTERRUPTED
        ServerError: ExitStatus.INTERNAL,
    }
)
"""The status for every error of a call; a test checks that none is missing."""

KEY_HINT = " (give it with --api-key-file, or in SPECDEC_API_KEY)"

TRACEBACK = "SPECDEC_TRACEBACK"
"""Environment variable that makes an internal error raise its traceback instead of printing one line."""

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Write errors for lack of room: a full disk, a quota, a limit on the size of files."""

Arguments = ParamSpec("Arguments")


def program() -> str:
    """Return the command to show in hints: `specdec`, or `python -m specdec.cli` if it was started that way."""
    return "specdec" if Path(sys.argv[0]).name == "specdec" else "python -m specdec.cli"


def fail(message: str, status: ExitStatus = ExitStatus.FAILED) -> NoReturn:
    """Print a message for a person and end the process."""
    print(f"specdec: {message}", file=sys.stderr)
    raise SystemExit(status)


def end_on_sigterm() -> None:
    """Make SIGTERM raise SystemExit, so that half-written files are removed; a second one kills the process."""

    def end(number: int, _: object) -> NoReturn:
        signal.signal(number, signal.SIG_DFL)
        raise SystemExit(ExitStatus.TERMINATED)

    signal.signal(signal.SIGTERM, end)


def say(line: str) -> None:
    """Print a line for a person; stdout is reserved for results."""
    print(f"specdec: {line}", file=sys.stderr, flush=True)


def end_with_stdin() -> None:
    """End this process by SIGTERM when its stdin, a pipe that the parent holds open, is closed. Reads all of stdin."""

    def wait() -> None:
        while os.read(0, 1024):  # not by sys.stdin, whose lock would be held when the interpreter ends
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


def described(error: SpecdecError) -> str:
    """Return a failed call's error as a line for a person, with what to do next."""
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{error}{KEY_HINT}"
    if isinstance(error, Overloaded) and error.retry_after:
        return f"{error}; try again in {math.ceil(error.retry_after)} s"
    return str(error)


def status_of(code: grpc.StatusCode) -> ExitStatus:
    """Return the exit status for a gRPC status."""
    return STATUS[ERRORS[code]]


def open_missing_streams() -> None:
    """Replace standard streams that the parent has closed, and that are therefore None, by /dev/null."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their numbers, 0 to 2
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115 (stays open)
            os.set_inheritable(stream.fileno(), True)  # to child processes, like any standard stream
            setattr(sys, name, stream)


def from_stdin(read: Callable[[], str]) -> str:
    """Return what `read` reads from stdin; ValueError, which names stdin, if it cannot be decoded."""
    try:
        return read()
    except UnicodeDecodeError as error:
        raise ValueError(f"stdin: {error}") from None


def prompt_text(prompt: str) -> str:
    """Return the text of a PROMPT argument, which `-` has on stdin; ValueError as in `from_stdin`."""
    return from_stdin(sys.stdin.read) if prompt == "-" else prompt


def _discard_output() -> None:
    """Discard the buffer of stdout, since flushing it at exit would make the interpreter print an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def ending(command: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Wrap a command so that a failure ends it with one line, and with a traceback only if TRACEBACK is set."""

    @functools.wraps(command)
    def run(*args: Arguments.args, **options: Arguments.kwargs) -> None:
        try:
            try:
                command(*args, **options)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()  # now: a failing flush at the interpreter's exit would have another exit status
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except KeyboardInterrupt:
            raise SystemExit(ExitStatus.INTERRUPTED) from None
        except BrokenPipeError:
            _discard_output()
            raise SystemExit(ExitStatus.BROKEN_PIPE) from None
        except SpecdecError as error:
            fail(described(error), STATUS[type(error)])
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:
                _discard_output()
                fail(f"{error.filename or 'output'}: {error.strerror}", ExitStatus.FAILED)
            missing = isinstance(error, ModuleNotFoundError) and hint(error)
            if missing or os.environ.get(TRACEBACK):
                raise  # `needed_by` reports a missing package: it knows the program's name
            what = f"{type(error).__name__}: {error}".splitlines()[0]
            fail(f"internal error: {what} ({TRACEBACK}=1 shows where)", ExitStatus.INTERNAL)

    return run
