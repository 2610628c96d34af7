"""`specdec generate`: continue prompts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from specdec import ports
from specdec.cli.access import OPEN, Access, ModelName, Orchestrators, with_access
from specdec.cli.failure import fail, prompt_text, say
from specdec.cli.many import generate_many
from specdec.cli.prompt_file import PromptFile, PromptFileError
from specdec.cli.refusals import by_option, named_by_option
from specdec.cli.report import CompletionReport
from specdec.cli.results_file import ResultsFile, ResultsFileError
from specdec.cli.shown import coloured, speculation_lines
from specdec.cli.waiting import WaitReporter
from specdec.client import Client, InvalidRequest, SpecdecError, Speculation, build_request
from specdec.command_line import duration
from specdec.exit_status import ExitStatus
from specdec.wire.speculation import OWN_IN_WORDS, OWN_NAMES, ScorerName, SpeculationName


@with_access
def generate(
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text to continue; `-` reads it from stdin.")
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="JSON Lines file of prompts, in place of PROMPT: on each line an object with `text`, `tokens` or "
            "`messages`, and options for this prompt. Prompts run concurrently."
        ),
    ] = None,
    address: Orchestrators = f"127.0.0.1:{ports.ORCHESTRATOR}",
    model: ModelName = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens to generate for a prompt.")] = 128,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="Sampling temperature; 0 is greedy. Default: the model's own (generation_config.json), else 0."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Nucleus sampling: keep the smallest set of tokens whose probabilities sum to this; 1 keeps all. "
            "Default: the model's own, else 1."
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(help="Sample from the K most probable tokens; 0 keeps all. Default: the model's own, else 0."),
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Keep tokens at least this probable relative to the most probable one; 0 keeps all. Default: the "
            "model's own, else 0."
        ),
    ] = None,
    typical_p: Annotated[
        float | None,
        typer.Option(
            help="Locally typical sampling: of the tokens left by the others, keep those whose surprisal is closest to "
            "the entropy, until their probabilities sum to this; 1 keeps all. Default: the model's own, else 1."
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            help="Divide positive logits of tokens in prompt or text by this, and multiply negative ones; 1 is off. "
            "Default: the model's own, else 1."
        ),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(help="Subtract this from a token's logit each time that it was generated. Default: 0, off."),
    ] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(help="Subtract this from the logit of each token that was generated. Default: 0, off."),
    ] = None,
    ignore_generation_config: Annotated[
        bool,
        typer.Option(
            "--ignore-generation-config",
            help="Ignore the defaults in the model's generation_config.json: greedy unless options change it.",
        ),
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**64 - 1, help="Sampling seed. Default: drawn by the server, and printed."),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option(min=1, max=16, help="Samples of PROMPT, each printed under a heading when it is complete."),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            min=0, max=20, help="With --json: add the log-probability of each token and of the N most probable ones."
        ),
    ] = None,
    min_tokens: Annotated[
        int | None, typer.Option(min=0, help="Minimum tokens before an end token or stop string.")
    ] = None,
    ignore_end_token: Annotated[
        bool,
        typer.Option("--ignore-end-token", "--ignore-eos", help="Continue past the model's end tokens."),
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop string; it is not part of the text. May be repeated.")
    ] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema: each text is a value valid under it.")
    ] = None,
    regex: Annotated[
        str | None, typer.Option(help="Regular expression in Rust's syntax, which each text matches as a whole.")
    ] = None,
    lark: Annotated[
        Path | None,
        typer.Option(help="File with a context-free grammar in Lark's syntax: each text is derived from `start`."),
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option(help="Allowed answer; the text is one of them. May be repeated.")
    ] = None,
    speculation: Annotated[
        SpeculationName,
        typer.Option(
            help="Which drafters propose candidates. auto: the verifier's default, usually all, when it pays. draft: "
            "only the remote draft, when it pays. always: only the remote draft, even at a loss. local: only the "
            f"verifier's own proposers, when it pays. {OWN_NAMES}: only {OWN_IN_WORDS}. jacobi: only windows with "
            "n-grams of 2 tokens. off: none, which is plain decoding."
        ),
    ] = "auto",
    forced: Annotated[
        bool, typer.Option("--forced", help="Use the drafters of --speculation even if they do not pay.")
    ] = False,
    lookahead: Annotated[
        tuple[int, int, int] | None,
        typer.Option(
            metavar="W N G",
            help="Size of the lookahead window, used even at a loss: W positions, n-grams of N tokens, G guesses. "
            "Default: a size that pays, if any.",
        ),
    ] = None,
    jacobi: Annotated[
        int | None,
        typer.Option(
            metavar="W", help="Jacobi decoding with a window of W positions, used even at a loss: --lookahead W 2 1."
        ),
    ] = None,
    max_candidates: Annotated[
        int | None, typer.Option(min=1, help="Maximum candidates verified in a step. Default: the verifier's.")
    ] = None,
    max_depth: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum tokens verified ahead of the last committed one. Default: the services'."),
    ] = None,
    max_branches: Annotated[
        int | None, typer.Option(min=1, help="Maximum alternatives at one position. Default: the draft's.")
    ] = None,
    max_nodes: Annotated[
        int | None, typer.Option(min=1, help="Maximum live candidates of the draft. Default: the draft's.")
    ] = None,
    min_path_probability: Annotated[
        float | None, typer.Option(help="Less probable paths are not drafted further. Default: the draft's threshold.")
    ] = None,
    scorer: Annotated[
        ScorerName | None,
        typer.Option(
            help="How the draft scores candidates: calibrated to what the target has accepted, or by its own "
            "probability. Default: the draft's."
        ),
    ] = None,
    expansion: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Fixed widths of the draft's token tree, as in SpecInfer: children of a node by its depth.",
        ),
    ] = None,
    learn: Annotated[
        bool, typer.Option("--learn", help="Permit drafts to keep the text, prompt included, and to learn from it.")
    ] = False,
    rule: Annotated[
        Literal["coupled", "rejection", "contrastive", "typical"],
        typer.Option(help="Acceptance rule: how candidates become tokens."),
    ] = "coupled",
    alpha: Annotated[
        float | None,
        typer.Option(
            help="For --rule contrastive: minimum probability of a plausible token, relative to the most probable "
            "one. Default: 0.1."
        ),
    ] = None,
    typical_epsilon: Annotated[
        float | None,
        typer.Option(help="For --rule typical: accept a candidate above this probability. Default: 0.09."),
    ] = None,
    typical_delta: Annotated[
        float | None,
        typer.Option(
            help="For --rule typical: accept a candidate above this times exp(-entropy) of the target's distribution. "
            "Default: 0.3."
        ),
    ] = None,
    timeout: Annotated[
        float | None, duration("Deadline of a prompt in seconds, retries included. Default: none.", min=0.001)
    ] = None,
    allowed: Access = OPEN,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt, or per sample.")
    ] = False,
    concurrency: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="With --prompt-file: maximum concurrent prompts. Default: 32."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --prompt-file: JSON Lines file for the results.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue an interrupted run with its --out file. Failed prompts are retried."),
    ] = False,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast", help="With --prompt-file: stop at the first prompt that fails.")
    ] = False,
) -> None:
    """Continue prompts.

    On a terminal, each token has the colour of its source, and the summary says which: green for a draft model, yellow
    for n-gram lookup, magenta for a lookahead window, blue for tokens forced by a grammar, red and cyan for the
    target's own token after candidates, none for plain decoding.
    """
    if (prompt is None) == (prompt_file is None):
        fail("give either PROMPT or --prompt-file", ExitStatus.USAGE)
    if prompt_file is None and (concurrency is not None or out is not None or fail_fast):
        fail("--concurrency, --out and --fail-fast need --prompt-file", ExitStatus.USAGE)
    if prompt_file is not None and (n is not None or logprobs is not None):
        fail("--n and --logprobs: cannot be combined with --prompt-file", ExitStatus.USAGE)
    if logprobs is not None and not json_output:
        fail("--logprobs needs --json", ExitStatus.USAGE)
    if resume and out is None:
        fail("--resume needs --out", ExitStatus.USAGE)
    for option, value, needed in (
        ("--alpha", alpha, "contrastive"),
        ("--typical-epsilon", typical_epsilon, "typical"),
        ("--typical-delta", typical_delta, "typical"),
    ):
        if value is not None and rule != needed and prompt_file is None:  # a line of the file may set the rule
            fail(f"{option}: needs --rule {needed}", ExitStatus.USAGE)
    options: dict[str, Any] = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "typical_p": typical_p,
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "ignore_generation_config": ignore_generation_config or None,
        "seed": seed,
        "n": n,
        "logprobs": logprobs,
        "min_tokens": min_tokens,
        "ignore_end_token": ignore_end_token or None,
        "stop": stop or (),
        "json_schema": _content("--json-schema", json_schema),
        "regex": regex,
        "lark": _content("--lark", lark),
        "choice": choice or None,
        "speculation": speculation,
        "forced": forced or None,
        "lookahead": lookahead,
        "jacobi": jacobi,
        "max_candidates": max_candidates,
        "max_depth": max_depth,
        "max_branches": max_branches,
        "max_nodes": max_nodes,
        "min_path_probability": min_path_probability,
        "scorer": scorer,
        "expansion": None if expansion is None else _widths(expansion),
        "learn": learn or None,
        "rule": rule,
        "alpha": alpha,
        "typical_epsilon": typical_epsilon,
        "typical_delta": typical_delta,
    }
    try:
        text = None if prompt is None else prompt_text(prompt)
        build_request(text, **options)
    except (ValueError, TypeError) as error:  # a value that does not fit into a message
        fail(named_by_option(str(error), options), ExitStatus.USAGE)
    if prompt_file is not None:
        _complete_file(
            PromptFile(prompt_file, options),
            address,
            allowed,
            timeout,
            concurrency or 32,
            json_output,
            out,
            resume,
            fail_fast,
        )
        return
    with Client(address, timeout=timeout, **allowed.for_client) as client:
        _complete(client, WaitReporter(address, access=allowed), text, options, json_output)


def _widths(text: str) -> list[int]:
    """Return the numbers of a list such as 4,2,1."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        fail(f"--expansion {text}: must be comma-separated numbers, such as 4,2,1", ExitStatus.USAGE)


