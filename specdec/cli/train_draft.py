"""`specdec train-draft`: a draft distilled from its target."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from specdec.cli.access import OPEN, Access, NameLookup, with_access
from specdec.cli.failure import end_on_sigterm, fail, say
from specdec.cli.training import (
    Device,
    Length,
    Minutes,
    Out,
    OwnTokens,
    Resume,
    Rows,
    Steps,
    Stops,
    Target,
    Text,
    TimeLimit,
    check_begin,
    failing_in_one_line,
    own_text_written,
    take_place,
    work_on,
)
from specdec.command_line import number, optional_addresses
from specdec.engine.cpu_count import MAX_THREADS, threads_for
from specdec.exit_status import ExitStatus
from specdec.extras import check_installed
from specdec.wire.address import parse_addresses

if TYPE_CHECKING:  # imports torch
    from specdec.training.draft import DraftTraining
    from specdec.training.traffic import TrainingTraffic

RATE, UNTRAINED_RATE = 1e-4, 1e-3
"""Default peaks of the learning rate: from trained weights, and from random ones."""

TRAFFIC_SECONDS = 120.0
"""Timeout of reading the texts of one draft service."""

NICENESS = 19
"""Lowest priority on Linux: if a niced and an un-niced process compete for a core, the latter gets about 70 times the
CPU time."""


@with_access
def train_draft(
    target: Target,
    draft: Annotated[
        Path,
        typer.Argument(
            metavar="DRAFT",
            help="Directory of the draft to start from, or its GGUF file; it is not modified. With --untrained, its "
            "config.json suffices.",
        ),
    ],
    out: Out,
    text: Text = None,
    own_tokens: OwnTokens = None,
    replay: Annotated[
        list[Path] | None,
        typer.Option(
            help="Older text that the draft must not forget, mixed in: a file as for --text. May be given several "
            "times. With --resume it may be left out."
        ),
    ] = None,
    replay_share: Annotated[
        float | None, number("Share of windows taken from --replay. Default: 0.25.", min=0.01, max=0.99)
    ] = None,
    traffic: Annotated[
        str | None,
        typer.Option(
            callback=optional_addresses,
            metavar="ADDRESSES",
            help="Also train on the texts that these draft services keep to learn from, comma-separated: HOST:PORT "
            "each. A DNS name means every server that it has a record for. --api-key-file has the key of their "
            "--learn-key-file. The texts stay in memory: such a training cannot be resumed.",
        ),
    ] = None,
    served_labels: Annotated[
        bool,
        typer.Option(
            "--served-labels",
            help="Train only on the labels of --traffic: the tokens that the target chose, and its log-probabilities "
            "where it overruled the draft. The target is computed only to measure the draft, not in training steps. "
            "Cannot be combined with --text, --own-tokens or --replay; needs --loss forward.",
        ),
    ] = False,
    allowed: Access = OPEN,
    untrained: Annotated[
        bool, typer.Option("--untrained", help="Begin with random weights: only DRAFT's configuration is used.")
    ] = False,
    loss: Annotated[
        Literal["forward", "reverse", "jsd", "tv"],
        typer.Option(
            help="Loss to minimise: forward KL, reverse KL, the Jensen-Shannon divergence, or total variation of the "
            "two distributions."
        ),
    ] = "forward",
    overruled: Annotated[
        float,
        number(
            "Extra weight of positions where the target's likeliest token is not the draft's: weight 1 + this.",
            min=0.0,
            max=1000.0,
        ),
    ] = 0.0,
    steps: Steps = 2000,
    rows: Rows = 8,
    length: Length = 256,
    rate: Annotated[
        float | None,
        number("Peak of the learning rate. Default: 0.0001, with --untrained 0.001.", min=1e-8, max=1.0),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=2**31 - 1,
            help="Seed of the order of windows, of the target's text, and of the weights of --untrained.",
        ),
    ] = 0,
    device: Device = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_THREADS, help="CPU threads. Default: one per core, with --niced half as many."),
    ] = None,
    niced: Annotated[
        bool,
        typer.Option(
            "--niced", help="Run at the lowest priority, so that services on the same cores keep their speed."
        ),
    ] = False,
    minutes: Minutes = None,
    resume: Resume = False,
) -> None:
    """Distil a draft from its target, whose weights do not change. Ctrl-C saves the progress."""
    check_begin(text, resume=resume, traffic=traffic is not None)
    if traffic is not None and resume:
        fail("--resume: cannot be combined with --traffic, which stays in memory", ExitStatus.USAGE)
    if served_labels:
        _check_served_labels(traffic, loss, {"--text": text, "--own-tokens": own_tokens, "--replay": replay})
    if replay_share is not None and not replay and not resume:
        fail("--replay-share: needs --replay", ExitStatus.USAGE)
    check_installed("numpy", "safetensors", "structlog", "torch", "transformers")  # they take seconds to import
    from specdec.engine.placement import Placement
    from specdec.engine.preflight.check import Wanted, check_model
    from specdec.serving.process import logs

    logs.configure("train-draft", "warning")  # before checks that log, and libraries that write to stderr
    if niced:
        os.nice(NICENESS)  # before other threads start: on Linux each thread inherits its parent's priority
    with failing_in_one_line():
        from specdec.training.given_draft import GivenDraft

        big = check_model(Wanted(target, Placement("eager", device=device)))
        small = GivenDraft.checked(draft, big, device, untrained=untrained, seed=seed)
        for name, context in (("target", big.context), ("draft", small.directory.context)):
            if length > context:
                fail(f"--length: is {length}, must be at most {context}, the {name}'s context", ExitStatus.USAGE)
        take_place(out, resume=resume, texts=[*(text or ()), *(replay or ())])
        end_on_sigterm()
        import torch

        from specdec.training.draft import DraftPlan
        from specdec.training.draft_command import DraftOptions, prepared

        cores = threads_for(device)
        torch.set_num_threads(threads or (max(1, cores // 2) if niced else cores))
        plan = DraftPlan(
            untrained=untrained,
            loss=loss,
            overruled=overruled,
            steps=steps,
            rows=rows,
            length=length,
            rate=rate or (UNTRAINED_RATE if untrained else RATE),
            seed=seed,
        )
        kept = None if traffic is None else kept_traffic(traffic, allowed)
        options = DraftOptions(text or [], own_tokens, replay or [], replay_share, device, kept, served_labels)
        work = prepared(big, small, options, plan, out, resume=resume)
        stops, limit = Stops(), TimeLimit(minutes)
        if not own_text_written(work.own_text, out, stops, limit, resumable=kept is None):
            return
        training = work.training(out)
        for kind, found in training.before.items():
            say(f"{kind}: acceptance before training {found}")

        def look() -> None:
            for kind, found in training.measure().items():
                say(f"{kind}: acceptance at step {training.done} {found}")

        work_on(training, out, stops, limit, look, resumable=kept is None)
    stops.end()
    tell_gain(training)
    print(out)


def tell_gain(training: DraftTraining) -> None:
    """Print the acceptance on held-out text before and after training."""
    if not training.done:
        say("there was no time to train: the draft is as before")
        return
    from specdec.training.draft import NEW

    after = training.measure()
    for kind, found in after.items():
        say(f"{kind}: acceptance {training.before[kind]} -> {found}")
    if after[NEW].coupled <= training.before[NEW].coupled:
        say("the draft is not better than before on held-out text: keep the previous one")


def _check_served_labels(traffic: str | None, loss: str, others: Mapping[str, object]) -> None:
    """End the process unless all training texts have labels from serving, and the loss is forward KL."""
    if traffic is None:
        fail("--served-labels: needs --traffic", ExitStatus.USAGE)
    if loss != "forward":
        fail(f"--served-labels: needs --loss forward, not {loss}", ExitStatus.USAGE)
    for option, given in others.items():
        if given:
            fail(f"--served-labels: cannot be combined with {option}, which has no labels", ExitStatus.USAGE)


def kept_traffic(addresses: str, allowed: Access, resolve: NameLookup = socket.getaddrinfo) -> TrainingTraffic:
    """Return the texts that all servers of these addresses keep; TextError if one does not return its texts."""
    from specdec.training.texts import TextError
    from specdec.training.traffic import TrainingTraffic, kept_texts

    texts, begin = [], time.time()
    for at in parse_addresses(addresses):
        try:
            servers = allowed.to_servers(at, resolve)
        except OSError as error:
            raise TextError(f"--traffic: {at.target}: cannot be resolved ({error.strerror})") from None
        for target, access in servers.items():
            with access.channel(target) as channel:
                texts += kept_texts(target, channel, access.metadata, TRAFFIC_SECONDS)
    found = TrainingTraffic.of(texts, begin)
    say(f"{len(found.texts)} kept texts of {len(found.tenants)} tenants")
    return found
