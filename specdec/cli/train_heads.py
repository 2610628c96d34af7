"""`specdec train-heads`: Medusa heads for a target."""

from __future__ import annotations

import math
import time
from typing import Annotated

import typer

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
    check_begin,
    check_place,
    failing_in_one_line,
    work_on,
)
from specdec.command_line import number
from specdec.exit_status import ExitStatus
from specdec.extras import check_installed


def train_heads(
    target: Target,
    out: Out,
    text: Text = None,
    own_tokens: OwnTokens = None,
    heads: Annotated[int, typer.Option(min=1, max=32, help="Number of heads: positions guessed ahead.")] = 5,
    layers: Annotated[int, typer.Option(min=1, max=16, help="Residual blocks of a head.")] = 1,
    own_outputs: Annotated[
        bool,
        typer.Option(
            help="Give each head an output head of its own, as the paper does: better guesses, and as many weights as "
            "that many copies of the target's output head. Default: all heads use the target's."
        ),
    ] = False,
    steps: Steps = 2000,
    rows: Rows = 8,
    length: Length = 256,
    rate: Annotated[float, number("Peak of the learning rate.", min=1e-7, max=1.0)] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the order of windows.")] = 0,
    device: Device = "cpu",
    minutes: Minutes = None,
    resume: Resume = False,
) -> None:
    """Train Medusa heads for a target, whose weights stay as they are. Ctrl-C keeps what was learned."""
    check_begin(text, resume=resume)
    check_installed("numpy", "safetensors", "structlog", "torch", "transformers")  # they take seconds to import
    from specdec.engine.placement import Placement
    from specdec.engine.preflight.check import Wanted, check_model

    begin = time.monotonic()
    with failing_in_one_line():
        directory = check_model(Wanted(target, Placement("eager", device=device)))
        if length > directory.context:
            fail(f"--length: is {length}, must be at most {directory.context}, the target's context", ExitStatus.USAGE)
        check_place(out, resume=resume)
        end_on_sigterm()
        from specdec.serving.process import logs

        logs.configure("train-heads", "warning")  # before the import of libraries that write to stderr
        from specdec.training.heads_command import Wishes, prepared
        from specdec.training.medusa import MedusaPlan

        plan = MedusaPlan(
            heads=heads,
            layers=layers,
            own_outputs=own_outputs,
            steps=steps,
            rows=rows,
            length=length,
            rate=rate,
            seed=seed,
        )
        until = math.inf if minutes is None else begin + 60 * minutes
        wishes = Wishes(text or [], own_tokens, device, until)
        training = prepared(directory, wishes, plan, out, resume=resume, say=say)
        stops = Stops()
        work_on(training, out, stops, until)
    stops.end()
    for head, within in enumerate(training.accuracies(), 1):
        parts = ", ".join(f"{share:.1%} among the best {rank}" for rank, share in within.items())
        say(f"head {head}: the target's likeliest token is {parts}")
    print(out)
