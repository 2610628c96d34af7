"""GenerationService: the service that backend applications call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc
from prometheus_client.metrics_core import Metric

from orchestrator.bounded_threads import BoundedThreads
from orchestrator.coalesce import Responses, coalesced
from orchestrator.generation import Generation
from orchestrator.grammar_check import GrammarCheck
from orchestrator.metrics import metrics
from orchestrator.model import Model
from orchestrator.peers import Peers
from orchestrator.readiness import VERIFIER, Readiness
from orchestrator.request import grammar_field, parse
from orchestrator.request_timeline import SampleTimeline, operation, record_parsed
from orchestrator.sample import Request
from orchestrator.stats import OrchestratorStats, pod_view
from orchestrator.tenants.account import Account
from orchestrator.tenants.accounts import Accounts
from orchestrator.tokenization import tokenize
from orchestrator.trace import OrchestratorTraceServicer
from specdec.serving.identity import pod_info
from specdec.serving.interceptor import Context
from specdec.serving.interleaved import interleaved
from specdec.serving.messages import grammar_from
from specdec.serving.timeline import Timeline, Timelines
from specdec.serving.validation import MAX_MESSAGE_BYTES
from specdec.v2 import generation_pb2, generation_pb2_grpc

SHORT_BYTES = 1 << 14
"""Bytes of a request whose prompt of tokens takes less than a millisecond to check."""

LONG_BYTES = 1 << 18
"""Bytes above which requests are parsed one after another: to tokenise a text of megabytes takes seconds, and hundreds
of megabytes of memory."""


PARSING_THREADS = 2
"""Threads for requests that are not as long. Each thread that tokenises has memory for it, which it keeps."""

MAX_WAITING_SHORT = 1024
MAX_WAITING_LONG = 16
"""Requests that may wait for a thread. Long ones are megabytes each."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    name = "specdec.v2.GenerationService"

    def __init__(
        self,
        model: Model,
        peers: Peers,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        accounts: Accounts | None = None,
        grammars: GrammarCheck | None = None,
    ) -> None:
        """Serve a model. `clock` tells when a request arrives, in UTC. Without `accounts`, anybody is served; without
        `grammars`, those of requests go to the pods untried."""
        self.max_request_bytes = min(MAX_MESSAGE_BYTES, model.most_request)
        self.gates = (self._check_caller,)
        self._accounts = accounts or Accounts()
        self._model = model
        self._peers = peers
        self._clock = clock
        self._grammars = grammars
        self._readiness = Readiness(peers, model)
        self._started = time.monotonic()
        self._stats = OrchestratorStats()
        self.timelines = Timelines()
        self._short = BoundedThreads("prompts", PARSING_THREADS, MAX_WAITING_SHORT)
        self._long = BoundedThreads("long prompts", 1, MAX_WAITING_LONG)

    async def start(self) -> None:
        """Begin to look for verifiers: until one is found, the service does not work."""
        await self._readiness.start()
        await self._accounts.start()

    @property
    def works(self) -> bool:
        """True from the first verifier that is found on, unless none was reachable for `failover_seconds`."""
        return self._readiness.ready

    @property
    def needs(self) -> Mapping[str, bool]:
        return {VERIFIER: self._readiness.reaches_verifier}

    def register(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)
        OrchestratorTraceServicer(self.timelines, self._peers).register(server)

    async def close(self) -> None:
        self._short.close()
        self._long.close()
        if self._grammars is not None:
            await self._grammars.close()
        await self._accounts.close()
        await self._readiness.close()
        await self._peers.close()

    async def Generate(  # type: ignore[override]
        self,
        request: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse],
    ) -> None:
        account = self._accounts.of(context)
        with self._request(request, account, streamed=True) as timeline:
            valid = await self._parse(request, account, timeline)
            account.spend_tokens(valid.prompt_tokens)
            first = True
            async with aclosing(self._responses(valid, context, timeline)) as responses:
                async for response in responses:
                    account.spend_tokens(len(response.tokens))
                    if first:
                        response.seed = valid.seed
                        first = False
                    await context.write(response)

    async def Complete(
        self,
        request: generation_pb2.CompleteRequest,
        context: grpc.aio.ServicerContext[generation_pb2.CompleteRequest, generation_pb2.CompleteResponse],
    ) -> generation_pb2.CompleteResponse:
        account = self._accounts.of(context)
        with self._request(request.request, account, streamed=False) as timeline:
            valid = await self._parse(request.request, account, timeline, streamed=False)
            account.spend_tokens(valid.prompt_tokens)
            answer = generation_pb2.CompleteResponse(seed=valid.seed)
            completions = [answer.completions.add() for _ in valid.samples]
            async with aclosing(self._responses(valid, context, timeline)) as responses:
                async for response in responses:
                    account.spend_tokens(len(response.tokens))
                    if response.HasField("resolved"):
                        answer.resolved.CopyFrom(response.resolved)
                    completion = completions[response.index]
                    completion.reasoning += response.reasoning
                    completion.reasoning_tokens += response.reasoning_tokens
                    completion.text += response.text
                    completion.tokens.extend(response.tokens)
                    completion.sources.extend(response.sources)
                    completion.logprobs.extend(response.logprobs)
                    if response.HasField("finish"):
                        completion.finish.CopyFrom(response.finish)
        return answer

    async def ListModels(
        self,
        request: generation_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[generation_pb2.ListModelsRequest, generation_pb2.ListModelsResponse],
    ) -> generation_pb2.ListModelsResponse:
        return generation_pb2.ListModelsResponse(models=[self._served])

    async def Tokenize(
        self,
        request: generation_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[generation_pb2.TokenizeRequest, generation_pb2.TokenizeResponse],
    ) -> generation_pb2.TokenizeResponse:
        threads = self._short if request.ByteSize() <= LONG_BYTES else self._long
        with self._accounts.of(context).request():
            return await threads.run(partial(tokenize, request, self._model))

    async def GetStats(
        self,
        request: generation_pb2.GenerationServiceGetStatsRequest,
        context: grpc.aio.ServicerContext[
            generation_pb2.GenerationServiceGetStatsRequest, generation_pb2.GenerationServiceGetStatsResponse
        ],
    ) -> generation_pb2.GenerationServiceGetStatsResponse:
        return self._told()

    def metrics(self) -> list[Metric]:
        return metrics(self._told(), self._stats, reaches_verifier=self._readiness.reaches_verifier)

    def _told(self) -> generation_pb2.GenerationServiceGetStatsResponse:
        stats, peers = self._stats, self._peers
        return generation_pb2.GenerationServiceGetStatsResponse(
            pod=pod_info(),
            up_us=int(1e6 * (time.monotonic() - self._started)),
            models=[self._served],
            running_requests=stats.running_requests,
            waiting_prompts=self._short.waiting + self._long.waiting,
            requests=stats.by_class.total(),
            failed_requests=stats.failed_by_reason,
            cancelled_requests=stats.cancelled,
            running_samples=stats.running_samples,
            ended_samples=stats.ended_samples,
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
            generated_tokens=stats.generated_tokens,
            steps=stats.steps,
            offered_candidates=stats.offered,
            accepted_candidates=stats.accepted,
            failover_events=stats.failover_events,
            verifiers=map(pod_view, peers.verifiers),
            drafts=map(pod_view, peers.drafts or ()),
            serving=self.works,
        )

    @property
    def _served(self) -> generation_pb2.ServedModel:
        """The model that is served, as ListModels tells it."""
        model = self._model
        return generation_pb2.ServedModel(
            name=model.name,
            context_tokens=model.context,
            vocabulary_size=model.vocabulary,
            chat=model.tokenizer.has_chat_template,
            text_fingerprint=model.text_fingerprint,
            tool_format="" if model.tool_format is None else model.tool_format.name,
            reasons=model.reasoning_marks is not None,
        )

    def _check_caller(self, method: str, context: Context) -> None:
        """Refuse calls of this service without a tenant's API key, and of others what concerns all tenants."""
        if method == f"/{self.name}/GetStats" or method.startswith(f"/{OrchestratorTraceServicer.name}/"):
            self._accounts.check_operator(context)
        elif method.startswith(f"/{self.name}/"):
            self._accounts.of(context)

    @contextmanager
    def _request(
        self, request: generation_pb2.GenerateRequest, account: Account, *, streamed: bool
    ) -> Iterator[Timeline]:
        """Count a request of an account, and record it unless there is no room for it."""
        with self._stats.request(account.tenant_class), account.request():
            self._peers.check_room(request.tenant if account.tenant is None else account.tenant.name)
            with self.timelines.begin(
                "generate", operation=operation(request), model=self._model.name, stream=streamed
            ) as timeline:
                yield timeline

    async def _parse(
        self,
        request: generation_pb2.GenerateRequest,
        account: Account,
        timeline: Timeline,
        *,
        streamed: bool = True,
    ) -> Request:
        """Parse a request: in a thread, since tokenising takes a while, or at once if its prompt is a few token ids."""
        size = request.ByteSize()
        drafts = self._peers.drafts is not None
        work = partial(
            parse,
            request,
            self._model,
            owner=account.tenant,
            untrusted_drafts=drafts and not self._peers.drafts_are_trusted,
            streamed=streamed,
            arrived=self._clock(),
        )
        if request.WhichOneof("prompt") == "tokens" and size <= SHORT_BYTES:
            parsed = work()
        else:
            parsed = await (self._short if size <= LONG_BYTES else self._long).run(work)
        message = parsed.samples[0].grammar
        if self._grammars is not None and message is not None and (grammar := grammar_from(message)) is not None:
            await self._grammars.check(grammar, grammar_field(request))
        record_parsed(timeline, parsed)
        return parsed

    def _responses(
        self, request: Request, context: grpc.aio.ServicerContext[Any, Any], timeline: Timeline
    ) -> Responses:
        """Return the responses of all samples as they come."""
        remaining = context.time_remaining()
        deadline = None if remaining is None else time.monotonic() + remaining
        several = len(request.samples) > 1
        recorded = [SampleTimeline(timeline, sample if several else None) for sample in request.samples]
        runs = [
            coalesced(Generation(sample, self._model, self._peers, deadline, self._stats, each).run())
            for sample, each in zip(request.samples, recorded, strict=True)
        ]
        return runs[0] if len(runs) == 1 else interleaved(runs)
