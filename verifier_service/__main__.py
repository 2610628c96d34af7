"""`python -m verifier_service`: serve a target model; under `torchrun`, split into parts, one in each process."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import structlog
import typer

from specdec.durations import duration
from specdec.engine.engine import Engine
from specdec.engine.engines.loading import MOST_THREADS, Dtype, Kind, load_engine
from specdec.engine.memory import share_memory_among_threads
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.identity import identity_of
from specdec.serving.process import logs
from specdec.serving.process.server import ServerSettings, in_a_thread_of_its_own, run
from verifier_service.proposers.draft_model import DraftModelProposer
from verifier_service.servicer import Limits, VerifierServicer
from verifier_service.step_loop import StepLoop

if TYPE_CHECKING:  # it brings torch
    from specdec.engine.distributed.ranks import Ranks

log = structlog.get_logger()


def main(
    model: Annotated[Path, typer.Option(help="Directory of the target model, in Hugging Face's layout.")],
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="What the model computes in; by default an exported model's own, else float32. float16: for GPUs."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    engine: Annotated[
        Kind,
        typer.Option(
            help="onnx exports a Hugging Face directory on first use, and is not exact. eager: the model's own layers."
        ),
    ] = "torch",
    threads: Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="Threads of the forward pass.")] = 1,
    threads_while_drafting: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_THREADS, help="Threads of it at most while drafts on this machine are at work."),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=512, help="Tokens of key/value memory; for 64 full texts by default, half of what is free at most."
        ),
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions open at once at most.")] = 512,
    max_waiting: Annotated[
        int, typer.Option(min=1, help="Sessions that wait for memory at most; more are refused.")
    ] = 128,
    step_rows: Annotated[
        int, typer.Option(min=8, help="Rows up to which prompts fill a step; fewer if a row costs less then.")
    ] = 512,
    max_candidates: Annotated[
        int, typer.Option(min=1, max=128, help="Candidates a session verifies in a step at most.")
    ] = Limits.max_candidates,
    suffix_cache_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            max=1 << 20,
            help="Tokens of each tenant's finished texts that its next requests guess from; 0: none.",
        ),
    ] = 0,
    exact: Annotated[
        bool, typer.Option(help="Tokens do not depend on who shares a step; checked at start, where it can be.")
    ] = True,
    compile: Annotated[
        bool, typer.Option(help="Fuse the model's layers: faster steps for half a minute at start and a C++ compiler.")
    ] = False,
    draft_model: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a small model that guesses here, between steps: where a draft service would take cores "
            "from the target."
        ),
    ] = None,
    drain_seconds: Annotated[
        float, duration("Time that running requests are given when the service is told to end.")
    ] = 30.0,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    stop_with_stdin: Annotated[bool, typer.Option(help="End when stdin closes.")] = False,
) -> None:
    """Serve a target model: verify candidates, decide every token."""
    share_memory_among_threads()
    settings = ServerSettings(host, port, drain_seconds, log_level, stop_with_stdin)

    common: dict[str, Any] = {
        "capacity": kv_tokens,
        "threads": (threads, threads if threads_while_drafting is None else min(threads, threads_while_drafting)),
        "dtype": dtype,
        "device": device,
    }

    def load(directory: ModelDirectory, ranks: Ranks | None) -> Engine:
        return load_engine(engine, directory, exact=exact, compiled=compile, ranks=ranks, **common)

    def start(ranks: Ranks | None = None) -> VerifierServicer:
        directory = ModelDirectory(model) if ranks is None else ranks.together(lambda: ModelDirectory(model))
        small = None if draft_model is None else ModelDirectory(draft_model)
        if small is not None:
            small.check_pair(directory)
        loaded = load(directory, ranks)
        if exact and not loaded.exact:
            log.warning("not_exact", numerics=loaded.numerics, why="rows depend on their batch here")
        own = None if small is None else DraftModelProposer(load_engine(engine, small, **common), small.context)
        loop = StepLoop(loaded, step_rows=step_rows, suffix_cache_tokens=suffix_cache_tokens, draft_model=own)
        loop.start()
        limits = Limits(max_candidates=max_candidates, max_sessions=max_sessions, max_waiting=max_waiting)
        return VerifierServicer(loop, identity_of(directory, loaded, loop.context), limits)

    if os.environ.get("WORLD_SIZE", "1") == "1":
        run(settings, lambda: in_a_thread_of_its_own(start), "verifier")
        return
    from specdec.engine.distributed.ranks import PLACE, Ranks
    from specdec.engine.engines.parallel_engine import follow

    for name in PLACE:
        if not (value := os.environ.get(name, "")).isdecimal():
            raise typer.BadParameter(f"the environment has WORLD_SIZE, and {name} is {value!r}: torchrun sets both")
    logs.configure("verifier", log_level)
    with Ranks.joined(device) as ranks:
        if ranks.rank == 0:
            run(settings, lambda: in_a_thread_of_its_own(partial(start, ranks)), "verifier")
        else:
            follow(ranks, lambda: load(ranks.together(lambda: ModelDirectory(model)), ranks))


if __name__ == "__main__":
    typer.run(main)
