"""`specdec up`: all three services on this machine."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from specdec import ports
from specdec.cli.failure import fail
from specdec.command_line import LogLevel
from specdec.engine.placement import WantedDtype


def up(
    target: Annotated[
        Path | None, typer.Option(help="Directory of the target model. By default the demo's target.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Directory of the draft model, or `none` for no draft service. By default the demo's draft, or none "
            "with --target or --local-draft."
        ),
    ] = None,
    local_draft: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a local draft: a small model that the verifier itself runs, in place of a draft service."
        ),
    ] = None,
    dtype: Annotated[
        WantedDtype,
        typer.Option(
            help="Data type that the target computes in; auto is the checkpoint's own where this machine computes it "
            "well, else float32."
        ),
    ] = "auto",
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Port of the orchestrator, for clients; with 0 every service takes a free one."
        ),
    ] = ports.ORCHESTRATOR,
    verifier_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"Port of the verifier. By default {ports.VERIFIER}."),
    ] = None,
    draft_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help=f"Port of the draft service. By default {ports.DRAFT}."),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the addresses of all services as one JSON object.")
    ] = False,
    log_level: LogLevel = "warning",
) -> None:
    """Start all three services on this machine, and again those that die. Ctrl-C stops them."""
    from specdec.local import LocalError, Stack
    from specdec.local.upkeep import Upkeep
    from specdec.serving.process.listening import ListenError, bound

    wanted = {
        "--port": port,
        "--verifier-port": (port and ports.VERIFIER) if verifier_port is None else verifier_port,
        "--draft-port": (port and ports.DRAFT) if draft_port is None else draft_port,
    }

    drafted = draft != "none" and (draft is not None or not (target or local_draft))
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: stop.append(n))
    try:
        for option in wanted if drafted else ("--port", "--verifier-port"):  # before models are loaded
            bound("127.0.0.1", wanted[option], option=option).close()
        with Stack.start(
            target,
            draft,
            local_draft=local_draft,
            dtype=dtype,
            port=port,
            log_level=log_level,
            stopped=lambda: bool(stop),
            verifier_options=("--port", str(wanted["--verifier-port"])),
            draft_options=("--port", str(wanted["--draft-port"])),
        ) as stack:
            described = {"address": stack.address, "services": stack.addresses}
            print(json.dumps(described) if json_output else stack.address, flush=True)
            upkeep = Upkeep(stack, lambda line: print(f"specdec: {line}", file=sys.stderr, flush=True))
            while not stop:
                time.sleep(0.2)
                upkeep.look()
    except (LocalError, ListenError) as error:
        fail(str(error))
