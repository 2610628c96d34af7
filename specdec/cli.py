"""The `specdec` command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

try:
    import typer
    from rich.console import Console
    from rich.text import Text
except ImportError:  # the client alone was installed
    sys.exit("the specdec command needs typer and rich: pip install 'specdec-serve[cli]'")

from specdec import __version__
from specdec.client import Chunk, Client, Finish, SpecdecError
from specdec.durations import duration
from specdec.roles import FOLDER, environment

if TYPE_CHECKING:
    from specdec.v2.verifier_pb2 import GetStatsResponse

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

STYLES = {
    "draft": "green",
    "local_model": "green",
    "ngram": "yellow",
    "lookahead": "magenta",
    "correction": "red",
    "bonus": "cyan",
    "plain": "default",
}
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def main() -> None:
    app()


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def specdec(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Speculative decoding as three gRPC services."""


# --- services ------------------------------------------------------------------------------------


def _replace_with(module: str, context: typer.Context) -> None:
    os.execve(sys.executable, [sys.executable, "-m", module, *context.args], environment())


@app.command(context_settings=PASS_ON)
def draft(context: typer.Context) -> None:
    """Start a draft service (`specdec draft --help` for its options)."""
    _replace_with("draft_service", context)


@app.command(context_settings=PASS_ON)
def verifier(context: typer.Context) -> None:
    """Start a verifier service (`specdec verifier --help`)."""
    _replace_with("verifier_service", context)


@app.command(context_settings=PASS_ON)
def orchestrator(context: typer.Context) -> None:
    """Start an orchestrator (`specdec orchestrator --help`)."""
    _replace_with("orchestrator", context)


@app.command()
def export(
    model: Annotated[Path, typer.Argument(help="Directory of a model in Hugging Face's layout.")],
    target: Annotated[Path, typer.Argument(help="Directory to write; replaced if it exists.")],
    dtype: Annotated[
        Literal["float32", "float16"], typer.Option(help="What it computes in; float16 is for GPUs.")
    ] = "float32",
) -> None:
    """Export a model for the ONNX draft, so that the draft's machine needs no torch."""
    from specdec.engine.engine import UnsupportedModelError
    from specdec.engine.model_directory import ModelDirectory, ModelDirectoryError

    try:
        directory = ModelDirectory(model)
        from specdec.serving.process import logs

        logs.configure("export", "warning")  # before libraries that write to stderr are imported
        from specdec.engine.onnx.export import export as run  # takes seconds: a wrong path is reported before

        run(directory, target, dtype)
    except (ModelDirectoryError, UnsupportedModelError) as error:
        _fail(str(error))
    print(target)


@app.command()
def up(
    target: Annotated[Path | None, typer.Option(help="Directory of the target model; the demo's by default.")] = None,
    draft: Annotated[
        str | None, typer.Option(help="Directory of the draft model, or `none`; the demo's by default.")
    ] = None,
    local_draft: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a small model that the verifier guesses with itself, instead of a draft service."
        ),
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="What the target computes in.")] = "float32",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Of the client API; 0 takes a free one.")] = 0,
    json_output: Annotated[bool, typer.Option("--json", help="Print the address as a JSON object.")] = False,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option()] = "warning",
) -> None:
    """Start verifier, draft and orchestrator on this machine; end them all with Ctrl-C."""
    from specdec.local import LocalError, Stack

    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: stop.append(n))
    try:
        with Stack.start(
            target,
            draft,
            local_draft=local_draft,
            dtype=dtype,
            port=port,
            log_level=log_level,
            stopped=lambda: bool(stop),
        ) as stack:
            described = {"address": stack.address, "services": stack.addresses}
            print(json.dumps(described) if json_output else stack.address, flush=True)
            while not stop:
                time.sleep(0.2)
                stack.check()
    except LocalError as error:
        _fail(str(error))


@app.command()
def stats(
    address: Annotated[str, typer.Argument(help="Of a verifier.")],
    every: Annotated[float | None, duration("Seconds; look again and again.", min=0.1)] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object a look.")] = False,
) -> None:
    """Show how full and how busy a verifier is."""
    import grpc
    from google.protobuf.json_format import MessageToDict

    from specdec.v2 import verifier_pb2, verifier_pb2_grpc

    with grpc.insecure_channel(address) as channel, contextlib.suppress(KeyboardInterrupt):
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        while True:
            try:
                seen = stub.GetStats(verifier_pb2.GetStatsRequest(), timeout=10)
            except grpc.RpcError as error:
                _fail(f"{address}: {error.code().name}: {error.details()}")
            if json_output:
                values = MessageToDict(
                    seen, always_print_fields_with_no_presence=True, preserving_proto_field_name=True
                )
                print(json.dumps({name: int(value) for name, value in values.items()}), flush=True)
            else:
                print(_load_line(seen), flush=True)
            if every is None:
                return
            time.sleep(every)


def _load_line(seen: GetStatsResponse) -> str:
    memory = 100 / max(1, seen.kv_tokens)
    return (
        f"{seen.running} running, {seen.waiting} waiting; "
        f"memory {memory * seen.kv_held_tokens:.0f} % held, {memory * seen.kv_cached_tokens:.0f} % cached "
        f"of {seen.kv_tokens} tokens; {100 * seen.busy_us / max(1, seen.up_us):.0f} % busy since the start; "
        f"{seen.committed_tokens} tokens in {seen.steps} steps, "
        f"{seen.accepted_candidates} of {seen.offered_candidates} candidates accepted, "
        f"{seen.cached_tokens} of {seen.prompt_tokens} prompt tokens cached, "
        f"{seen.preemptions} preemptions"
    )


