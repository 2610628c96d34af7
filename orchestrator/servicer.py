"""GenerationService: the service for backend applications."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import grpc
from prometheus_client.metrics_core import Metric

from orchestrator.generation.generation import Generation
from orchestrator.metrics import metrics
from orchestrator.models.catalog import Catalog
from orchestrator.models.revision import Revision
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pod
from orchestrator.pods.prefix_routing import PrefixAnswers
from orchestrator.pods.readiness import VERIFIER
from orchestrator.requests.parsing import MAX_SAMPLES, parse
from orchestrator.requests.sample import Request
from orchestrator.requests.tokenization import tokenize
from orchestrator.stats_response import PodStatsCache, PodViews, peers_of, served_models, stats_response
from orchestrator.tenants.accounts import Account, Accounts
from orchestrator.text.request_timeline import SampleTimeline, operation, record_parsed
from orchestrator.text.responses import CompleteAnswer, Responses, coalesced
from orchestrator.trace import OrchestratorTraceServicer
from orchestrator.workers import Siblings
from specdec.serving.bounded_threads import BoundedThreads
from specdec.serving.errors import ServiceError
from specdec.serving.interceptor import Metadata
from specdec.serving.interleaved import interleaved
from specdec.serving.messages import grammar_from
from specdec.serving.timeline import Timeline, Timelines
from specdec.serving.tracing.servicer import TraceServicer
from specdec.serving.validation import MAX_MESSAGE_BYTES
from specdec.v2 import generation_pb2, generation_pb2_grpc
from specdec.wire.request_metadata import prompts_in

SHORT_BYTES = 1 << 14
"""Size in bytes below which a request with token ids is parsed on the event loop: checking it takes less than a
millisecond."""

LONG_BYTES = 1 << 18
"""Size in bytes above which requests are parsed one at a time: tokenising megabytes of text takes seconds, and hundreds
of megabytes of memory."""


PARSING_THREADS = 2
"""Threads for shorter requests. A tokenising thread allocates memory, and never frees it."""

MAX_WAITING_SHORT = 1024
MAX_WAITING_LONG = 16
"""Limits on requests waiting for a thread. Long ones take megabytes each."""


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    name = "specdec.v2.GenerationService"
    connection_seconds = 300.0

    def __init__(
        self,
        catalog: Catalog,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
        accounts: Accounts | None = None,
        siblings: Siblings | None = None,
    ) -> None:
        """Serve the models of a catalog. `clock` returns the time in UTC. Without `accounts`, callers need no key.
        `siblings` are the other workers at this address, if there are any."""
        self.gates = (self._check_caller,)
        self._accounts = accounts or Accounts()
        self._catalog = catalog
        self._clock = clock
        self._siblings = siblings
        self._started = time.monotonic()
        self.timelines = Timelines()
        self._pod_stats = PodStatsCache()
        self._short = BoundedThreads("prompts", PARSING_THREADS, MAX_WAITING_SHORT)
        self._long = BoundedThreads("long prompts", 1, MAX_WAITING_LONG)

    async def start(self) -> None:
        """Start looking for verifiers: `works` is False until one is found."""
        await self._catalog.start()
        await self._accounts.start()
        if self._siblings is not None:
            await self._siblings.start(TraceServicer("orchestrator", self.timelines))

    @property
    def max_request_bytes(self) -> int:
        return min(MAX_MESSAGE_BYTES, self._catalog.max_request_bytes)

    @property
    def works(self) -> bool:
        return any(revision.ready for revision in self._catalog)

    @property
    def needs(self) -> Mapping[str, bool]:
        return {VERIFIER: any(revision.readiness.reaches_verifier for revision in self._catalog)}

    def register(self, server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)
        OrchestratorTraceServicer(self.timelines, self._pods, self._siblings).register(server)

    async def close(self) -> None:
        self._short.close()
        self._long.close()
        if self._siblings is not None:
            await self._siblings.close()
        await self._accounts.close()
        await self._catalog.close()

    async def Generate(  # type: ignore[override]
        self,
        request: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse],
    ) -> None:
        async with self._answered(request, context, streamed=True) as (account, valid, responses):
            first = True
            async for response in responses:
                account.spend_tokens(len(response.tokens))
                if first:
                    response.seed = valid.seed
                    if request.return_prompt_token_ids:
                        response.prompt_token_ids[:] = valid.samples[0].prompt
                    first = False
                await context.write(response)

    async def Complete(
        self,
        request: generation_pb2.CompleteRequest,
        context: grpc.aio.ServicerContext[generation_pb2.CompleteRequest, generation_pb2.CompleteResponse],
    ) -> generation_pb2.CompleteResponse:
        async with self._answered(request.request, context, streamed=False) as (account, valid, responses):
            answer = CompleteAnswer(valid.seed, len(valid.samples))
            async for response in responses:
                account.spend_tokens(len(response.tokens))
                answer.add(response)
        message = answer.message()
        if request.request.return_prompt_token_ids:
            message.prompt_token_ids[:] = valid.samples[0].prompt
        return message

    async def ListModels(
        self,
        request: generation_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[generation_pb2.ListModelsRequest, generation_pb2.ListModelsResponse],
    ) -> generation_pb2.ListModelsResponse:
        return generation_pb2.ListModelsResponse(models=served_models(self._catalog))

    async def Tokenize(
        self,
        request: generation_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[generation_pb2.TokenizeRequest, generation_pb2.TokenizeResponse],
    ) -> generation_pb2.TokenizeResponse:
        threads = self._short if request.ByteSize() <= LONG_BYTES else self._long
        account = self._accounts.of(context.invocation_metadata() or ())
        with account.request():
            work = partial(tokenize, request, self._catalog.main(request.model).model)
            return await threads.run(work, account.name_of(""))

    async def GetStats(
        self,
        request: generation_pb2.GenerationServiceGetStatsRequest,
        context: grpc.aio.ServicerContext[
            generation_pb2.GenerationServiceGetStatsRequest, generation_pb2.GenerationServiceGetStatsResponse
        ],
    ) -> generation_pb2.GenerationServiceGetStatsResponse:
        response, views = self._stats()
        if request.pods:
            await self._pod_stats.enter(views)
        return response

    def metrics(self) -> list[Metric]:
        reached = {revision.key: revision.readiness.reaches_verifier for revision in self._catalog}
        return metrics(self._stats()[0], self._catalog.counts(), reached)

    def _stats(self) -> tuple[generation_pb2.GenerationServiceGetStatsResponse, PodViews]:
        return stats_response(
            self._catalog,
            up_seconds=time.monotonic() - self._started,
            serving=self.works,
            waiting_prompts=self._short.waiting + self._long.waiting,
        )

    def _pods(self) -> Iterator[Pod]:
        return (peer.pod for peer in peers_of(self._catalog))

    def _check_caller(self, method: str, metadata: Metadata) -> None:
        """Require an operator's API key for statistics and traces, and a tenant's for all other calls of this
        service."""
        if method == f"/{self.name}/GetStats" or method.startswith(f"/{OrchestratorTraceServicer.name}/"):
            self._accounts.check_operator(metadata)
        elif method.startswith(f"/{self.name}/"):
            self._accounts.of(metadata)

    @asynccontextmanager
    async def _answered(
        self, request: generation_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any], *, streamed: bool
    ) -> AsyncIterator[tuple[Account, Request, Responses]]:
        """Choose the revision for a request, count and parse the request, and record its timeline unless it is refused
        at a tenant's limit or for lack of room. Yield the caller's account, the parsed request and its responses. A
        context, not a generator of responses: errors and cancellations of the caller are counted too.

        The peers of a revision may change later; the request keeps the current ones."""
        metadata = context.invocation_metadata() or ()
        account = self._accounts.of(metadata)
        recorded = partial(self.timelines.begin, "generate", operation=operation(request), stream=streamed)
        try:
            revision = self._catalog.choose(request)
        except ServiceError:
            with self._catalog.refused.request(account.tenant_class), account.request(), recorded(model=""):
                raise
        peers = revision.peers
        samples = max(1, min(request.n, MAX_SAMPLES))  # a larger n is refused later, with the request's other faults
        with revision.request(account.tenant_class), account.request(samples, prompts_in(metadata)):
            peers.check_room(account.name_of(request.tenant))
            with recorded(model=revision.asked_as or revision.model.name) as timeline:
                valid = await self._parse(request, revision, peers, account, timeline, streamed=streamed)
                account.spend_tokens(valid.given_tokens)
                async with aclosing(self._responses(valid, revision, peers, context, timeline)) as responses:
                    yield account, valid, responses

    async def _parse(
        self,
        request: generation_pb2.GenerateRequest,
        revision: Revision,
        peers: Peers,
        account: Account,
        timeline: Timeline,
        *,
        streamed: bool,
    ) -> Request:
        """Parse a request, and check its grammar. A few token ids without a grammar are parsed on the event loop, all
        else in a thread, since tokenising a prompt or rewriting a schema takes a while."""
        size = request.ByteSize()
        tenant = account.name_of(request.tenant)
        work = partial(
            parse,
            request,
            revision.model,
            owner=account.tenant,
            untrusted_drafts=peers.drafts is not None and not peers.drafts_are_trusted,
            streamed=streamed,
            arrived=self._clock(),
        )
        plain = request.WhichOneof("prompt") == "tokens" and not (request.json_schema or request.HasField("grammar"))
        excluding = request.sampling.allowed_tokens or request.sampling.bad_words  # takes milliseconds
        if plain and size <= SHORT_BYTES and not excluding:
            parsed = work()
        else:
            parsed = await (self._short if size <= LONG_BYTES else self._long).run(work, tenant)
        sample, grammars = parsed.samples[0], revision.grammars
        if (
            grammars is not None
            and sample.grammar is not None
            and (grammar := grammar_from(sample.grammar)) is not None
        ):
            await grammars.check(grammar, sample.grammar_field, tenant)
        record_parsed(timeline, parsed)
        return parsed

    def _responses(
        self,
        request: Request,
        revision: Revision,
        peers: Peers,
        context: grpc.aio.ServicerContext[Any, Any],
        timeline: Timeline,
    ) -> Responses:
        """Return the responses of all samples, interleaved as they arrive."""
        remaining = context.time_remaining()
        deadline = None if remaining is None else time.monotonic() + remaining
        several = len(request.samples) > 1
        counts = revision.stats.failover_events
        recorded = [SampleTimeline(timeline, counts, sample if several else None) for sample in request.samples]
        prefixes = PrefixAnswers()
        runs = [
            coalesced(Generation(sample, revision, peers, deadline, sample_timeline, prefixes).run())
            for sample, sample_timeline in zip(request.samples, recorded, strict=True)
        ]
        return runs[0] if len(runs) == 1 else interleaved(runs)
