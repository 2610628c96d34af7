"""Servers started as their users start them, by a command with its defaults, and used over their own API.

The only options are those needed to serve this model on loopback without a network, and those in the command's name, as
shown in the report.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench.conditions import as_installed
from bench.systems.http_server import HOST, connection, end_with_parent, free_port, healthy, last_words
from bench.systems.llama_cpp import LlamaFiles
from bench.systems.program import ROOT
from bench.systems.system import ANSWER_SECONDS, STOP_SECONDS, NotServingError
from bench.systems.vllm import ENVIRONMENT, server_command
from specdec.client import Client

Ask = Callable[[list[int]], None]
"""Continues a prompt greedily by one token, and returns once that token has arrived."""


@dataclass(frozen=True)
class Command:
    """A command that serves a model."""

    name: str
    start: Callable[[Path], AbstractContextManager[Ask]]
    """Starts the command, with this folder for its persistent cache, waits until it reports readiness, and ends it when
    the context exits; NotServingError if it does not come up."""
    keeps: bool = True  # whether it caches something for later starts


def specdec_up(target: Path, draft: Path | None) -> list[Command]:
    """Return `specdec up` with the draft, if there is one, and without."""
    found = [Command("specdec up --draft none", partial(_up, target, None))]
    return found if draft is None else [Command("specdec up", partial(_up, target, draft)), *found]


def vllm_serve(python: str, target: Path) -> list[Command]:
    """Return vLLM's server with defaults, and without compilation; `python` is the interpreter with vLLM."""
    options = {"vllm serve": (), "vllm serve --enforce-eager": ("--enforce-eager",)}
    return [Command(name, partial(_vllm, python, target, more)) for name, more in options.items()]


def llama_server(files: LlamaFiles) -> list[Command]:
    """Return llama.cpp's server, which caches nothing."""
    return [Command("llama-server", partial(_llama, files), keeps=False)]


@contextlib.contextmanager
def _up(target: Path, draft: Path | None, cache: Path) -> Iterator[Ask]:
    models = ["--target", str(target), "--draft", str(draft or "none")]
    command = [sys.executable, "-m", "specdec.cli", "up", "--port", "0", "--json", *models]
    with tempfile.TemporaryDirectory() as folder, open(log := Path(folder, "log"), "w") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            cwd=ROOT,
            env=as_installed(SPECDEC_CACHE_DIR=str(cache)),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if not ready:
                raise NotServingError(f"specdec up ended: {last_words(log)}")
            yield partial(_specdec_token, json.loads(ready)["address"])
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()  # its services end when its pipes close
            process.communicate()


def _specdec_token(address: str, prompt: list[int]) -> None:
    with Client(address) as client:
        completion = client.complete(tokens=prompt, max_tokens=1, temperature=0.0).completions[0]
    if len(completion.tokens) != 1:
        raise NotServingError(f"not one token: {completion.tokens}")


@contextlib.contextmanager
def _vllm(python: str, target: Path, more: tuple[str, ...], cache: Path) -> Iterator[Ask]:
    port = free_port()
    caches = {"VLLM_CACHE_ROOT": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    environment = as_installed(**ENVIRONMENT, **caches)
    with healthy("vllm serve", server_command(python, target, port, *more), port, environment):
        yield partial(_openai_token, port, str(target))


@contextlib.contextmanager
def _llama(files: LlamaFiles, cache: Path) -> Iterator[Ask]:
    port = free_port()
    command = [str(files.server), "--host", HOST, "--port", str(port), "--model", str(files.target)]
    with healthy("llama-server", command, port):
        yield partial(_openai_token, port, files.target.name)


def _openai_token(port: int, model: str, prompt: list[int]) -> None:
    asked = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    with contextlib.closing(connection(port, ANSWER_SECONDS)) as opened:
        opened.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        answer = opened.getresponse()
        said = answer.read()
    if answer.status != http.client.OK:
        raise NotServingError(f"HTTP {answer.status}: {said[:300].decode(errors='replace')}")
    if json.loads(said)["usage"]["completion_tokens"] != 1:
        raise NotServingError(f"not one token: {said[:300].decode(errors='replace')}")
