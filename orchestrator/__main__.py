"""`python -m orchestrator`: serve completions, with verifiers and, if there are any, drafts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

from specdec.extras import needed_by

with needed_by("orchestrator", "orchestrator"):
    import structlog
    import typer

    from orchestrator.models.catalog import Catalog
    from orchestrator.models.file import LoadedRevision, ModelsFile, ModelsFileError, RevisionEntry, check_name
    from orchestrator.models.followed_catalog import FollowedCatalog
    from orchestrator.models.revision import Revision
    from orchestrator.pods.peers import Peers, PeerSettings
    from orchestrator.requests.model import ServedModel
    from orchestrator.servicer import GenerationServicer
    from orchestrator.tenants.accounts import Accounts
    from orchestrator.tenants.file import TenantsFile, TenantsFileError
    from orchestrator.workers import Siblings, supervise
    from specdec import ports
    from specdec.command_line import (
        address,
        duration,
        run_command,
    )
    from specdec.engine.gguf_file import open_model
    from specdec.serving.pods.connections import SecureConnections, connect
    from specdec.serving.process import logs
    from specdec.serving.process.options import serving
    from specdec.serving.process.server import ServerSettings, StartError, run, run_program
    from specdec.text.check import check_text
    from specdec.wire.address import Address
    from specdec.wire.tls_files import TlsFiles

log = structlog.get_logger()

PEER_TLS = ("--peer-tls-cert", "--peer-tls-key", "--peer-tls-ca")
"""The options for TLS files of calls to pods, in the order of `TlsFiles`."""


def _model_name(text: str) -> str:
    """Return the model's name given by an option; BadParameter if it is invalid."""
    try:
        return check_name(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


@serving(ports.ORCHESTRATOR)
def main(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the target model: its tokenizer and configuration are read; weights are not needed. "
            "Or its GGUF file, converted on first use, which needs the extra `verifier`."
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            parser=_model_name,
            metavar="NAME",
            help="Name of the model in requests. May be repeated: all names are served; metrics, and answers "
            "to requests without a name, use the first. Default: the name of its directory.",
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="Jinja file of a chat template that replaces the model's own. Read once, at start."),
    ] = None,
    verifier: Annotated[
        list[Address] | None,
        typer.Option(
            parser=address,
            metavar="ADDRESS",
            help="Address of a verifier: HOST:PORT, or a gRPC target. dns:///NAME:PORT stands for one verifier per "
            "DNS record of the name. May be repeated.",
        ),
    ] = None,
    draft: Annotated[
        list[Address] | None,
        typer.Option(
            parser=address,
            metavar="ADDRESS",
            help="Address of a draft service, in the same form. May be repeated. Default: no remote draft.",
        ),
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of models and revisions with their directories, pods and traffic shares, in place of "
            "--model, --served-model-name, --chat-template, --verifier and --draft. Reloaded when it changes."
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=256, help="Worker processes sharing the port; each uses at most one core.")
    ] = 1,
    patience_ms: Annotated[
        float,
        duration(
            "Maximum step delay in milliseconds: how long a verifier may delay a step for candidates in flight.",
            max=60_000.0,
        ),
    ] = 50.0,
    silence_seconds: Annotated[
        float,
        duration("Seconds without a message before a verifier or draft counts as lost.", min=0.5, max=3600.0),
    ] = 1.5,
    failover_seconds: Annotated[float, duration("Seconds without progress before a request fails.")] = 30.0,
    peer_tls_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the CAs that sign the certificates of verifiers and drafts. With it, calls to them use "
            "TLS."
        ),
    ] = None,
    peer_tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file of the client certificate for verifiers and drafts that require one.")
    ] = None,
    peer_tls_key: Annotated[Path | None, typer.Option(help="PEM file of that certificate's key, unencrypted.")] = None,
    peer_tls_name: Annotated[
        str | None,
        typer.Option(
            help="Name that certificates of verifiers and drafts must be valid for. Default: the host of their address."
        ),
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of tenants with the hashes of their API keys, and limits. With it, every request needs "
            "an API key. Default: no authentication; a request names its tenant."
        ),
    ] = None,
    trust_drafts: Annotated[
        bool,
        typer.Option(
            help="Accept requests with the REJECTION, CONTRASTIVE and TYPICAL rules, where draft services influence "
            "which tokens are chosen. Default: refuse them."
        ),
    ] = False,
    share_port: Annotated[bool, typer.Option(hidden=True)] = False,  # these two are set by the supervisor of workers
    sibling_socket: Annotated[Path | None, typer.Option(hidden=True)] = None,
    *,
    server: ServerSettings,
) -> None:
    """Serve completions to applications: run every request with verifiers and, if there are any, draft services."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # each request encodes one text, in one of a few threads
    server = replace(server, share_port=share_port)
    _check_models(
        models,
        {
            "--model": model,
            "--served-model-name": served_model_name,
            "--chat-template": chat_template,
            "--verifier": verifier,
            "--draft": draft,
        },
    )
    peers_tls = _peer_tls(peer_tls_cert, peer_tls_key, peer_tls_ca, peer_tls_name)

    if workers > 1:

        async def start() -> None:
            logs.configure("orchestrator", server.log_level)
            # Report start errors once, not from every worker.
            if models is None:
                check_text(await asyncio.to_thread(open_model, Path(model or "")), chat_template)
            else:
                try:
                    ModelsFile(models).read()
                except ModelsFileError as error:
                    raise StartError(str(error)) from None
            await supervise(server, workers)

        run_program(start(), "orchestrator")
        return

    async def load() -> GenerationServicer:
        try:
            accounts = Accounts(None if tenants is None else TenantsFile(tenants))
        except TenantsFileError as error:
            raise StartError(str(error)) from None
        names: dict[str, str] = {}
        peers = PeerSettings(
            partial(
                Peers,
                patience_seconds=patience_ms / 1000,
                silence_seconds=silence_seconds,
                failover_seconds=failover_seconds,
                drafts_are_trusted=trust_drafts,
            ),
            connect if peers_tls is None else SecureConnections(peers_tls, peer_tls_name, names),
            names,
        )
        catalog: Catalog
        try:
            if models is not None:
                catalog = FollowedCatalog(ModelsFile(models), peers)
            else:
                assert model is not None
                directory = await asyncio.to_thread(open_model, model)
                served = ServedModel.of(directory, *served_model_name or (), chat_template=chat_template)
                entry = RevisionEntry(served.name, "", model, tuple(verifier or ()), tuple(draft or ()))
                revision = Revision.of(LoadedRevision(entry, served), peers)
                await revision.look(entry)
                catalog = Catalog([revision])
        except ModelsFileError as error:
            raise StartError(str(error)) from None
        siblings = None if sibling_socket is None else Siblings(sibling_socket)
        servicer = GenerationServicer(catalog, accounts=accounts, siblings=siblings)
        await servicer.start()
        return servicer

    run(server, load, "orchestrator")


def _check_models(models: Path | None, given: Mapping[str, object]) -> None:
    """Check that the served models are named either by --models or by the options in `given`."""
    if models is not None:
        for option, value in given.items():
            if value:
                problem = "must not be given with --models, whose file sets it"
                raise typer.BadParameter(problem, param_hint=f"'{option}'")
        return
    for option in ("--model", "--verifier"):
        if not given[option]:
            problem = "is missing; for several models give --models FILE instead"
            raise typer.BadParameter(problem, param_hint=f"'{option}'")


def _peer_tls(cert: Path | None, key: Path | None, ca: Path | None, name: str | None) -> TlsFiles | None:
    """Return the TLS files for calls to pods; None without TLS."""
    if ca is not None:
        return TlsFiles(cert, key, ca, PEER_TLS)
    for option, given in (("--peer-tls-cert", cert), ("--peer-tls-key", key), ("--peer-tls-name", name)):
        if given is not None:
            raise typer.BadParameter("needs TLS: give --peer-tls-ca too", param_hint=f"'{option}'")
    return None


if __name__ == "__main__":
    run_command(main, service="orchestrator")
