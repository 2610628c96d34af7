"""The two streams of a sample: one to a verifier pod, one to a draft pod."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc

from orchestrator.request import Model, Sample
from specdec.serving.errors import PeerLostError, ProtocolError, ServiceError, from_rpc
from specdec.serving.interceptor import request_id
from specdec.serving.wire import PROTOCOL_VERSION, rule_message, sampling_message
from specdec.v1 import draft_pb2, draft_pb2_grpc, model_pb2, verifier_pb2, verifier_pb2_grpc

OPEN_SECONDS = 30.0
"""For the answer to `open`, which waits for the end of a step."""

Call = grpc.aio.StreamStreamCall[Any, Any]

STREAM_IS_OVER = (asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.AioRpcError)
"""What writing to a stream that has ended raises."""


class VerifierLink:
    """A session at the verifier. Used as a context manager: leaving it ends the session."""

    def __init__(self, channel: grpc.aio.Channel, timeout: float | None, silence: float) -> None:
        self._stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        self._timeout = timeout
        self._silence = silence  # seconds; a peer says something every quarter of one
        self._call: Call | None = None
        self._given_up: ServiceError | None = None
        self._writing = asyncio.Lock()  # gRPC takes one write at a time; waiters go in order
        self._opened = asyncio.Event()
        self.identity = model_pb2.ModelIdentity()
        self.max_nodes = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._call is not None:
            self._call.cancel()

    async def open(self, sample: Sample, model: Model, policy: verifier_pb2.VerifyPolicy) -> None:
        """Begin; ServiceError if the verifier refuses or does not fit."""
        self._call = self._stub.Verify(timeout=self._timeout, metadata=request_id())  # type: ignore[call-arg, assignment]
        message = verifier_pb2.VerifyOpen(
            prompt_tokens=sample.prompt,
            generated_tokens=sample.generated,
            sampling=sampling_message(sample.sampling),
            rule=rule_message(sample.rule),
            contrast=sample.contrast,
            max_tokens=sample.max_tokens,
            end_tokens=sorted(sample.end_tokens),
            min_tokens=sample.min_tokens,
            logprobs=sample.logprobs,
            policy=policy,
            tenant=sample.tenant,
        )
        await self._write(verifier_pb2.VerifyRequest(open=message))
        response = await self._read(OPEN_SECONDS)
        if response is None or response.WhichOneof("message") != "opened":
            raise ProtocolError("verifier: the first message is not `opened`")
        self.identity, self.max_nodes = response.opened.identity, response.opened.max_nodes
        if self.identity.protocol_version != PROTOCOL_VERSION:
            raise ProtocolError(f"verifier: speaks protocol {self.identity.protocol_version}, not {PROTOCOL_VERSION}")
        if self.identity.tokenizer_fingerprint != model.tokenizer_fingerprint:
            raise ProtocolError(
                f"verifier: serves {self.identity.model!r} with another tokenizer than {model.name!r} has here"
            )
        self._opened.set()

    async def commits(self) -> AsyncIterator[verifier_pb2.Commit]:
        """Until the last one; PeerLostError if the stream ends before."""
        while True:
            response = await self._read(self._silence)
            if response is None:
                raise PeerLostError("verifier: the stream ended before the text did", "VERIFIER_LOST")
            if response.WhichOneof("message") == "commit":
                yield response.commit
                if response.commit.finish_reason:
                    return

    def give_up(self, error: ServiceError) -> None:
        """End the session: whoever reads it gets the error."""
        self._given_up = error
        if self._call is not None:
            self._call.cancel()

    async def extend(self, extend: model_pb2.Extend) -> None:
        """Candidates; they wait until the session is open."""
        await self._opened.wait()
        await self._write(verifier_pb2.VerifyRequest(extend=extend))

    async def policy(self, policy: verifier_pb2.VerifyPolicy) -> None:
        await self._opened.wait()
        await self._write(verifier_pb2.VerifyRequest(policy=policy))

    async def consumed(self, tokens: int) -> None:
        await self._write(verifier_pb2.VerifyRequest(consumed=verifier_pb2.Consumed(tokens=tokens)))

    async def _write(self, message: verifier_pb2.VerifyRequest) -> None:
        """A stream that is over is noticed, and explained, by reading it."""
        assert self._call is not None  # nothing is said before `open`
        async with self._writing:
            try:
                await self._call.write(message)
            except STREAM_IS_OVER:
                pass
            except asyncio.CancelledError:
                if self._given_up is None:
                    raise

    async def _read(self, seconds: float) -> verifier_pb2.VerifyResponse | None:
        assert self._call is not None
        try:
            async with asyncio.timeout(seconds):
                response = await self._call.read()
        except asyncio.CancelledError:
            if self._given_up is None:
                raise
            raise self._given_up from None
        except TimeoutError as error:
            raise PeerLostError(f"verifier: silent for {seconds:g} s", "VERIFIER_LOST") from error
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error, "verifier") from error
        return response if isinstance(response, verifier_pb2.VerifyResponse) else None


class DraftUnusableError(Exception):
    """The request runs undrafted; `reason` is what its statistics will say."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class DraftLink:
    """A session at the draft. Used as a context manager: leaving it ends the session."""

    def __init__(self, channel: grpc.aio.Channel, timeout: float | None, silence: float) -> None:
        self._silence = silence  # seconds; a peer says something every quarter of one
        self._opened = False
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        self._call: Call = stub.Draft(timeout=timeout, metadata=request_id())  # type: ignore[call-arg, assignment]
        self._writing = asyncio.Lock()  # gRPC takes one write at a time; waiters go in order

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call.cancel()

    async def open(self, sample: Sample, generated: list[int], model: Model, policy: draft_pb2.DraftPolicy) -> None:
        """Begin; DraftUnusableError if the draft refuses, is away, or does not fit."""
        message = draft_pb2.DraftOpen(
            prompt_tokens=sample.prompt,
            generated_tokens=generated,
            sampling=sampling_message(sample.sampling),
            rule=rule_message(sample.rule),
            contrast=sample.contrast,
            max_tokens=sample.max_tokens,
            end_tokens=sorted(sample.end_tokens),
            min_tokens=sample.min_tokens,
            policy=policy,
            vocabulary_size=model.vocabulary,
        )
        await self.send(draft_pb2.DraftRequest(open=message))
        response = await self._read(OPEN_SECONDS)
        if response is None or response.WhichOneof("message") != "opened":
            raise DraftUnusableError("no_draft", "the first message is not `opened`")
        identity = response.opened.identity
        if identity.protocol_version != PROTOCOL_VERSION:
            raise DraftUnusableError("no_draft", f"speaks protocol {identity.protocol_version}, not {PROTOCOL_VERSION}")
        if identity.tokenizer_fingerprint != model.tokenizer_fingerprint:
            raise DraftUnusableError(
                "tokenizer_mismatch", f"serves {identity.model!r}, whose tokenizer is not {model.name!r}'s"
            )

        self._opened = True

    async def extensions(self) -> AsyncIterator[model_pb2.Extend]:
        """Until the stream is closed; DraftUnusableError if it breaks."""
        while True:
            response = await self._read(self._silence)
            if response is None:
                raise DraftUnusableError("draft_lost", "the stream ended")
            if response.WhichOneof("message") == "extend":
                yield response.extend

    async def send(self, message: draft_pb2.DraftRequest) -> None:
        """A stream that is over is noticed, and explained, by reading it."""
        async with self._writing:
            with contextlib.suppress(*STREAM_IS_OVER):
                await self._call.write(message)

    async def _read(self, seconds: float) -> draft_pb2.DraftResponse | None:
        lost = "draft_lost" if self._opened else "no_draft"
        try:
            async with asyncio.timeout(seconds):
                response = await self._call.read()
        except TimeoutError as error:
            raise DraftUnusableError(lost, f"silent for {seconds:g} s") from error
        except grpc.aio.AioRpcError as error:
            raise DraftUnusableError(lost, f"{error.code().name}: {error.details()}") from error
        return response if isinstance(response, draft_pb2.DraftResponse) else None
