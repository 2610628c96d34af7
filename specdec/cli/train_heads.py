"""`specdec train-heads`: Medusa or EAGLE-3 heads, or a block draft, for a target."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
    TimeLimit,
    check_begin,
    failing_in_one_line,
    own_text_written,
    take_place,
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
    kind: Annotated[
        Literal["medusa", "eagle3", "dspark"],
        typer.Option(
            help="medusa: heads that guess from the last hidden state. eagle3: a decoder layer that reads features of "
            "three of the target's layers, and its own guesses. dspark: decoder layers that guess a block of tokens in "
            "one pass, from features of five layers."
        ),
    ] = "medusa",
    heads: Annotated[
        int | None,
        typer.Option(min=1, max=32, help="Number of Medusa heads: positions guessed ahead. Default: 5."),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="Residual blocks per Medusa head, or dspark layers. Default: 1; dspark: 3."),
    ] = None,
    own_outputs: Annotated[
        bool,
        typer.Option(
            help="Give each Medusa head its own output head, as in the paper. This improves guesses, and adds as many "
            "weights per Medusa head as the target's output head has. Default: all heads use the target's."
        ),
    ] = False,
    ttt_steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=32,
            help="Steps of training-time test of eagle3: positions guessed ahead in training. Default: 7.",
        ),
    ] = None,
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            min=16,
            max=1 << 24,
            help="Token ids that eagle3 heads can guess: the most frequent ones of the text. Default: 32,000.",
        ),
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=1, max=32, help="Tokens that dspark guesses in one pass. Default: 7.")
    ] = None,
    markov_rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=4096,
            help="Rank of dspark's Markov head, which conditions a guess on the previous one; 0: none. Default: 256.",
        ),
    ] = None,
    anchors: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Blocks that dspark learns from in each window of a step. Default: 32."),
    ] = None,
    steps: Steps = 2000,
    rows: Rows = 8,
    length: Length = 256,
    rate: Annotated[
        float | None,
        number("Peak learning rate. Default: 0.001; eagle3 and dspark: 0.0006.", min=1e-7, max=1.0),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**31 - 1, help="Seed for the order of windows and for random initial weights."),
    ] = 0,
    device: Device = "cpu",
    minutes: Minutes = None,
    resume: Resume = False,
) -> None:
    """Train Medusa or EAGLE-3 heads, or a block draft, for a target. The target's weights do not change. Ctrl-C saves
    the progress."""
    check_begin(text, resume=resume)
    own: dict[str, dict[str, Any]] = {  # None: the plan's default
        "medusa": {"heads": heads, "layers": layers, "own_outputs": own_outputs or None},
        "eagle3": {"ttt_steps": ttt_steps, "draft_vocabulary": draft_vocabulary},
        "dspark": {"block": block, "layers": layers, "markov_rank": markov_rank, "anchors": anchors},
    }
    for name, value in {name: value for options in own.values() for name, value in options.items()}.items():
        if value is not None and name not in own[kind]:
            kinds = " or ".join(other for other, options in own.items() if name in options)
            fail(f"--{name.replace('_', '-')}: is for --kind {kinds}, not {kind}", ExitStatus.USAGE)
    check_installed("numpy", "safetensors", "structlog", "torch", "transformers")  # they take seconds to import
    from specdec.engine.placement import Placement
    from specdec.engine.preflight.check import Wanted, check_model
    from specdec.serving.process import logs

    logs.configure("train-heads", "warning")  # before checks that log, and libraries that write to stderr
    with failing_in_one_line():
        directory = check_model(Wanted(target, Placement("eager", device=device)))
        if length > directory.context:
            fail(f"--length: is {length}, must be at most {directory.context}, the target's context", ExitStatus.USAGE)
        take_place(out, resume=resume, texts=text or ())
        end_on_sigterm()
        from specdec.training.block import BlockPlan
        from specdec.training.eagle3 import Eagle3Plan
        from specdec.training.heads_command import HeadsOptions, prepared
        from specdec.training.medusa import MedusaPlan
        from specdec.training.plan import Plan

        given = {"steps": steps, "rows": rows, "length": length, "rate": rate, "seed": seed, **own[kind]}
        plans: dict[str, type[Plan]] = {"medusa": MedusaPlan, "eagle3": Eagle3Plan, "dspark": BlockPlan}
        plan = plans[kind](**{name: value for name, value in given.items() if value is not None})
        options = HeadsOptions(text or [], own_tokens, device)
        work = prepared(directory, options, plan, out, resume=resume)
        stops, limit = Stops(), TimeLimit(minutes)
        if not own_text_written(work.own_text, out, stops, limit):
            return
        training = work.training(out)
        say(f"training {training.trains} on {training.windows.trained.numel()} tokens")
        work_on(training, out, stops, limit)
    stops.end()
    for ahead, within in enumerate(training.accuracies(), 1):
        parts = ", ".join(f"{share:.1%} among the best {rank}" for rank, share in within.items())
        say(f"{training.guess} {ahead}: the target's likeliest token is {parts}")
    print(out)