# --- generate ------------------------------------------------------------------------------------


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; `-` reads stdin.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="One JSON object a line, each with `text` or `tokens`.")
    ] = None,
    address: Annotated[str, typer.Option(help="Of an orchestrator; of several, joined by commas.")] = "127.0.0.1:50050",
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    min_p: float = 0.0,
    seed: Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="Drawn and reported if not given.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the text; may be repeated.")] = None,
    speculation: Annotated[
        Literal["auto", "off", "always", "draft", "lookahead"],
        typer.Option(help="auto: what pays; draft, lookahead: that alone; always: the draft, paying or not."),
    ] = "auto",
    lookahead: Annotated[
        tuple[int, int, int] | None,
        typer.Option(help="Of the lookahead window, W N G; if not given, one that pays."),
    ] = None,
    rule: Annotated[
        Literal["coupled", "rejection", "contrastive"], typer.Option(help="How candidates become tokens.")
    ] = "coupled",
    alpha: Annotated[
        float | None, typer.Option(help="Contrastive: least probability, relative to the most probable token's.")
    ] = None,
    timeout: Annotated[float | None, duration("Seconds for one prompt.", min=0.001)] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object a prompt.")] = False,
) -> None:
    """Continue prompts, each token coloured by where it came from."""
    if (prompt is None) == (prompt_file is None):
        _fail("give a PROMPT or --prompt-file, one of them")
    options: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "stop": stop or (),
        "speculation": speculation,
        "lookahead": lookahead,
        "rule": rule,
        "alpha": alpha,
    }
    try:
        with Client(address, timeout=timeout) as client:
            for where in _prompts(prompt, prompt_file):
                _run(client, where, options, json_output)
    except (SpecdecError, ValueError, TypeError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _prompts(prompt: str | None, file: Path | None) -> Iterator[dict[str, Any]]:
    """Yield {"text": ...} or {"tokens": ...} for each prompt."""
    if file is None:
        yield {"text": sys.stdin.read() if prompt == "-" else prompt}
        return
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        _fail(f"{file}: {error}")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            _fail(f"{file}:{number}: not JSON: {error}")
        if not isinstance(entry, dict) or ("text" in entry) == ("tokens" in entry):
            _fail(f"{file}:{number}: must be an object with `text` or `tokens`, one of them")
        yield entry


def _run(client: Client, where: dict[str, Any], options: dict[str, Any], json_output: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    start = time.monotonic()
    first: float | None = None
    tokens: list[int] = []
    text: list[str] = []
    seed: int | None = None
    finish: Finish | None = None
    with client.generate(where.get("text"), tokens=where.get("tokens"), **options) as stream:
        for chunk in stream:
            if first is None and chunk.tokens:
                first = time.monotonic() - start
            tokens += chunk.tokens
            text.append(chunk.text)
            seed = chunk.seed if chunk.seed is not None else seed
            finish = chunk.finish or finish
            if not json_output:
                if console.is_terminal:
                    console.print(coloured(chunk), end="")
                else:  # exactly, without rich's rendering
                    sys.stdout.write(chunk.text)
                    sys.stdout.flush()
    seconds = time.monotonic() - start
    if finish is None:
        raise SpecdecError("the stream ended before the text did")
    if json_output:
        print(json.dumps(_report(tokens, "".join(text), seed, finish, seconds, first or seconds)), flush=True)
    else:
        s = finish.speculation
        err = Console(stderr=True, highlight=False, soft_wrap=True)
        err.print()
        err.print(
            f"[dim]{len(tokens)} tokens in {seconds:.2f} s ({len(tokens) / seconds:.0f}/s), "
            f"{s.mean_tokens_per_step:.2f} a step, {s.accepted} of {s.offered} candidates accepted; "
            f"{finish.reason}, seed {seed}[/dim]"
        )


def coloured(chunk: Chunk) -> Text:
    """Return a chunk's text, each token in the colour of its source."""
    text = Text()
    for piece, source in zip(chunk.token_texts, chunk.sources, strict=True):
        text.append(piece, style=STYLES.get(source, "default"))
    return text


def _report(
    tokens: list[int], text: str, seed: int | None, finish: Finish, seconds: float, first: float
) -> dict[str, Any]:
    s = finish.speculation
    return {
        "tokens": tokens,
        "text": text,
        "finish_reason": finish.reason,
        "usage": {"prompt_tokens": finish.prompt_tokens, "completion_tokens": finish.completion_tokens},
        "seed": seed,
        "speculation": {
            "steps": s.steps,
            "offered": s.offered,
            "accepted": s.accepted,
            "mean_tokens_per_step": s.mean_tokens_per_step,
            "sources": dict(s.sources),
        },
        "seconds": seconds,
        "time_to_first_token": first,
    }


# --- benchmarks ----------------------------------------------------------------------------------


@app.command(context_settings=PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure, where specdec runs from its source (`specdec bench` lists what)."""
    if not (FOLDER / "bench").is_dir():
        _fail("benchmarks come with the source: run this from an installation of a checkout")
    _replace_with("bench", context)


def _fail(message: str) -> NoReturn:
    print(f"specdec: {message}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
