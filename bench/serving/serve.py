"""Load-test a deployment (ours, or any with OpenAI's HTTP API): its latencies, throughput, goodput and errors.

    python -m bench serve 127.0.0.1:50050                                        # orchestrators, by gRPC
    python -m bench serve http://127.0.0.1:8000 --concurrency 16 --requests 200  # OpenAI's HTTP API
    python -m bench serve http://127.0.0.1:8000 --rate 4 --seconds 60 --goodput ttft:500 tpot:50

Requests are streamed. With --rate they arrive at Poisson times, as from independent users; with --concurrency each
answer is followed by the next request. It reports, over complete answers: the time to the first token (TTFT), the time
per token after the first (TPOT), the pauses between pieces (ITL; with speculation a piece may have several tokens), the
time of the whole request (E2E), tokens a second, and the goodput: complete answers a second within all limits of
--goodput. Nothing is retried; errors are counted by kind. The client is one process: if it uses a whole core, the
figures measure the client. Ctrl-C ends the load and prints the results so far. The exit status is 1 if no answer is
complete. --out writes serve.json and .md.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from bench.arguments import limit, parser_of
from bench.report import CUT_OFF, Report, folder, publish
from bench.serving.answers import Answer, at_poisson_times
from bench.serving.deployments import Deployment, DeploymentError, HttpServer, Orchestrators, Prompt, Request
from bench.serving.load_report import LIMITS, rate, report_of, table
from demo import corpus
from specdec.cli.access import access
from specdec.cli.prompt_file import PromptFile, PromptFileError
from specdec.wire.address import parse_addresses

REQUESTS = 100
MAX_REQUESTS = 1_000_000
BOUNDS: dict[str, tuple[float, float]] = {
    "rate": (0.001, 10_000),
    "concurrency": (1, 10_000),
    "requests": (1, MAX_REQUESTS),
    "seconds": (0.001, 86_400),
    "warm_up": (0, 1000),
    "prompt_characters": (1, 100_000),
    "max_tokens": (1, 1_000_000),
    "temperature": (0, 100),
    "timeout": (0.001, 86_400),
}
"""Smallest and largest values of options."""


@dataclass
class Load:
    """A load on a deployment, and the answers so far."""

    prompts: Iterator[Prompt]
    request: Request
    requests: int
    seconds: float  # send no new requests after this many seconds
    rate: float | None  # requests a second; None: `concurrency` at a time
    concurrency: int
    seed: int
    warm_up: int
    answers: list[Answer] = field(default_factory=list)
    processor_begin: float = 0.0  # seconds of processor time of this process when the first request was sent

    @classmethod
    def of(cls, args: argparse.Namespace) -> Load:
        request = Request(args.model, args.max_tokens, args.temperature, args.ignore_end, args.timeout)
        seconds = math.inf if args.seconds is None else args.seconds
        return cls(args.prompts, request, args.requests, seconds, args.rate, args.concurrency, args.seed, args.warm_up)

    async def run(self, deployment: Deployment) -> None:
        """Run the load to its end. If it is cancelled, answers in flight keep no end time."""
        for _ in range(self.warm_up):
            await deployment.ask(next(self.prompts), self.request, Answer())
        self.processor_begin = time.process_time()
        if self.rate is None:
            until = time.perf_counter() + self.seconds
            await asyncio.gather(*(self._ask_on(deployment, until) for _ in range(self.concurrency)))
            return
        async with asyncio.TaskGroup() as running:
            async for _ in at_poisson_times(self.rate, self.seconds, self.seed):
                running.create_task(self._ask(deployment))
                if len(self.answers) == self.requests:
                    break

    def report(self, limits: Mapping[str, float]) -> Report:
        """Return the measurements of the load, which ends now; `limits` are seconds by latency."""
        report = report_of(self.answers, limits, time.perf_counter())
        return report | {"client_cores": rate(time.process_time() - self.processor_begin, report["seconds"])}

    async def _ask_on(self, deployment: Deployment, until: float) -> None:
        while len(self.answers) < self.requests and time.perf_counter() < until:
            await self._ask(deployment)

    def _ask(self, deployment: Deployment) -> Coroutine[Any, Any, None]:
        """Begin an answer and return the coroutine that completes it."""
        self.answers.append(answer := Answer())
        return deployment.ask(next(self.prompts), self.request, answer)


def built_in(characters: int, seed: int) -> Iterator[Prompt]:
    """Return endless passages of Python files, from random places; ValueError if no file is long enough."""
    dice = random.Random(seed)
    texts = [text for text in corpus.files(held_out=True) if len(text) > 2 * characters]
    if not texts:
        raise ValueError(f"--prompt-characters: {characters} is more than half of the longest prompt source file")

    def passage() -> Prompt:
        text = dice.choice(texts)
        start = dice.randrange(len(text) - characters)
        return {"text": text[start : start + characters]}

    return iter(passage, None)


def of_file(path: Path) -> list[Prompt]:
    """Return the prompts of a file, a JSON object with `text`, `tokens` or `messages` on each line; PromptFileError for
    an invalid line."""
    found = []
    for prompt in PromptFile(path, {}).prompts():
        if others := prompt.options.keys() - {"tokens", "messages"}:
            names = ", ".join(sorted(others))
            raise PromptFileError(f"{path}:{prompt.line}: {names} cannot be set here: all requests have the same")
        found.append(prompt.options if prompt.text is None else {"text": prompt.text})
    if not found:
        raise PromptFileError(f"{path}: has no prompt")
    return found


def as_chat(prompt: Prompt) -> Prompt:
    """Return a text as the message of a user."""
    return {"messages": [{"role": "user", "content": prompt["text"]}]} if "text" in prompt else prompt


async def measure(connect: Callable[[], AbstractAsyncContextManager[Deployment]], load: Load, report: Report) -> None:
    """Choose the model, enter model and API into the report, and run the load; DeploymentError if no model fits."""
    async with connect() as deployment:
        names = await deployment.models()
        asked = load.request.model
        if asked is None and len(names) != 1:
            raise DeploymentError(f"serves {', '.join(names) or 'no model'}: choose one with --model")
        known = {*names, *(alias for aliases in names.values() for alias in aliases)}
        if asked is not None and known.isdisjoint((asked, asked.partition("@")[0])):  # it may name a revision
            raise DeploymentError(f"does not serve {asked}, but {', '.join(names) or 'no model'}")
        report |= {"model": asked or next(iter(names)), "api": deployment.api}
        load.request = replace(load.request, model=report["model"])
        await load.run(deployment)


def _limit(text: str) -> tuple[str, float]:
    """Return the latency and the seconds of a limit such as "ttft:500"."""
    name, _, value = text.partition(":")
    try:
        milliseconds = float(value)
    except ValueError:
        milliseconds = math.nan
    if name not in LIMITS or not 0 < milliseconds < math.inf:
        forms = ", ".join(f"{known}:MILLISECONDS" for known in LIMITS)
        raise argparse.ArgumentTypeError(f"{text!r} must be one of {forms}")
    return name, milliseconds / 1e3


def parsed(given: Sequence[str]) -> argparse.Namespace:
    """Return the options, all checked, with `connect` added and `prompts` read."""
    parser = parser_of("serve", __doc__)
    parser.add_argument("address", metavar="ADDRESS", help="HOST:PORT of orchestrators, or http(s)://HOST:PORT")
    parser.add_argument("--model", help="default: the only one served")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--rate", type=float, help="requests a second, at Poisson times")
    how.add_argument("--concurrency", type=int, default=8, help="requests at a time; default: %(default)s")
    parser.add_argument("--requests", type=int, help=f"to send; default: {REQUESTS}, or no limit with --seconds")
    parser.add_argument("--seconds", type=float, help="send no new requests after this many seconds")
    parser.add_argument("--warm-up", type=int, default=1, help="uncounted requests before; default: 1")
    parser.add_argument("--prompt-file", type=Path, help="as for `specdec generate`; taken in order, again and again")
    parser.add_argument("--prompt-characters", type=int, default=256, help="of built-in prompts; default: %(default)s")
    parser.add_argument("--chat", action="store_true", help="send texts as messages of a user")
    parser.add_argument("--max-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument(
        "--ignore-end", action="store_true", help="go on to --max-tokens (`ignore_eos`, which not all servers know)"
    )
    parser.add_argument(
        "--goodput",
        type=_limit,
        nargs="+",
        default=[],
        metavar="LATENCY:MS",
        help=f"limits of a good answer, in milliseconds: {', '.join(LIMITS)}",
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds of a request; default: %(default)g")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and built-in prompts; default: 0")
    parser.add_argument("--api-key-file", type=Path, help="default: the key in SPECDEC_API_KEY, if set")
    parser.add_argument("--tls", action="store_true", help="TLS with gRPC's default root CAs")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="TLS with only the CAs in this PEM file")
    parser.add_argument("--out", type=folder, help="folder for the report")
    args = parser.parse_args(given)
    for name, (least, most) in BOUNDS.items():
        limit(parser, args, least, name, most=most)
    args.requests = args.requests or (REQUESTS if args.seconds is None else MAX_REQUESTS)
    args.goodput = dict(args.goodput)
    try:
        args.connect = _connect(args)
        if args.prompt_file is None:
            prompts = built_in(args.prompt_characters, args.seed)
        else:
            prompts = itertools.cycle(of_file(args.prompt_file))
    except ValueError as error:  # PromptFileError is one
        parser.error(str(error))
    except typer.BadParameter as error:
        parser.error(f"{error.param_hint or ''} {error.message}".strip())
    args.prompts = map(as_chat, prompts) if args.chat else prompts
    return args


def _connect(args: argparse.Namespace) -> Callable[[], AbstractAsyncContextManager[Deployment]]:
    """Return the function that connects; ValueError or BadParameter if an option is wrong."""
    scheme, separator, rest = args.address.partition("://")
    if not separator or scheme not in ("http", "https"):
        try:
            parse_addresses(args.address)
        except ValueError as error:
            raise ValueError(f"ADDRESS {error}, or a URL that begins with http:// or https://") from None
        allowed = access(args.tls, args.tls_ca, api_key_file=args.api_key_file)
        return partial(Orchestrators.connect, args.address, allowed)
    if not rest.strip("/"):
        raise ValueError(f"ADDRESS {args.address} has no host")
    if scheme == "http" and (args.tls or args.tls_ca is not None):
        raise ValueError("--tls and --tls-ca are not for http://: write https://")
    key = access(api_key_file=args.api_key_file).api_key
    try:
        authorities = None if args.tls_ca is None else ssl.create_default_context(cafile=args.tls_ca)
    except OSError as error:
        raise ValueError(f"--tls-ca: {args.tls_ca}: {error.strerror or error}") from None
    base = args.address.rstrip("/")
    return partial(HttpServer.connect, base if base.endswith("/v1") else f"{base}/v1", key, authorities)


def about(args: argparse.Namespace) -> Report:
    """Return a report's entries on the load itself."""
    return {
        "address": args.address,
        "load": f"{args.concurrency} at a time" if args.rate is None else f"{args.rate:g} arriving a second",
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
    }


def main(given: Sequence[str]) -> None:
    args = parsed(given)
    load, report = Load.of(args), about(args)
    try:
        asyncio.run(measure(args.connect, load, report))
    except DeploymentError as error:
        sys.exit(f"bench serve: {args.address}: {error}")
    except KeyboardInterrupt:
        if "model" not in report:
            sys.exit(130)
        report[CUT_OFF] = True
    report |= load.report(args.goodput)
    publish(report, args.out, "serve", table)
    if not report["complete"]:
        sys.exit(1)
