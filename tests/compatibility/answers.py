"""A server's answers to all requests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx2
import jsonschema
import referencing.exceptions

from tests.compatibility.asked import Asked
from tests.compatibility.schemas import OF_DRAFT_7

ANSWER_SECONDS = 120.0


@dataclass(frozen=True)
class Answer:
    """A server's answer to a request."""

    status: int
    problem: str = ""  # the error's message, even if the error came within a stream
    ignored: list[str] = field(default_factory=list)  # fields reported as ignored
    fits: bool | None = None  # whether it fits the schema; None without a schema, if cut off, or if not checked

    @property
    def taken(self) -> bool:
        return self.status == httpx2.codes.OK and not self.problem


@dataclass(frozen=True)
class Answers:
    """A server's answers, by `Asked.group`, `name` and `path`."""

    system: str
    version: str
    date: str
    answers: dict[str, Answer]

    def to(self, asked: Asked) -> Answer | None:
        return self.answers.get(key(asked))

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> Self:
        said = json.loads(file.read_text())
        return cls(**said | {"answers": {name: Answer(**answer) for name, answer in said["answers"].items()}})


def key(asked: Asked) -> str:
    return f"{asked.group}: {asked.path}: {asked.name}"


def answers_of(url: str, model: str, asked: Iterable[Asked]) -> dict[str, Answer]:
    """Send a server all requests, one after the other; httpx2.TransportError if it is unreachable."""
    with httpx2.Client(base_url=url, timeout=ANSWER_SECONDS) as client:
        return {key(each): _answer(client, model, each) for each in asked}


def version_of(url: str) -> str:
    """Return the version that a server reports; empty if it reports none."""
    with httpx2.Client(base_url=url) as client:
        for route, name in (("/version", "version"), ("/props", "build_info")):
            answer = client.get(route)
            if answer.status_code == httpx2.codes.OK:
                return str(answer.json()[name])
    return ""


def model_of(url: str) -> str:
    """Return the name of the model that a server serves."""
    with httpx2.Client(base_url=url) as client:
        return str(client.get("/v1/models").json()["data"][0]["id"])


def _answer(client: httpx2.Client, model: str, asked: Asked) -> Answer:
    body = None if asked.body is None else {"model": model} | asked.body
    response = client.request(asked.method, asked.path, json=body)
    ignored = [name for name in response.headers.get("specdec-ignored", "").split(", ") if name]
    streamed = response.headers.get("content-type", "").startswith("text/event-stream")
    parts = _events(response.text) if streamed else [_parsed(response.text)]
    problem = next((found for part in parts if (found := _problem(part))), "")
    if response.status_code != httpx2.codes.OK:
        problem = problem or response.text
    fits = None if asked.schema is None or problem else _fits(parts[0], asked.schema)
    return Answer(response.status_code, problem, ignored, fits)


def _events(text: str) -> list[Any]:
    lines = (line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:"))
    return [_parsed(line) for line in lines if line != "[DONE]"]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # a page, or metrics
        return None


def _problem(said: Any) -> str:
    """Return the message of an error in OpenAI's, Anthropic's or FastAPI's form; empty if there is none."""
    match said:
        case {"error": {"message": str(message)}} | {"error": str(message)} | {"detail": str(message)}:
            return message
        case {"error": error} if error:
            return json.dumps(error)
    return ""


def _fits(said: Any, schema: Mapping[str, Any]) -> bool | None:
    """Return whether a chat's content, or the arguments of its call, fit a schema; None if they were cut off or if the
    schema cannot be checked here."""
    choice = said["choices"][0]
    if choice["finish_reason"] == "length":
        return None
    message = choice["message"]
    text = message["tool_calls"][0]["function"]["arguments"] if message.get("tool_calls") else message["content"]
    try:
        value = json.loads(text)
    except (TypeError, ValueError):
        return False
    kind = jsonschema.Draft7Validator if schema in OF_DRAFT_7 else jsonschema.Draft202012Validator
    try:
        return bool(kind(schema).is_valid(value))
    except referencing.exceptions.Unresolvable:
        return None