def _content(option: str, file: Path | None) -> str | None:
    """Return the text of a file given by an option."""
    try:
        return None if file is None else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        fail(f"{option} {file}: {why}; give the name of a file", ExitStatus.USAGE)


def _complete_file(
    file: PromptFile,
    address: str,
    allowed: Access,
    timeout: float | None,
    concurrency: int,
    json_output: bool,
    out: Path | None,
    resume: bool,
    fail_fast: bool,
) -> None:
    try:  # report problems before sending anything
        count = sum(1 for _ in file.prompts())
        if not count:
            fail(f"{file.path}: contains no prompts", ExitStatus.USAGE)
        results = None if out is None else ResultsFile(out, resume=resume)
        if results is not None:
            results.check(file.prompts())
    except (PromptFileError, ResultsFileError) as error:
        fail(str(error), ExitStatus.USAGE)
    try:
        with contextlib.ExitStack() as exits:
            if results is not None:
                exits.callback(results.close)
            status = asyncio.run(
                generate_many(
                    address,
                    file,
                    count,
                    access=allowed,
                    timeout=timeout,
                    concurrency=concurrency,
                    json_output=json_output,
                    out=results,
                    fail_fast=fail_fast,
                )
            )
    except (PromptFileError, ResultsFileError) as error:  # the file changed meanwhile, or the disk is full
        fail(str(error))
    except KeyboardInterrupt:
        if results is not None:
            say(f"{len(results)} of {count} done; --resume continues")
        raise
    if status is not None:
        raise SystemExit(status)


