"""The orchestrator's end of a session at a draft."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from types import TracebackType

from orchestrator.generation.peer_stream import PeerStream
from orchestrator.generation.sample_context import SampleContext
from orchestrator.pods.fitness import check_fit
from orchestrator.pods.pods import Pod
from specdec.serving.messages import rule_message, sampling_message
from specdec.v2 import draft_pb2, draft_pb2_grpc, model_pb2


class DraftStream(PeerStream):
    """The stream of a session at a draft."""

    peer = "draft"

    def __init__(self, pod: Pod, context: SampleContext) -> None:
        super().__init__(pod, context)
        self.at_work = False  # it has sent candidates
        self._outgoing: asyncio.Queue[draft_pb2.DraftRequest] = asyncio.Queue()
        self._feeding: asyncio.Task[None] | None = None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._feeding is not None:
                self._feeding.cancel()
                await asyncio.wait([self._feeding])  # a plain await could not tell its cancellation from ours
        finally:
            await super().__aexit__(kind, error, trace)

    async def open(self, policy: draft_pb2.DraftPolicy) -> None:
        """Open the session with the text as it is now; UnfitError if the pod has another protocol or tokenizer."""
        sample = self._context.sample
        message = draft_pb2.DraftOpen(
            prompt_tokens=sample.prompt,
            generated_tokens=self._context.text.generated,
            sampling=sampling_message(sample.sampling),
            rule=rule_message(sample.rule),
            contrast=sample.contrast,
            max_tokens=sample.max_tokens,
            end_tokens=sorted(sample.end_tokens),
            min_tokens=sample.min_tokens,
            grammar=sample.grammar,
            policy=policy,
            vocabulary_size=self._context.model.vocabulary,
            tenant=sample.tenant,
            tenant_weight=sample.weight,
        )
        stub = draft_pb2_grpc.DraftServiceStub(self.pod.channel)
        opened: draft_pb2.DraftOpened = await self._begin(stub.Draft, draft_pb2.DraftRequest(open=message))
        check_fit(opened.identity, self._context.model, self.peer)
        self._context.granted.by_draft(opened)
        self.opened = True
        self._feeding = asyncio.create_task(self._feed())

    async def candidates(self) -> AsyncIterator[model_pb2.Extend]:
        """Yield messages of candidates until the session ends."""
        while True:
            response = await self._read()
            match response.WhichOneof("message"):
                case "extend":
                    self.at_work = True
                    self.pod.candidates_at = time.monotonic()
                    yield response.extend
                case "heartbeat" if response.heartbeat.HasField("capacity"):
                    self._count_heartbeat()
                    self.pod.load.report(response.heartbeat.capacity)
                case _:
                    self._count_heartbeat()

    def send(self, message: draft_pb2.DraftRequest) -> None:
        """Queue a message: a draft that does not read must not block the caller."""
        self._outgoing.put_nowait(message)

    async def _feed(self) -> None:
        while True:
            await self._write(await self._outgoing.get())
