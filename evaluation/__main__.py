"""`python -m evaluation`, `specdec evaluate`: the gain to expect from a pair of target and draft."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated

from specdec.extras import needed_by

with needed_by("evaluate", "evaluate"):
    import typer

    from draft_service.servicer import DraftLimits
    from evaluation.hop import hop_seconds
    from evaluation.measurements import LOCAL, REMOTE_DRAFT, TREES, WAYS, Figures, Load, Way, acceptance, speed
    from evaluation.pair import EngineOptions, LoadedModel, Pair
    from evaluation.pools import VERIFIERS, smallest
    from evaluation.progress import Heard, Progress
    from evaluation.report import ROWS, Distance, EvaluationReport, fastest
    from orchestrator.requests.model import ServedModel
    from orchestrator.requests.parsing import parse
    from orchestrator.requests.sample import Sample
    from specdec.cli.failure import fail
    from specdec.cli.prompt_file import PromptFile, PromptFileError
    from specdec.client.request import build_request
    from specdec.command_line import number, run_command
    from specdec.decoding.noise import MASK
    from specdec.decoding.sampling import Rule
    from specdec.engine.cpu_count import MAX_THREADS, threads_for
    from specdec.engine.gguf_file import open_model
    from specdec.engine.kv.blocks import BLOCK
    from specdec.engine.model_file import ModelDirectoryError
    from specdec.engine.placement import DraftKind, WantedDtype
    from specdec.engine.unsupported import UnsupportedModelError
    from specdec.engine.working_memory import MAX_STEP_CANDIDATES
    from specdec.exit_status import ExitStatus
    from specdec.local import LocalError
    from specdec.serving.errors import ServiceError
    from specdec.serving.identity import pod_info
    from specdec.serving.process import logs

MAX_STREAMS = 128
"""Maximum streams of one verifier: all may start together, and a verifier holds this many waiting texts."""


def main(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Directory of the target model, or its GGUF file.")],
    draft: Annotated[
        Path,
        typer.Argument(
            metavar="DRAFT", help="Directory of the draft, in Hugging Face's layout or an export; or its GGUF file."
        ),
    ],
    prompts: Annotated[
        Path,
        typer.Option(
            help="File of prompts typical of your traffic, with their options, as for `specdec generate --prompt-file`."
        ),
    ],
    max_prompts: Annotated[int, typer.Option(min=1, help="Maximum prompts to read from the file.")] = 16,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate, if the prompt does not set it.")] = 128,
    temperature: Annotated[float, number("Temperature, if the prompt does not set it.", min=0.0, max=10.0)] = 0.0,
    streams: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=MAX_STREAMS, help="Concurrent texts of one verifier. May be repeated. Default: 1 and 8."
        ),
    ] = None,
    concurrent: Annotated[
        int | None, typer.Option(min=1, help="Concurrent texts in total: predict the number of pods needed for them.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the target: cpu, cuda or cuda:N.")] = "cpu",
    draft_device: Annotated[str | None, typer.Option(help="Device of the draft. Default: the target's.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=MAX_THREADS, help="CPU threads of the target. Default: all cores.")
    ] = None,
    draft_threads: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_THREADS, help="CPU threads of the draft. Default: --threads, or all cores."),
    ] = None,
    dtype: Annotated[WantedDtype, typer.Option(help="Data type of the target.")] = "auto",
    draft_dtype: Annotated[WantedDtype, typer.Option(help="Data type of the draft.")] = "auto",
    draft_engine: Annotated[
        DraftKind, typer.Option(help="Engine of the draft service; a local draft always has the target's.")
    ] = "onnx",
    draft_speed: Annotated[
        float,
        number("Speed of the draft's device relative to the one here.", min=0.001, max=1000.0),
    ] = 1.0,
    network_ms: Annotated[
        float, number("One-way network latency between services in milliseconds.", min=0.0, max=1000.0)
    ] = 0.2,
    kv_tokens: Annotated[int, typer.Option(min=1024, help="Size of each KV cache in tokens.")] = 16384,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a pair of models on this machine, and predict its serving speed.

    Both models run here, on your prompts. Acceptance and the latencies of forward passes are measured; from them the
    speed is predicted: with a remote draft, with a local draft, and without a draft.
    """
    logs.configure("evaluate", "error")
    target_options = EngineOptions("torch", device, threads or threads_for(device), dtype)
    draft_device = draft_device or device
    draft_options = EngineOptions(
        draft_engine, draft_device, draft_threads or threads or threads_for(draft_device), draft_dtype
    )
    streams = sorted(set(streams or (1, 8)))
    file = PromptFile(prompts, {"max_tokens": max_tokens, "temperature": temperature})
    try:
        for _ in islice(file.prompts(), max_prompts):  # fails on an invalid line before a GGUF file is converted
            pass
        room = (kv_tokens - MAX_STEP_CANDIDATES) // max(streams) // BLOCK * BLOCK  # whole blocks, as in a verifier
        samples = list(_samples(ServedModel.of(open_model(target)), file, max_prompts, room))
        if not samples:
            fail(f"{prompts}: has no prompts", ExitStatus.USAGE)
        # A draft keeps each session's candidates in its KV cache, next to the text.
        candidates = max(streams) * DraftLimits().max_nodes
        pair = Pair(target, draft, target_options, draft_options, kv_tokens, candidates)
    except (ModelDirectoryError, UnsupportedModelError, PromptFileError) as error:
        fail(str(error), ExitStatus.USAGE)
    try:
        distance = Distance(hop_seconds(), network_ms / 1000)
    except LocalError as error:
        fail(str(error), ExitStatus.FAILED)
    report = _evaluated(pair, samples, streams, distance, draft_speed, concurrent)
    if json_output:
        print(json.dumps(report.as_json()))
    else:
        print(*report.lines(), sep="\n")


