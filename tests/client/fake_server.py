"""A real gRPC server around a fake, scripted GenerationService.

Its model writes one fixed text; the tokens are its UTF-8 bytes. Most tokens of non-ASCII parts therefore complete no
character, and errors in resuming inside a character become visible.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
from google.rpc.status_pb2 import Status
from grpc_status import rpc_status

from specdec.v2 import generation_pb2 as pb
from specdec.v2 import model_pb2, verifier_pb2
from specdec.v2.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server

TEXT = "déjà vu… ½ café, 東京 🦀"
TOKENS = list(TEXT.encode())
CHUNK = 3  # tokens per response
MODEL = "f1"  # fingerprint of its model
DIGEST = "d1"  # of every prompt
PROMPT = [11, 12]  # tokens of every prompt
REASONING = pb.Reasoning(opening_token=3, closing_token=4)  # of every chat
REVISION = "fake@r1"  # for every request
REJECTED = [
    model_pb2.RejectedCandidate(position=1, token=120, source=model_pb2.TOKEN_SOURCE_NGRAM, bytes=b"x"),
    model_pb2.RejectedCandidate(position=2, depth=1, token=121, source=model_pb2.TOKEN_SOURCE_NGRAM, bytes=b"y"),
]  # in the first response of every sample, if requested


@dataclass(frozen=True)
class Act:
    """The behavior of one call: it sends `tokens` tokens (None: all, and the finish), then does `then`."""

    tokens: int | None = None
    then: str = "end"  # "end", "abort" or "hold" (until the client cancels)
    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    details: str = "scripted"
    status: Status | None = None  # instead of code and details
    thinks: int = 0  # number of reasoning tokens
    prompt: int | None = None  # number of the prompt's tokens sent, if requested; None: all


def rich(code: int, *details: Any) -> Act:
    """Return an act that aborts with error details of google.rpc."""
    status = Status(code=code, message="refused")
    for detail in details:
        status.details.add().Pack(detail)
    return Act(tokens=0, then="abort", status=status)


@dataclass(frozen=True)
class Call:
    """What one call received."""

    request: pb.GenerateRequest
    seconds_left: float
    metadata: dict[str, Any]


class FakeServer(GenerationServiceServicer):
    """Serves on `port` (0: a free one) while its context lasts. Calls past the end of the script complete.
    ListModels has its own script, `listing`. With `keys`, calls without one of them are refused; `options` are
    gRPC's."""

    def __init__(
        self,
        *acts: Act,
        script: Iterable[Act] = (),
        listing: Iterable[Act] = (),
        port: int = 0,
        keys: Collection[str] | None = None,
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        self._script = iter(acts or script)
        self._listing = iter(listing)
        self.keys = keys
        self.aliases: Sequence[str] = ()  # of the model "fake"
        self.refused_peers: list[str] = []  # one entry for each call without a known key
        self.calls: list[Call] = []
        self.listings: list[Call] = []
        self.tokenized: list[pb.TokenizeRequest] = []
        self.stats = pb.GenerationServiceGetStatsResponse()
        self.stats_requests: list[pb.GenerationServiceGetStatsRequest] = []
        self.called = asyncio.Event()
        self.held = asyncio.Event()  # a call has sent its tokens and holds
        self.freed = asyncio.Event()  # a handler has ended; a holding handler ends only when cancelled
        self.port = port
        self.server = grpc.aio.server(options=options)

    async def __aenter__(self) -> Self:
        add_GenerationServiceServicer_to_server(self, self.server)
        self.port = self.server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def refusals(self) -> int:
        return len(self.refused_peers)

    async def stop(self) -> None:
        """Abort all calls, like a server at shutdown."""
        await self.server.stop(grace=0)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        act = await self._begin(request, context)
        try:
            for index in range(max(1, request.n)):
                drawn_seed = 1000 + len(self.calls)
                scored = act.prompt if index == 0 else 0
                for response in responses(request, index, act.tokens, drawn_seed, thinks=act.thinks, prompt=scored):
                    yield response
            await self._play_end(act, context)
        finally:
            self.freed.set()

    async def Complete(self, request: pb.CompleteRequest, context: Any) -> pb.CompleteResponse:
        try:
            await self._play_end(await self._begin(request.request, context), context)
        finally:
            self.freed.set()
        answer = pb.CompleteResponse(
            seed=request.request.sampling.seed, prompt=prompt_of(request.request) if scored(request.request) else ()
        )
        for index in range(max(1, request.request.n)):
            parts = list(responses(request.request, index, None, drawn_seed=0))
            answer.completions.add(
                text="".join(part.text for part in parts),
                tokens=[token for part in parts for token in part.tokens],
                sources=[source for part in parts for source in part.sources],
                logprobs=[logprobs for part in parts for logprobs in part.logprobs],
                finish=parts[-1].finish,
            )
        return answer

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        await self._check_key(context)
        self.listings.append(Call(pb.GenerateRequest(), context.time_remaining(), dict(context.invocation_metadata())))
        await self._play_end(next(self._listing, Act()), context)
        return pb.ListModelsResponse(
            models=[
                pb.ServedModel(
                    name="fake",
                    context_tokens=1024,
                    vocabulary_size=256,
                    chat=True,
                    text_fingerprint="t1",
                    aliases=self.aliases,
                )
            ]
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Return the text's bytes as tokens, after a special token 0."""
        self.tokenized.append(request)
        await self._play_end(
            await self._begin(pb.GenerateRequest(text=request.text, model=request.model), context), context
        )
        ids = [*([] if request.HasField("add_special") and not request.add_special else [0]), *request.text.encode()]
        text = ""
        if request.HasField("tokens"):
            ids = list(request.tokens.ids)
            text = bytes(ids).decode() if request.text_of_tokens else ""
        pieces = [pb.TokenPiece(text=bytes([each]).decode(errors="replace"), bytes=bytes([each])) for each in ids]
        return pb.TokenizeResponse(
            ids=ids, pieces=pieces if request.pieces else [], count=len(ids), context_tokens=1024, text=text
        )

    async def GetStats(
        self, request: pb.GenerationServiceGetStatsRequest, context: Any
    ) -> pb.GenerationServiceGetStatsResponse:
        await self._check_key(context)
        self.stats_requests.append(request)
        return self.stats

    async def _check_key(self, context: Any) -> None:
        known = None if self.keys is None else [f"Bearer {key}" for key in self.keys]
        if known is not None and dict(context.invocation_metadata()).get("authorization") not in known:
            self.refused_peers.append(context.peer())
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "authorization: unknown API key")

    async def _begin(self, request: pb.GenerateRequest, context: Any) -> Act:
        await self._check_key(context)
        self.called.set()
        self.calls.append(Call(request, context.time_remaining(), dict(context.invocation_metadata())))
        return next(self._script, Act())

    async def _play_end(self, act: Act, context: Any) -> None:
        if act.then == "hold":
            self.held.set()
            await asyncio.Event().wait()
        elif act.then == "abort" and act.status is not None:
            await context.abort_with_status(rpc_status.to_status(act.status))
        elif act.then == "abort":
            await context.abort(act.code, act.details)


def scored(request: pb.GenerateRequest) -> bool:
    return request.HasField("prompt_logprobs")


def prompt_of(request: pb.GenerateRequest) -> list[pb.PromptToken]:
    """Return the tokens of a prompt; a text has the tokens of `Tokenize`. Token k has the log-probability -k / 8."""
    ids = list(request.tokens.ids) or [0, *request.text.encode()]
    found = [pb.PromptToken(token=token, bytes=bytes([token])) for token in ids]
    for at, entry in enumerate(found[1:], 1):
        entry.logprobs.chosen, entry.logprobs.rank = -at / 8, 3
        entry.logprobs.top_tokens[:] = range(97, 97 + request.prompt_logprobs)
        entry.logprobs.top_logprobs[:] = [-0.125 * (1 + best) for best in range(request.prompt_logprobs)]
        entry.logprobs.top_bytes[:] = [bytes([token]) for token in entry.logprobs.top_tokens]
    return found


def resolved_of(request: pb.GenerateRequest) -> pb.ResolvedRequest:
    """Return the server's values for fields that a request leaves unset."""
    most = request.max_tokens if request.HasField("max_tokens") else 1000
    sampling = pb.SamplingParameters(temperature=request.sampling.temperature)
    return pb.ResolvedRequest(
        sampling=sampling,
        max_tokens=most,
        end_tokens=[2],
        prompt_digest=DIGEST,
        prompt_tokens=len(PROMPT),
        model=REVISION,
        reasoning=REASONING if request.HasField("chat") else None,
    )


def responses(
    request: pb.GenerateRequest,
    index: int,
    most: int | None,
    drawn_seed: int,
    *,
    thinks: int = 0,
    prompt: int | None = None,
) -> Iterable[pb.GenerateResponse]:
    """Yield the responses of a conforming server; the first `thinks` tokens are reasoning. The first `prompt` tokens of
    the prompt are scored (None: all), if requested."""
    first = pb.GenerateResponse()
    if index == 0:
        first.seed = request.sampling.seed if request.sampling.HasField("seed") else drawn_seed
        first.model_fingerprint = MODEL
        first.resolved.CopyFrom(resolved_of(request))
    if index == 0 and scored(request):
        told = prompt_of(request)[:prompt]
        for at in range(0, len(told), CHUNK):
            response = pb.GenerateResponse(prompt=told[at : at + CHUNK])
            response.MergeFrom(first)
            first.Clear()
            yield response
        if prompt is not None:
            return
    decoder = codecs.getincrementaldecoder("utf-8")()
    decoder.decode(bytes(request.generated_tokens))  # the client has this text already
    begin = len(request.generated_tokens)
    end = len(TOKENS) if most is None else min(begin + most, len(TOKENS))
    if request.HasField("max_tokens") and not request.max_tokens:
        end = begin
    for at in range(begin, end, CHUNK):
        tokens = TOKENS[at : min(at + CHUNK, end)]
        texts = [decoder.decode(bytes([token])) for token in tokens]
        reasoning = max(0, min(thinks - at, len(tokens)))
        response = pb.GenerateResponse(
            index=index,
            reasoning="".join(texts[:reasoning]),
            reasoning_tokens=reasoning,
            text="".join(texts[reasoning:]),
            token_texts=texts,
            tokens=tokens,
            sources=[model_pb2.TOKEN_SOURCE_REMOTE_DRAFT] * (len(tokens) - 1) + [model_pb2.TOKEN_SOURCE_BONUS],
            timings=pb.ChunkTimings(elapsed_us=1000 * (at - begin + 1), forward_us=200, step_us=300),
            steps=1,
            offered=CHUNK,
        )
        if request.HasField("logprobs"):
            for token in tokens:
                response.logprobs.append(
                    verifier_pb2.TokenLogprobs(
                        chosen=-0.5,
                        top_tokens=[token, 7],
                        top_logprobs=[-0.5, -2.0],
                        chosen_bytes=bytes([token]),
                        top_bytes=[bytes([token]), b"\7"],
                    )
                )
        if at == begin:
            response.MergeFrom(first)
            if request.rejected_candidates:
                response.rejected.extend(REJECTED)
            if index == 0 and request.return_prompt_token_ids:
                response.prompt_token_ids[:] = PROMPT
        yield response
    if most is None:
        steps = -(-(end - begin) // CHUNK)
        histogram = [0] * CHUNK
        for at in range(begin, end, CHUNK):
            histogram[min(CHUNK, end - at) - 1] += 1
        yield pb.GenerateResponse(
            index=index,
            finish=pb.Finish(
                reason=model_pb2.FINISH_REASON_LENGTH,
                usage=pb.Usage(prompt_tokens=len(PROMPT), completion_tokens=end, cached_tokens=1),
                speculation=pb.SpeculationStatistics(
                    steps=steps,
                    offered=CHUNK * steps,
                    accepted=end - begin - steps,
                    accepted_histogram=histogram,
                    sources={"remote_draft": end - begin - steps, "bonus": steps},
                ),
                numerics_fingerprint="fake/float32",
                numerics_mode=model_pb2.NUMERICS_MODE_EXACT,
                preemptions=3,
                reproducible=True,
            ),
        )
