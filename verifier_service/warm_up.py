"""`specdec warm-up`: fill the cache folder for a model and exit, so that a verifier started later finds it warm."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

from specdec.extras import needed_by

with needed_by("warm-up", "verifier"):
    import typer

    from specdec.command_line import LogLevel
    from specdec.engine import cache_folder, start_phases
    from specdec.engine.cpu_count import MAX_THREADS, threads_for
    from specdec.engine.engines.loading import load_engine
    from specdec.engine.memory import set_memory_policy
    from specdec.engine.placement import Placement, WantedDtype
    from specdec.engine.preflight.check import Wanted, check
    from specdec.serving.process import logs
    from specdec.serving.process.server import StartError, run_program
    from verifier_service.verification.tree_verification import warm_up

KV_TOKENS = 2048
"""KV cache size; the cached files do not depend on it."""


def main(
    model: Annotated[
        Path, typer.Option(help="Directory of the target model, or its GGUF file, as for `specdec verifier`.")
    ],
    dtype: Annotated[WantedDtype, typer.Option(help="The verifier's --dtype.")] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_THREADS, help="The verifier's --threads. Default: all cores available to this process."
        ),
    ] = None,
    threads_while_drafting: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_THREADS, help="The verifier's --threads-while-drafting."),
    ] = None,
    log_level: LogLevel = "info",
) -> None:
    """Fill the cache folder of a CPU verifier (compiled code, results of checks) and exit: for image builds."""
    set_memory_policy()

    def fill() -> None:
        placement = Placement("torch", dtype, "cpu", KV_TOKENS)
        (directory,) = check(Wanted(model, placement))
        folder = cache_folder.usable()
        if folder is None:
            raise StartError(
                f"the cache folder {cache_folder.place() or '(none: SPECDEC_CACHE_DIR is empty)'} cannot be used, so "
                "nothing would be kept: set SPECDEC_CACHE_DIR to a folder only this user can write to"
            )
        most = threads or threads_for("cpu")
        fewer = most if threads_while_drafting is None else min(most, threads_while_drafting)
        load_engine(directory, placement, threads=(most, fewer), exact=True)
        with start_phases.phase("compiled_loops"):
            warm_up(directory.vocabulary)
        start_phases.log_end()
        typer.echo(f"warm {folder}")

    async def program() -> None:
        logs.configure("warm-up", log_level)
        await asyncio.to_thread(fill)

    run_program(program(), "warm-up")
