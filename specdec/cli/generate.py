"""`specdec generate`: continue prompts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.text import Text

from specdec import ports
from specdec.cli.failure import fail
from specdec.client import Chunk, Client, Finish, SpecdecError, Speculation
from specdec.command_line import addresses, duration
from specdec.exit_status import ExitStatus

STYLES = {
    "remote_draft": "green",
    "local_model": "green",
    "ngram": "yellow",
    "lookahead": "magenta",
    "correction": "red",
    "bonus": "cyan",
    "plain": "default",
}


def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue; `-` reads it from stdin.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="File of prompts, in place of PROMPT: on each line a JSON object with `text` or `tokens`."),
    ] = None,
    address: Annotated[
        str,
        typer.Option(
            callback=addresses,
            help="Address of the orchestrator: HOST:PORT, or as gRPC spells it; several are joined by commas.",
        ),
    ] = f"127.0.0.1:{ports.ORCHESTRATOR}",
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
        fail("give either PROMPT or --prompt-file", ExitStatus.USAGE)
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
    except (ValueError, TypeError) as error:  # what no message can say
        fail(str(error), ExitStatus.USAGE)


def _prompts(prompt: str | None, file: Path | None) -> Iterator[dict[str, Any]]:
    """Yield {"text": ...} or {"tokens": ...} for each prompt."""
    if file is None:
        yield {"text": sys.stdin.read() if prompt == "-" else prompt}
        return
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        fail(f"{file}: {error.strerror}", ExitStatus.USAGE)
    except UnicodeDecodeError:
        fail(f"{file}: is not UTF-8 text", ExitStatus.USAGE)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            fail(f"{file}:{number}: is not JSON: {error}", ExitStatus.USAGE)
        if not isinstance(entry, dict) or ("text" in entry) == ("tokens" in entry):
            fail(f"{file}:{number}: must be an object with either `text` or `tokens`", ExitStatus.USAGE)
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
            f"{without_draft(s)}{finish.reason}, seed {seed}[/dim]"
        )


def without_draft(speculation: Speculation) -> str:
    """Return how many tokens should have had candidates of a draft, and had none; empty if it is as asked."""
    if not speculation.undrafted_reason or not speculation.undrafted_tokens:
        return ""
    return f"{speculation.undrafted_tokens} tokens without a draft ({speculation.undrafted_reason}); "


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
            "undrafted_reason": s.undrafted_reason,
            "undrafted_tokens": s.undrafted_tokens,
        },
        "seconds": seconds,
        "time_to_first_token": first,
    }
