"""Shared by the checks of all Python clients: the server, the questions with their right answers, and comparisons.

A check is a module with a function for each use of its client, marked by `use`. It runs in the client's environment, so
this module imports only the standard library. By default, the server answers greedily and with at most TOKENS tokens:
the right answer to a question is known even if a client cannot set sampling parameters.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

SERVER_VARIABLE = "SPECDEC_CLIENT_SERVER"
"""Environment variable with the fields of `Server` as a JSON object."""
TOKENS = 64
"""Maximum number of tokens of every answer."""

PROMPT = "def main("
QUESTION = "Read a file."

CITIES = ("Paris", "Rome")
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
"""Schema of a structured answer, which any model can give with few tokens."""
TOOL = "get_weather"
TOOL_ABOUT = "Return the weather in a city."
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": WEATHER["properties"]["city"]},
    "required": ["city"],
    "additionalProperties": False,
}
OPENAI_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": TOOL, "description": TOOL_ABOUT, "parameters": ARGUMENTS},
}
"""The tool in the form of OpenAI's chats."""

Function = TypeVar("Function", bound=Callable[[], Any])


@dataclass(frozen=True)
class Server:
    """The server that a client is pointed at, and its right answers."""

    url: str  # such as http://127.0.0.1:8000
    model: str
    key: str
    completion: str  # the continuation of PROMPT
    answer: str  # to QUESTION as the only message
    orchestrator: str = ""  # gRPC address; empty if only the server's URL is known
    tokenizer: str = ""  # folder of the model's tokenizer; empty then too
    contract: str = ""  # folder of the .proto files; empty then too

    @property
    def base(self) -> str:
        """The base URL of OpenAI's clients."""
        return f"{self.url}/v1"


def server() -> Server:
    """Return the server given by the environment."""
    return Server(**json.loads(os.environ[SERVER_VARIABLE]))


class WrongAnswerError(Exception):
    """The client returned something unexpected; the message has both values."""


USES: dict[str, Callable[[], Any]] = {}
"""The functions of the check in this process, by use."""


def use(name: str) -> Callable[[Function], Function]:
    """Register a function, possibly a coroutine, as a use of the client. It raises if the use does not work."""

    def register(function: Function) -> Function:
        USES[name] = function
        return function

    return register


def equal(got: object, wanted: object) -> None:
    if got != wanted:
        raise WrongAnswerError(f"got {got!r}, expected {wanted!r}")


def same_text(got: str | None, wanted: str) -> None:
    """Compare texts. Surrounding white space does not count: several clients strip it."""
    equal((got or "").strip(), wanted.strip())


def joined(pieces: Sequence[str | None], wanted: str) -> None:
    """Check that a stream came in several pieces that join to the text."""
    same_text("".join(piece or "" for piece in pieces), wanted)
    if sum(bool(piece) for piece in pieces) < 2:
        raise WrongAnswerError(f"the stream came in one piece: {pieces!r}")


def some_text(got: object) -> None:
    """Check an answer to a prompt made by the client: any text will do."""
    if not isinstance(got, str) or not got.strip():
        raise WrongAnswerError(f"got {got!r}, expected a text")


def weather(got: object) -> None:
    """Check that an answer fits WEATHER; it may be JSON, a mapping or an object with these attributes."""
    value = _fields(got)
    if value.keys() != {"city", "warm"} or value["city"] not in CITIES or not isinstance(value["warm"], bool):
        raise WrongAnswerError(f"got {got!r}, expected a city of {CITIES} and whether it is warm")


def called(name: str | None, arguments: object) -> None:
    """Check a call of the tool."""
    equal(name, TOOL)
    value = _fields(arguments)
    if value.get("city") not in CITIES:  # the client's schema may allow other arguments
        raise WrongAnswerError(f"called with {arguments!r}, expected a city of {CITIES}")


def _fields(value: object) -> Mapping[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise WrongAnswerError(f"got {value!r}, expected JSON") from None
    found = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    if not isinstance(found, Mapping):
        raise WrongAnswerError(f"got {value!r}, expected an object")
    return {name: field for name, field in found.items() if not name.startswith("_")}


def said(*command: str | Path) -> str:
    """Run a program of the client and return its stdout; WrongAnswerError with its last line if it fails."""
    done = subprocess.run([*map(str, command)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n", flush=True)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise WrongAnswerError(f"exit status {done.returncode}: {''.join(last)}")
    return done.stdout
