"""`python -m draft_service`: serve a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import structlog
import typer

from draft_service import expansion_width
from draft_service.draft_loop import DraftLoop
from draft_service.language_model import LanguageModelDrafter
from draft_service.servicer import DraftServicer, Limits
from specdec.durations import duration
from specdec.engine.engines.loading import MOST_THREADS, Dtype, Kind, load_engine
from specdec.engine.memory import share_memory_among_threads
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.identity import identity_of
from specdec.serving.process.server import ServerSettings, in_a_thread_of_its_own, run

log = structlog.get_logger()


def main(
    model: Annotated[
        Path, typer.Option(help="Directory of the draft model: exported by `specdec export`, or Hugging Face's layout.")
    ],
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    engine: Annotated[Kind, typer.Option(help="onnx exports a Hugging Face directory on first use.")] = "onnx",
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="float16: for GPUs. bfloat16: with --engine torch. By default an exported model's own, else float32."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="Threads of the forward pass.")] = 1,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=512, help="Tokens of key/value memory; for 64 full texts by default, half of what is free at most."
        ),
    ] = None,
    max_sessions: Annotated[int, typer.Option(min=1, help="Sessions open at once at most.")] = 256,
    drain_seconds: Annotated[
        float, duration("Time that running requests are given when the service is told to end.")
    ] = 30.0,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    stop_with_stdin: Annotated[bool, typer.Option(help="End when stdin closes.")] = False,
) -> None:
    """Serve a draft model, which proposes candidates ahead of the target."""
    share_memory_among_threads()
    settings = ServerSettings(host, port, drain_seconds, log_level, stop_with_stdin)

    def start() -> DraftServicer:
        directory = ModelDirectory(model)
        loaded = load_engine(engine, directory, capacity=kv_tokens, threads=(threads,), dtype=dtype, device=device)
        limits = Limits(max_sessions=max_sessions)
        # A session's slots hold its text and its nodes.
        identity = identity_of(directory, loaded, loaded.capacity - 1 - limits.max_nodes)
        nodes = expansion_width.measured(loaded, limits.defaults.max_branches)
        log.info("expansion_width", nodes_of_a_session_in_a_step=nodes)
        loop = DraftLoop(LanguageModelDrafter(loaded, rows_per_session=nodes))
        loop.start()
        return DraftServicer(loop, identity, limits)

    run(settings, lambda: in_a_thread_of_its_own(start), "draft")


if __name__ == "__main__":
    typer.run(main)
