"""A deployment under load: orchestrators by gRPC, or any server with OpenAI's HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import httpx2

from bench.serving.answers import Answer
from specdec.cli.access import Access
from specdec.client import AsyncClient, SpecdecError, Unavailable

Prompt = Mapping[str, Any]
"""One of `text`, `tokens` (ids) and `messages`."""

START_SECONDS = 30.0
"""Timeout of the first call, which lists the models."""


class DeploymentError(Exception):
    """The deployment cannot be put under load; the message is the reason in one line."""


@dataclass(frozen=True)
class Request:
    """The parameters common to all requests of a load."""

    model: str | None  # None: the only one served
    max_tokens: int
    temperature: float
    ignore_end: bool  # go on to `max_tokens`
    seconds: float  # timeout


class Deployment(Protocol):
    """A deployment, connected."""

    api: str

    async def models(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the served models, each with its further names; DeploymentError if it does not answer."""
        ...

    async def ask(self, prompt: Prompt, request: Request, answer: Answer) -> None:
        """Stream an answer to its end. Errors of the deployment end the answer, and are not raised."""
        ...


@dataclass(frozen=True)
class Orchestrators:
    """Orchestrators, by gRPC. Nothing is retried: an error is counted."""

    client: AsyncClient
    api = "gRPC"

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, address: str, access: Access) -> AsyncIterator[Orchestrators]:
        """Connect; `address` may be several, comma-separated."""
        async with AsyncClient(address, max_retries=0, **access.for_client) as client:
            yield cls(client)

    async def models(self) -> dict[str, tuple[str, ...]]:
        try:
            return {model.name: model.aliases for model in await self.client.models(timeout=START_SECONDS)}
        except Unavailable as error:
            raise DeploymentError(f"{error}; if it speaks HTTP, write http:// before its address") from None
        except SpecdecError as error:
            raise DeploymentError(str(error)) from None

    async def ask(self, prompt: Prompt, request: Request, answer: Answer) -> None:
        try:
            stream = self.client.generate(
                prompt.get("text"),
                tokens=prompt.get("tokens"),
                messages=prompt.get("messages"),
                model=request.model,
                max_tokens=request.max_tokens,
                temperature=request.temperature,
                ignore_end_token=request.ignore_end,
                timeout=request.seconds,
            )
            await answer.record(stream)
        except SpecdecError as error:
            answer.finish(type(error).__name__, str(error))


class _BrokenStreamError(Exception):
    """A stream is not a valid answer; the message is the reason."""


@dataclass(frozen=True)
class HttpServer:
    """A server with OpenAI's HTTP API."""

    client: httpx2.AsyncClient
    api = "HTTP"

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(cls, url: str, api_key: str | None, ca: ssl.SSLContext | None) -> AsyncIterator[HttpServer]:
        """Connect to the server whose routes begin with `url`, such as http://127.0.0.1:8000/v1."""
        async with httpx2.AsyncClient(
            base_url=f"{url}/",
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=None,
            trust_env=False,  # a proxy would be measured too
            verify=True if ca is None else ca,
        ) as client:
            yield cls(client)

    async def models(self) -> dict[str, tuple[str, ...]]:
        try:
            answer = await self.client.get("models", timeout=START_SECONDS)
            if not answer.is_success:
                raise DeploymentError(f"GET {answer.url}: {_refusal(answer)}")
            return {str(entry["id"]): () for entry in answer.json()["data"]}
        except httpx2.HTTPError as error:
            # What an HTTP/2 server without TLS answers is no HTTP/1.
            grpc = "; if it is an orchestrator, leave out http://" * isinstance(error, httpx2.RemoteProtocolError)
            raise DeploymentError(f"GET {self.client.base_url}models: {_named(error)}{grpc}") from None
        except (ValueError, KeyError, TypeError):
            raise DeploymentError(f"GET {self.client.base_url}models: the answer is no list of models") from None

    async def ask(self, prompt: Prompt, request: Request, answer: Answer) -> None:
        try:
            async with asyncio.timeout(request.seconds):
                await self._stream(prompt, request, answer)
        except TimeoutError:
            answer.finish("timeout", f"no end within {request.seconds:g} s")
        except httpx2.HTTPError as error:
            answer.finish(type(error).__name__, _named(error))
        except _BrokenStreamError as error:
            answer.finish("broken stream", str(error))

    async def _stream(self, prompt: Prompt, request: Request, answer: Answer) -> None:
        chat = "messages" in prompt
        text = prompt["text"] if "text" in prompt else prompt.get("tokens")
        body = {
            "model": request.model,
            **({"messages": prompt["messages"]} if chat else {"prompt": text}),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | ({"ignore_eos": True} if request.ignore_end else {})
        async with self.client.stream("POST", "chat/completions" if chat else "completions", json=body) as response:
            if not response.is_success:
                await response.aread()
                answer.finish(f"HTTP {response.status_code}", _refusal(response))
                return
            ended, answer.tokens_are_pieces = False, True
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip() if line.startswith("data:") else ""
                if data == "[DONE]":
                    ended = True
                elif data:
                    ended |= _read(data, answer)
        if not ended:
            raise _BrokenStreamError("it stopped without a finish reason or [DONE]")
        answer.finish()


def _read(data: str, answer: Answer) -> bool:
    """Record an event of a stream; return whether it has the finish reason."""
    try:
        event = json.loads(data)
        if (error := event.get("error")) is not None:
            raise _BrokenStreamError(str(error.get("message", error) if isinstance(error, dict) else error))
        for text in _texts(event):
            if text:
                answer.piece(1)
        if (usage := event.get("usage")) is not None:
            answer.tokens = int(usage["completion_tokens"])
            answer.tokens_are_pieces = False
        return any(choice.get("finish_reason") for choice in event.get("choices", ()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _BrokenStreamError(f"an event is not one of OpenAI's: {data[:100]}") from None


def _texts(event: Mapping[str, Any]) -> Iterator[str | None]:
    """Yield the text of each choice; in a chat, its reasoning counts as text."""
    for choice in event.get("choices", ()):
        delta = choice.get("delta")
        if delta is None:
            yield choice.get("text")
        else:
            yield delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content")


def _refusal(response: httpx2.Response) -> str:
    """Return status and message of a refusal, in one line."""
    try:
        error = response.json()["error"]
        message = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        message = response.text
    return f"status {response.status_code}: {' '.join(str(message).split())[:300]}"


def _named(error: httpx2.HTTPError) -> str:
    return str(error) or type(error).__name__
