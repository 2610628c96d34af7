"""`specdec doctor`: present and missing parts of this machine, and whether the given models can be served."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from specdec.cli.failure import fail
from specdec.engine.placement import Kind, WantedDtype
from specdec.exit_status import ExitStatus


def doctor(
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "--target",
            help="Directory of a target model, or its GGUF file: check whether a verifier can serve it here.",
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a draft model, or its GGUF file: check whether a draft service can serve it here, "
            "together with the target if given."
        ),
    ] = None,
    heads: Annotated[
        Path | None,
        typer.Option(
            help="Directory of heads or a block draft for the target: check and count them too. Needs --model."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Device of the target: cpu, cuda, or cuda:N.")] = "cpu",
    dtype: Annotated[WantedDtype, typer.Option(help="Data type of the target.")] = "auto",
    engine: Annotated[Kind, typer.Option(help="Engine of the target; with `vllm`, vLLM runs it.")] = "torch",
    kv_tokens: Annotated[int | None, typer.Option(min=512, help="Size of the target's KV cache in tokens.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Report what this machine has and lacks: packages, devices, ports, cache folder, and with --model fast paths.

    The last line is the verdict. Exit status 0, or 1 if a given model or --device cannot be used here.
    """
    if heads is not None and model is None:
        fail("--heads needs --model", ExitStatus.USAGE)
    with contextlib.suppress(ModuleNotFoundError):  # the client alone has no logs
        from specdec.serving.process import logs

        logs.configure("doctor", "warning")  # to stderr: structlog's default is stdout
    from specdec.doctor.report import DoctorOptions, DoctorReport, lines

    report = DoctorReport(DoctorOptions(model, draft, device, dtype, kv_tokens, engine, heads))
    if json_output:
        print(json.dumps(report.as_json(), indent=2))
    else:
        for line in lines(report):
            print(line, flush=True)  # show each line immediately, since the next may load torch
    if report.problem:
        fail(report.problem)
