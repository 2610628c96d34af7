"""`python -m orchestrator`: serve completions, with a verifier and, if there is one, a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import grpc
import typer

from orchestrator.generation import Peers
from orchestrator.request import Model
from orchestrator.servicer import GenerationServicer
from orchestrator.tokenizer import Tokenizer
from orchestrator.workers import supervise
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.server import CHANNEL_OPTIONS, PEER_OPTIONS, ServerSettings, run, run_program


def main(
    model: Annotated[Path, typer.Option(help="Directory of the target model; its tokenizer and config are read.")],
    verifier: Annotated[str, typer.Option(help="Address of the verifier, HOST:PORT.")],
    draft: Annotated[str | None, typer.Option(help="Address of the draft, HOST:PORT; without one, undrafted.")] = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that share the port; each uses a core.")] = 1,
    patience_ms: Annotated[
        float, typer.Option(min=0, help="Longest time a step may be put off for expected candidates.")
    ] = 50.0,
    drain_seconds: Annotated[float, typer.Option(min=0)] = 30.0,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    stop_with_stdin: Annotated[bool, typer.Option(help="End when stdin closes.")] = False,
    share_port: Annotated[bool, typer.Option(hidden=True)] = False,  # what a worker is started with
) -> None:
    """Serve completions to backend applications."""
    settings = ServerSettings(host, port, drain_seconds, log_level, stop_with_stdin, share_port)
    if workers > 1:
        run_program(supervise(settings, workers), "orchestrator")
        return

    async def load() -> GenerationServicer:
        directory = ModelDirectory(model)
        served = Model(
            name=directory.name,
            tokenizer=Tokenizer(directory),
            tokenizer_fingerprint=directory.tokenizer_fingerprint,
            context=directory.context,
            vocabulary=directory.vocabulary,
            end_tokens=directory.end_tokens,
        )
        peers = Peers(
            verifier=_channel(verifier),
            draft=None if draft is None else _channel(draft),
            patience_seconds=patience_ms / 1000,
        )
        return GenerationServicer(served, peers)

    run(settings, load, "orchestrator")


def _channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS + PEER_OPTIONS)


if __name__ == "__main__":
    typer.run(main)
