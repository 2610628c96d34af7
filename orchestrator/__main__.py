"""`python -m orchestrator`: serve completions, with verifiers and, if there are any, drafts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from orchestrator.discovery import Discovery, Place
from orchestrator.peers import Peers
from orchestrator.pods import Pods
from orchestrator.request import Model
from orchestrator.servicer import GenerationServicer
from orchestrator.tokenizer import Tokenizer
from orchestrator.workers import supervise
from specdec.durations import duration
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.process.server import ServerSettings, run, run_program


def _place(text: str) -> Place:
    try:
        return Place.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def main(
    model: Annotated[Path, typer.Option(help="Directory of the target model; its tokenizer and config are read.")],
    verifier: Annotated[
        list[Place],
        typer.Option(
            parser=_place,
            metavar="PLACE",
            help="A verifier, HOST:PORT, or dns:NAME:PORT for one at each of a name's addresses. May be repeated.",
        ),
    ],
    draft: Annotated[
        list[Place] | None,
        typer.Option(parser=_place, metavar="PLACE", help="A draft, likewise; without any, undrafted."),
    ] = None,
    host: str = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    workers: Annotated[int, typer.Option(min=1, max=256, help="Processes that share the port; each uses a core.")] = 1,
    patience_ms: Annotated[
        float, duration("Longest time a step may be put off for expected candidates.", max=60_000.0)
    ] = 50.0,
    silence_seconds: Annotated[
        float, duration("A draft or verifier that says nothing for so long is lost.", min=0.5, max=3600.0)
    ] = 1.5,
    failover_seconds: Annotated[float, duration("Longest time without progress until a request is given up.")] = 30.0,
    drain_seconds: Annotated[
        float, duration("Time that running requests are given when the service is told to end.")
    ] = 30.0,
    log_level: Literal["debug", "info", "warning", "error"] = "info",
    stop_with_stdin: Annotated[bool, typer.Option(help="End when stdin closes.")] = False,
    share_port: Annotated[bool, typer.Option(hidden=True)] = False,  # set when a worker is started
) -> None:
    """Serve completions to backend applications."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a request has one text; few threads encode
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
        verifiers, drafts = Pods(), Pods() if draft else None
        discoveries = [Discovery(verifier, verifiers)]
        if draft and drafts is not None:
            discoveries.append(Discovery(draft, drafts))
        for discovery in discoveries:
            await discovery.start()
        peers = Peers(
            verifiers,
            drafts,
            patience_seconds=patience_ms / 1000,
            silence_seconds=silence_seconds,
            failover_seconds=failover_seconds,
            discoveries=discoveries,
        )
        return GenerationServicer(served, peers)

    run(settings, load, "orchestrator")


if __name__ == "__main__":
    typer.run(main)
