"""llama.cpp's server as a system under test: the user's `llama-server`, started on loopback and used over HTTP.

Its client is in this process, like specdec's, and the client's work is part of the measured time; tokens are streamed,
to measure first tokens and pauses. Each mode of speculation has its own server, since a server's mode is fixed at its
start. The options are those of its releases since spring 2026, in which `--spec-type` chooses speculation.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.systems.http_server import HOST, connection, free_port, get, healthy
from bench.systems.protocol import Record
from bench.systems.system import ANSWER_SECONDS, Answer, Configuration, Launch, Load, NotServingError, Setup

DRAFTED, LOOKED_UP = 5, 10
"""Maximum tokens proposed per step by a draft and by n-gram lookup, as for other systems."""
AGREEING = 2
"""Tokens that must match for n-gram lookup, as for vLLM."""
NGRAMS = ["--spec-ngram-map-k-size-n", str(AGREEING), "--spec-ngram-map-k-size-m", str(LOOKED_UP)]
SPECULATION = {
    "none": [],
    "ngram": ["--spec-type", "ngram-map-k", *NGRAMS],
    "draft": ["--spec-type", "draft-simple", "--spec-draft-n-max", str(DRAFTED)],
}


def server_options(speculation: str, streams: int, context: int) -> list[str]:
    """Return options, besides models and address, of a server on all cores for `streams` streams of up to `context`
    tokens. Prompts are new each time, so none are cached."""
    cores = str(os.cpu_count() or 1)
    slots = ["--parallel", str(streams), "--ctx-size", str(streams * (context + max(DRAFTED, LOOKED_UP) + 1))]
    return [
        *slots,
        "--threads",
        cores,
        "--threads-batch",
        cores,
        "--cache-ram",
        "0",
        "--no-ui",
        *SPECULATION[speculation],
    ]


@dataclass(frozen=True)
class LlamaFiles:
    """The user's files: the program, and models in its format."""

    server: Path
    target: Path
    draft: Path | None


def launches(setup: Setup, files: LlamaFiles) -> list[Launch]:
    found = []
    for name, speculation in {"llama.cpp": "none", "llama.cpp n-gram": "ngram", "llama.cpp drafted": "draft"}.items():
        draft = files.draft if speculation == "draft" else None
        if speculation != "draft" or draft is not None:
            options = server_options(speculation, setup.streams, setup.context)
            start = partial(LlamaServer.start, files.server, files.target, draft, options)
            found.append(Launch(name, start, (Configuration(name),)))
    return found


@dataclass
class LlamaServer:
    """A running llama.cpp server."""

    about: Mapping[str, Any]
    process: subprocess.Popen[bytes]
    port: int

    @classmethod
    @contextlib.contextmanager
    def start(cls, binary: Path, target: Path, draft: Path | None, given: list[str]) -> Iterator[LlamaServer]:
        """Start the server, wait until its models are loaded, and end it when the context exits; NotServingError if it
        fails."""
        port = free_port()
        models = ["--model", str(target), *(() if draft is None else ("--model-draft", str(draft)))]
        command = [str(binary), "--host", HOST, "--port", str(port), *models, *given]
        with healthy("llama-server", command, port) as process:
            build = str(json.loads(get(port, "/props")[1]).get("build_info", "unknown"))
            flags = {"target": target.name, "draft": draft and draft.name, "options": given}
            yield cls({"versions": {"llama.cpp": build}, "flags": flags}, process, port)

    def run(self, load: Load, mode: str = "") -> Answer:
        with contextlib.ExitStack() as exits:
            connections = [
                exits.enter_context(contextlib.closing(connection(self.port, ANSWER_SECONDS))) for _ in load.prompts
            ]
            # The pool must exit first: a connection closed before its request would reopen itself.
            pool = exits.enter_context(ThreadPoolExecutor(len(load.prompts)))
            try:
                for each in connections:
                    each.connect()  # before the clock starts
                record = Record(len(load.prompts))
                accepted = sum(pool.map(lambda n: _query(connections[n], load, n, record), range(len(load.prompts))))
                seconds = time.perf_counter() - record.begin
            except (OSError, http.client.HTTPException) as error:
                raise NotServingError(f"its server broke off: {type(error).__name__}: {error}") from error
        answer = Answer(seconds, record.arrivals).checked("llama.cpp", load)
        return replace(answer, steps=answer.tokens - accepted)

    def sessions(self) -> Mapping[str, int]:
        return {"": self.process.pid}


def _query(opened: http.client.HTTPConnection, load: Load, number: int, record: Record) -> int:
    """Continue one prompt, and record arrivals; return the number of accepted candidates among the tokens."""
    asked = {
        "prompt": load.prompts[number],
        "n_predict": load.max_tokens,
        "temperature": load.temperature,
        "samplers": ["temperature"],  # no truncation and no penalties
        "seed": number,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }
    opened.request("POST", "/completion", json.dumps(asked), {"Content-Type": "application/json"})
    socket_, known = opened.sock, 0
    with opened.getresponse() as answer:  # leaving it closes the socket, even after an error
        if answer.status != http.client.OK:
            raise NotServingError(f"HTTP {answer.status}: {answer.read(300).decode(errors='replace')}")
        for line in answer:
            # The server sends the next token only once the last is acknowledged, and the kernel delays an
            # acknowledgement by some 40 ms unless this option is set again each time.
            socket_.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            kind, _, text = line.partition(b": ")
            if kind == b"error":
                raise NotServingError(text.decode(errors="replace").strip()[:300])
            if kind != b"data":
                continue
            said = json.loads(text)
            if "error" in said:
                raise NotServingError(str(said["error"])[:300])
            # The server holds back tokens of an incomplete character, and may add a token or two at the end.
            so_far = min(said["tokens_predicted"], load.max_tokens)
            if so_far > known:
                record.add(number, so_far - known)
                known = so_far
            if said["stop"]:
                return int(said["timings"].get("draft_n_accepted", 0))
    raise NotServingError("its answer broke off")