def _complete(
    client: Client, waiting: WaitReporter, prompt: str | None, options: dict[str, Any], json_output: bool
) -> None:
    console, reports = Console(), [CompletionReport() for _ in range(options["n"] or 1)]
    texts = [""] * len(reports)  # of several samples, which are printed when complete
    try:
        with client.generate(prompt, **options) as stream, waiting:
            for report in reports:
                report.request_id = stream.request_id
            for chunk in stream:
                waiting.heard()
                reports[chunk.index].add(chunk)
                if chunk.seed is not None:  # only in the first chunk
                    for report in reports:
                        report.seed = chunk.seed
                text = coloured(chunk, console) if console.is_terminal else chunk.text
                if json_output:
                    continue
                if len(reports) == 1:
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    continue
                texts[chunk.index] += text
                if chunk.finish:
                    print(f"--- sample {chunk.index + 1} of {len(reports)}\n{texts[chunk.index]}", flush=True)
    except InvalidRequest as error:
        raise by_option(error, options) from None
    except (SpecdecError, KeyboardInterrupt):
        if (count := sum(len(report.tokens) for report in reports)) and not json_output:
            ended = f"ended after {count} tokens, seed {reports[0].seed}, request {reports[0].request_id}"
            print(f"\n{ended}", file=sys.stderr)
        raise
    for report in reports:
        if json_output:
            print(json.dumps(report.as_json()), flush=True)
        else:
            _summarise(report, options, in_colours=console.is_terminal)


def _summarise(report: CompletionReport, options: Mapping[str, Any], *, in_colours: bool) -> None:
    """Print the summary of a completion on stderr: speed, schema check and sources of tokens."""
    seconds, finish = report.seconds, report.finish
    s, count = finish.speculation, len(report.tokens)
    err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)
    err.print()
    err.print(
        f"{count} tokens in {seconds:.2f} s ({count / seconds:.0f}/s), "
        f"{s.mean_tokens_per_step:.2f} a step, {s.accepted} of {s.offered} candidates accepted; "
        f"{without_draft(s, options)}{finish.reason}, seed {report.seed}, "
        f"request {report.request_id}",
        style="dim",
    )
    if (check := finish.schema_check) is not None and not check.ok:
        broken = f"{check.keyword} does not hold at {check.path}"
        err.file.write(
            f"not valid under the schema: {broken}\n" if check.keyword else "not checked against the whole schema\n"
        )
    if finish.kept_for_learning:
        err.file.write("kept by a draft service to learn from\n")
    for line in speculation_lines(s, err, in_colours=in_colours):
        err.file.write(f"{line}\n")


def without_draft(speculation: Speculation, options: Mapping[str, Any]) -> str:
    """Return a note on tokens that lacked a draft's expected candidates; empty if nothing unexpected happened. Running
    without any draft service is reported only if a draft was requested."""
    if not speculation.undrafted_reason or not speculation.undrafted_tokens:
        return ""
    asked = options["speculation"] in ("always", "draft") or options["rule"] in ("rejection", "contrastive")
    if speculation.undrafted_reason == "no_draft" and not asked:
        return ""
    return f"{speculation.undrafted_tokens} tokens without the draft service ({speculation.undrafted_reason}); "
