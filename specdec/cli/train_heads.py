"""`specdec train-heads`: Medusa heads for a target."""

from __future__ import annotations

import math
import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.failure import end_on_sigterm, fail, say
from specdec.command_line import number
from specdec.exit_status import ExitStatus
from specdec.extras import check_installed
from specdec.progress import ProgressLines

SAVE_SECONDS = 120.0


def train_heads(
    target: Annotated[
        Path,
        typer.Argument(metavar="TARGET", help="Directory of the target in Hugging Face's layout, or its GGUF file."),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory to write; `--resume` goes on with what is there.")
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text to train on, such as the target meets when it serves: a file, or a .jsonl file of objects with "
            "`text` or `messages`. May be given several times. With --resume it may be left out: OUT keeps it."
        ),
    ] = None,
    own_tokens: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=100_000_000,
            help="Also train on this many tokens that the target writes itself, as continuations of the text. Writing "
            "takes longer than learning. Default: none.",
        ),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=32, help="Number of heads: positions guessed ahead.")] = 5,
    layers: Annotated[int, typer.Option(min=1, max=16, help="Residual blocks of a head.")] = 1,
    own_outputs: Annotated[
        bool,
        typer.Option(
            help="Give each head an output head of its own, as the paper does: better guesses, and as many weights as "
            "that many copies of the target's output head. Default: all heads use the target's."
        ),
    ] = False,
    steps: Annotated[int, typer.Option(min=1, max=10_000_000, help="Steps of training.")] = 2000,
    rows: Annotated[int, typer.Option(min=1, max=4096, help="Windows of text in a step.")] = 8,
    length: Annotated[int, typer.Option(min=64, max=32_768, help="Tokens of a window.")] = 256,
    rate: Annotated[float, number("Peak of the learning rate.", min=1e-7, max=1.0)] = 1e-3,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the order of windows.")] = 0,
    device: Annotated[str, typer.Option(help="Device of the training: cpu, cuda, or cuda:N.")] = "cpu",
    minutes: Annotated[
        float | None, number("Stop after this many minutes; `--resume` goes on. Default: no limit.", min=0.1, max=1e5)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished training in OUT.")] = False,
) -> None:
    """Train Medusa heads for a target, whose weights stay as they are. Ctrl-C keeps what was learned."""
    if not text and not resume:
        fail("--text: give the text to train on, or go on with --resume", ExitStatus.USAGE)
    check_installed("numpy", "structlog", "torch", "transformers")  # they take seconds to import
    from specdec.engine.model_directory import ModelDirectoryError
    from specdec.engine.placement import Placement
    from specdec.engine.preflight.check import Wanted, check_model
    from specdec.engine.unsupported import UnsupportedModelError

    begin = time.monotonic()
    try:
        directory = check_model(Wanted(target, Placement("eager", device=device)))
        if length > directory.context:
            fail(f"--length: is {length}, must be at most {directory.context}, the target's context", ExitStatus.USAGE)
        if not resume and out.exists() and (not out.is_dir() or any(out.iterdir())):
            fail(f"{out}: is not empty; go on with --resume, or write elsewhere", ExitStatus.USAGE)
        end_on_sigterm()
        from specdec.serving.process import logs

        logs.configure("train-heads", "warning")  # before the import of libraries that write to stderr
        from specdec.training.command import Wishes, prepared
        from specdec.training.medusa import TrainingPlan

        plan = TrainingPlan(heads, layers, own_outputs, steps, rows, length, rate, seed)
        until = math.inf if minutes is None else begin + 60 * minutes
        wishes = Wishes(text or [], own_tokens, device, until)
        training = prepared(directory, wishes, plan, out, resume=resume, say=say)
    except (ModelDirectoryError, UnsupportedModelError) as error:
        fail(str(error), ExitStatus.USAGE)
    told: list[int] = []
    for ending in (signal.SIGINT, signal.SIGTERM):  # a step is completed: half of one could not be resumed
        signal.signal(ending, lambda came, _: told.append(came))
    saved = now = time.monotonic()
    progress = ProgressLines(say, steps, begun=training.done)
    while not training.over and not told and now < until:
        loss = training.step()
        now = time.monotonic()
        progress.heard(training.done, f"step {training.done} of {steps}, {loss:.3f} nats a token at the first head")
        if now - saved >= SAVE_SECONDS:
            saved = now
            training.save(out)
    training.save(out)
    if not training.over:
        say(f"stopped at step {training.done} of {steps}; the same command with --resume goes on")
    if told:
        raise SystemExit(ExitStatus.INTERRUPTED if told[0] == signal.SIGINT else ExitStatus.TERMINATED)
    for head, within in enumerate(training.accuracies(), 1):
        parts = ", ".join(f"{share:.1%} among the best {rank}" for rank, share in within.items())
        say(f"head {head}: the target's likeliest token is {parts}")
    print(out)
