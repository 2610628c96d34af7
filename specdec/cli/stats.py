"""`specdec stats`: a service's identity and load."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from typing import Annotated, Self

import grpc
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specdec import ports
from specdec.cli.access import ADDRESS, OPEN, Access, one_address, with_access
from specdec.cli.failure import fail, status_of
from specdec.cli.pod_stats import NoSuchServiceError, PodStats, ask
from specdec.cli.stats_table import grid, printable, table
from specdec.client.errors import mismatch
from specdec.command_line import address, duration
from specdec.exit_status import ExitStatus
from specdec.wire.address import Address


@with_access
def stats(
    given: Annotated[
        Address | None,
        typer.Argument(
            parser=address,
            metavar="[ADDRESS]",
            help="Address of an orchestrator, verifier or draft service: HOST:PORT, or a gRPC target. Default: the "
            f"first of {ADDRESS}, else 127.0.0.1:{ports.ORCHESTRATOR}.",
            show_default=False,
        ),
    ] = None,
    instead: Annotated[
        Address | None,
        typer.Option(
            "--address", parser=address, metavar="ADDRESS", help="The same address, as other commands take it."
        ),
    ] = None,
    watch: Annotated[
        float | None, duration("Refresh interval in seconds, until Ctrl-C. Default: print once.", min=0.1)
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per refresh, one per line.")
    ] = False,
    timeout: Annotated[float, duration("Timeout in seconds.", min=0.001)] = 5.0,
    allowed: Access = OPEN,
) -> None:
    """Show a service's identity and load; for an orchestrator also its pods.

    On a terminal, --watch redraws in place; elsewhere it prints one block per refresh.
    """
    at = one_address(instead, given)
    show = _Json(at.target) if json_output else _Lines(at.target)
    with allowed.channel(at.target) as opened, contextlib.ExitStack() as exits:
        if watch is not None and not json_output and sys.stdout.isatty():
            show = exits.enter_context(Redrawn(at.target, Console(highlight=False)))
        while True:
            try:
                seen = ask(opened, timeout, allowed.metadata)
            except (grpc.RpcError, NoSuchServiceError) as error:
                line, status = _error_line(error, at.target, timeout)
                if not show.begun:
                    fail(line, status)
                show.problem(f"specdec: {line}")  # the service may return: keep watching
            else:
                show(seen)
            if watch is None:
                return
            time.sleep(watch)


class _Lines:
    """Prints each snapshot below the previous one."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._before: PodStats | None = None

    @property
    def begun(self) -> bool:
        return self._before is not None

    def __call__(self, seen: PodStats) -> None:
        if sys.stdout.isatty():
            Console(highlight=False).print(grid(self._target, seen, None))
        else:
            lines = table(self._target, seen, self._before)
            print(*([""] if self.begun else []), *lines, sep="\n", flush=True)
        self._before = seen

    def problem(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _Json(_Lines):
    """Prints each snapshot as a JSON object."""

    def __call__(self, seen: PodStats) -> None:
        print(json.dumps({"address": self._target, **seen.as_json()}), flush=True)
        self._before = seen


class Redrawn(_Lines):
    """Shows the last snapshot in place, on a terminal. Until the next snapshot a problem is shown above it, since
    rich crops what exceeds the terminal's height at the bottom."""

    def __init__(self, target: str, console: Console) -> None:
        super().__init__(target)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False)
        self._shown = Table.grid()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, seen: PodStats) -> None:
        self._shown = grid(self._target, seen, self._before)
        self._live.update(self._shown, refresh=True)
        self._before = seen

    def problem(self, line: str) -> None:
        self._live.update(Group(Text(line, style="red"), self._shown), refresh=True)


def _error_line(error: Exception, target: str, timeout: float) -> tuple[str, ExitStatus]:
    """Return the error message for a failed query, and the exit status."""
    if not isinstance(error, grpc.RpcError):
        return (
            f"{target}: a gRPC server answers, but has no statistics of a specdec.v2 orchestrator, verifier or draft "
            "service",
            ExitStatus.REFUSED,
        )
    code, details = error.code(), printable(" ".join(str(error.details()).split()))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"{target}: no answer within {timeout:g} s", ExitStatus.UNREACHABLE
    if code is grpc.StatusCode.UNAVAILABLE:
        why = re.sub("^[A-Z_]+: ", "", details.rpartition("last error: ")[2])
        return f"{target}: {mismatch(why) or f'no gRPC server answers ({why})'}", ExitStatus.UNREACHABLE
    return f"{target}: {code.name}: {details}", status_of(code)
