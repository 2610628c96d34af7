"""The `specdec` command."""

from __future__ import annotations

import contextlib
import json
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
from specdec.command_line import LogLevel, duration, run_command
from specdec.roles import FOLDER, load

if TYPE_CHECKING:
    from specdec.v2.verifier_pb2 import GetStatsResponse

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

STYLES = {
    "remote_draft": "green",
    "local_model": "green",
    "ngram": "yellow",
    "lookahead": "magenta",
    "correction": "red",
    "bonus": "cyan",
    "plain": "default",
}
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def main() -> None:
    app(prog_name="specdec")


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def specdec(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding as three gRPC services.

    `specdec COMMAND --help` lists the options of a command.
    """


# --- services ------------------------------------------------------------------------------------


def _serve(package: str, context: typer.Context) -> None:
    run_command(load(f"{package}.__main__").main, context.command_path, context.args)


@app.command(context_settings=PASS_ON)
def draft(context: typer.Context) -> None:
    """Serve a draft model (draft service)."""
    _serve("draft_service", context)


@app.command(context_settings=PASS_ON)
def verifier(context: typer.Context) -> None:
    """Serve a target model (verifier)."""
    _serve("verifier_service", context)


@app.command(context_settings=PASS_ON)
def orchestrator(context: typer.Context) -> None:
    """Serve completions to applications (orchestrator)."""
    _serve("orchestrator", context)


@app.command()
def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the model in Hugging Face's layout.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; an older export there is replaced.")],
    dtype: Annotated[
        Literal["float32", "float16"], typer.Option(help="Data type that the export computes in; float16 is for GPUs.")
    ] = "float32",
) -> None:
    """Export a model to ONNX. A draft service then runs it without torch."""
    from specdec.engine.engine import UnsupportedModelError
    from specdec.engine.model_directory import ModelDirectory, ModelDirectoryError

    try:
        directory = ModelDirectory(model)
        from specdec.serving.process import logs

        logs.configure("export", "warning")  # before libraries that write to stderr are imported
        from specdec.engine.onnx.export import export as run  # takes seconds: a wrong path is reported before

        run(directory, out, dtype)
    except (ModelDirectoryError, UnsupportedModelError) as error:
        _fail(str(error))
    print(out)


@app.command()
def up(
    target: Annotated[
        Path | None, typer.Option(help="Directory of the target model. By default the demo's target.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            help="Directory of the draft model, or `none` for no draft service. By default the demo's draft, or none "
            "with --target or --local-draft."
        ),
    ] = None,
    local_draft: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a local draft: a small model that the verifier itself runs, in place of a draft service."
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Data type that the target computes in.")
    ] = "float32",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the orchestrator, for clients; 0 takes a free one.")
    ] = 0,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print the addresses of all services as one JSON object.")
    ] = False,
    log_level: LogLevel = "warning",
) -> None:
    """Start all three services on this machine. Ctrl-C stops them."""
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
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="Address of a verifier, HOST:PORT.")],
    every: Annotated[
        float | None, duration("Seconds between two lines. By default one line is printed.", min=0.1)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print each line as a JSON object.")] = False,
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
                print(_stats_line(seen), flush=True)
            if every is None:
                return
            time.sleep(every)


def _stats_line(seen: GetStatsResponse) -> str:
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
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue; `-` reads it from stdin.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="File of prompts, in place of PROMPT: on each line a JSON object with `text` or `tokens`."),
    ] = None,
    address: Annotated[
        str, typer.Option(help="Address of the orchestrator, HOST:PORT; several are joined by commas.")
    ] = "127.0.0.1:50050",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate for a prompt.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="Temperature of sampling; 0 is greedy: always the most probable token.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option(help="Sample from the fewest tokens whose probabilities add up to this much; 1 keeps all."),
    ] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from so many of the most probable tokens; 0 keeps all.")] = 0,
    min_p: Annotated[
        float,
        typer.Option(
            help="Sample from tokens whose probability, relative to the most probable token's, is at least this; 0 "
            "keeps all."
        ),
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**64 - 1, help="Seed of sampling. By default the server draws one, which is printed."),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string: the text ends before it. May be repeated.")
    ] = None,
    speculation: Annotated[
        Literal["auto", "off", "always", "draft", "local"],
        typer.Option(
            help="Who proposes candidates. auto: all drafters, where that pays. draft: the remote draft alone, where "
            "that pays. always: the remote draft alone, even at a loss. local: the verifier's own proposers alone, "
            "where that pays. off: nobody, which is plain decoding."
        ),
    ] = "auto",
    lookahead: Annotated[
        tuple[int, int, int] | None,
        typer.Option(
            metavar="W N G",
            help="Size of the lookahead window, used even at a loss: W positions, n-grams of N tokens, G guesses. By "
            "default a size that pays, if one does.",
        ),
    ] = None,
    rule: Annotated[
        Literal["coupled", "rejection", "contrastive"],
        typer.Option(help="Acceptance rule: how candidates become tokens."),
    ] = "coupled",
    alpha: Annotated[
        float | None,
        typer.Option(
            help="For --rule contrastive: the least probability of a token that may be chosen, relative to the most "
            "probable token's. By default 0.1."
        ),
    ] = None,
    timeout: Annotated[
        float | None, duration("Seconds that a prompt may take, retries included. By default no limit.", min=0.001)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print a JSON object for each prompt.")] = False,
) -> None:
    """Continue prompts. On a terminal, each token has the colour of its source."""
    if (prompt is None) == (prompt_file is None):
        _fail("give either PROMPT or --prompt-file")
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
            for each in _prompts(prompt, prompt_file):
                _complete(client, each, options, json_output)
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
    except OSError as error:
        _fail(f"{file}: {error.strerror}")
    except UnicodeDecodeError:
        _fail(f"{file}: is not UTF-8 text")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            _fail(f"{file}:{number}: is not JSON: {error}")
        if not isinstance(entry, dict) or ("text" in entry) == ("tokens" in entry):
            _fail(f"{file}:{number}: must be an object with either `text` or `tokens`")
        yield entry


def _complete(client: Client, prompt: dict[str, Any], options: dict[str, Any], json_output: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    start = time.monotonic()
    first: float | None = None
    tokens: list[int] = []
    text: list[str] = []
    seed: int | None = None
    finish: Finish | None = None
    with client.generate(prompt.get("text"), tokens=prompt.get("tokens"), **options) as stream:
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
    """Run a benchmark, or list them all. Needs a checkout."""
    if not (FOLDER / "bench").is_dir():
        _fail("benchmarks come with the source: install specdec from a checkout")
    load("bench.__main__").main(context.args)


def _fail(message: str) -> NoReturn:
    print(f"specdec: {message}", file=sys.stderr)
    raise SystemExit(1)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