def _samples(model: ServedModel, file: PromptFile, most: int, most_tokens: int) -> Iterator[Sample]:
    """Yield the samples of a file's first `most` prompts; PromptFileError names the line of a prompt that cannot be
    served, whose acceptance is not measured under its rule, or whose text may exceed `most_tokens`."""
    for prompt in islice(file.prompts(), most):
        try:
            sample = parse(build_request(prompt.text, **prompt.options), model).samples[0]
        except ServiceError as error:
            raise PromptFileError(f"{file.path}:{prompt.line}: {error}") from None
        longest, problem = len(sample.prompt) + sample.max_tokens, ""
        if sample.rule in (Rule.CONTRASTIVE, Rule.TYPICAL):
            name = sample.rule.value
            problem = f"rule: is {name}, must be coupled or rejection: acceptance is not measured under others"
        elif longest > most_tokens:
            share = "the share of --kv-tokens per stream"
            problem = f"may have {longest} tokens, must have at most {most_tokens}, {share}"
        if problem:
            raise PromptFileError(f"{file.path}:{prompt.line}: {problem}")
        yield sample


def _evaluated(
    pair: Pair,
    samples: Sequence[Sample],
    streams: Sequence[int],
    distance: Distance,
    draft_speed: float,
    concurrent: int | None,
) -> EvaluationReport:
    """Measure acceptance, speeds and pool sizes, showing the progress."""
    delay = distance.hop + distance.network  # in every way, orchestrator and verifier are separate services
    ways = {
        way: replace(way, layout=replace(way.layout, delay=delay))
        for way in WAYS
        if pair.has_local_draft or way is not LOCAL
    }
    apart = ways[REMOTE_DRAFT]
    ways[REMOTE_DRAFT] = remote = replace(apart, layout=replace(apart.layout, draft_speed=draft_speed))
    rules = [Rule.COUPLED, Rule.REJECTION] if any(not sample.sampling.greedy for sample in samples) else [Rule.COUPLED]
    asked = [(rule, tree) for rule in rules for tree in TREES]
    planned = {many: _tokens(_warming(samples, many)) + _tokens(_repeated(samples, many)) for many in streams}
    most_runs = len(ways) + len(VERIFIERS)
    with Progress(len(asked) * _tokens(samples) + most_runs * sum(planned.values())) as progress:
        heard = progress.heard
        accepted = {case: acceptance(pair, samples, *case, heard=heard) for case in asked}
        speeds = {
            many: {way: _warm_speed(pair, used, samples, many, heard) for way, used in ways.items()} for many in streams
        }
        drafted = {many: found[REMOTE_DRAFT].rate for many, found in speeds.items() if fastest(found) is REMOTE_DRAFT}

        for many in streams:
            progress.not_needed(0 if many in drafted else len(VERIFIERS) * planned[many])

        def rate(many: int, relative_speed: float) -> float:
            layout = replace(remote.layout, draft_speed=relative_speed * remote.layout.draft_speed)
            return _warm_speed(pair, replace(remote, layout=layout), samples, many, heard).rate

        pools = {}
        for many, alone in drafted.items():
            pools[many] = smallest(partial(rate, many), alone)
            progress.not_needed(pools[many].left_out * planned[many])
    return EvaluationReport(
        target=_description(pair.target),
        draft=_description(pair.draft),
        texts=len(samples),
        temperatures=sorted({round(sample.sampling.temperature, 6) for sample in samples}),
        step_seconds={
            name: [model.pace.seconds(rows) for rows in ROWS]
            for name, model in (("target", pair.target), ("draft", pair.draft))
        },
        spread=pair.spread,
        acceptance=accepted,
        speed=speeds,
        distance=distance,
        draft_speed=draft_speed,
        pools=pools,
        concurrent=concurrent,
    )


def _warm_speed(pair: Pair, way: Way, samples: Sequence[Sample], streams: int, heard: Heard) -> Figures:
    """Return the speed of warm services, after adaptive speculation has learned what pays."""
    loads = Load(_warming(samples, streams), streams), Load(_repeated(samples, streams), streams)
    _, warm = speed(pair, way, *loads, heard=heard)
    pair.measure_pace()
    return warm


def _warming(samples: Sequence[Sample], streams: int) -> list[Sample]:
    """Return the samples of a warm-up: one per stream."""
    return _repeated(samples, streams)[:streams]


def _tokens(samples: Sequence[Sample]) -> int:
    """Return the tokens planned for samples."""
    return sum(sample.max_tokens for sample in samples)


def _repeated(samples: Sequence[Sample], streams: int) -> list[Sample]:
    """Return samples for at least two texts per stream: the given ones, repeated with other seeds and cache salts, so
    that prompts are not cached. All have one tenant: verifiers divide steps among tenants, and learn by tenant."""
    rounds = -(-2 * streams // len(samples))
    return [
        replace(
            sample, cache_salt=f"{turn}", sampling=replace(sample.sampling, seed=(sample.sampling.seed + turn) & MASK)
        )
        for turn in range(rounds)
        for sample in samples
    ]


def _description(model: LoadedModel) -> str:
    info = pod_info(model.engine)
    threads = f", {info.threads[0]} thread{'s' * (info.threads[0] != 1)}" if info.threads else ""
    exact = ", exact" if model.engine.exact else ""
    return f"{model.directory.path}  {info.dtype} on {info.device}{threads}{exact}"


if __name__ == "__main__":
    run_command(main)
