"""A server's answers as plain values: chunks of a stream, whole completions, models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from specdec.v2 import generation_pb2 as pb
from specdec.v2 import model_pb2, verifier_pb2
from specdec.wire.decisions import explained, main_mode
from specdec.wire.sources import source_name


@dataclass(frozen=True)
class Piece:
    """Text and bytes of a token."""

    text: str  # an incomplete character becomes U+FFFD
    bytes: bytes


@dataclass(frozen=True)
class Logprobs:
    """Log-probabilities at one position, of the target's distribution before temperature and truncation."""

    chosen: float
    top: dict[int, float]  # of the most probable tokens, by id, best first
    piece: Piece  # of the chosen token
    top_pieces: dict[int, Piece]  # of the most probable tokens, by id, best first
    rank: int = 0  # for a prompt token: 1 plus the number of more probable tokens


@dataclass(frozen=True)
class PromptToken:
    """A token of the prompt."""

    token: int
    piece: Piece
    logprobs: Logprobs | None  # at its position, given the tokens before it; None for the first token


@dataclass(frozen=True)
class Rejected:
    """A candidate that was verified and rejected."""

    position: int  # number of generated tokens before it
    depth: int  # rejected candidates above it; 0: another token was committed in its place
    token: int
    piece: Piece
    source: str  # its source, as in `Chunk.sources`


@dataclass(frozen=True)
class SpeculationLimits:
    """Limits of speculation; None: not requested."""

    max_candidates: int | None
    max_depth: int | None
    max_branches: int | None
    max_nodes: int | None


@dataclass(frozen=True)
class SpeculationDecisions:
    """The decisions on the number of candidates per step of a completion. Empty if the server reports none."""

    mode: str  # adaptive speculation's mode in most steps: "off", "ngram", "local_draft", "heads", ..., or "forced"
    why: str  # one line for people: modes, steps with candidates, and why the others had none
    modes: dict[str, int]  # steps by mode
    without: dict[str, int]  # steps without candidates by reason: "row_cost", "plain_faster", "nothing_proposed", ...
    row_seconds: float  # mean over the "row_cost" steps: seconds that one more row adds to a step
    break_even: float  # mean over the same steps: tokens that this row must yield to pay
    best_candidate: float  # mean over the same steps: expected tokens of the best candidate
    mode_rates: dict[str, float]  # tokens a second by mode, as last measured by the verifier


@dataclass(frozen=True)
class Speculation:
    """Statistics of speculation for one completion. For an interrupted part, only the received chunks count."""

    steps: int  # target steps that committed tokens
    offered: int  # candidates verified
    accepted: int  # candidates accepted
    overrun: int  # tokens computed past a stop string and dropped
    accepted_histogram: list[int]  # entry i counts the steps with i candidates accepted
    undrafted_reason: str  # why draft candidates were missing; set if `undrafted_tokens` is not 0
    undrafted_tokens: int  # tokens of steps that lacked the candidates expected from a draft service
    sources: dict[str, int]  # number of tokens by source
    failover_events: dict[str, int]  # count by reason; "resumed": resumptions of the stream by the client
    granted: SpeculationLimits  # the request's limits as granted by pods
    decisions: SpeculationDecisions  # excluding interrupted parts

    @property
    def mean_tokens_per_step(self) -> float:
        """Tokens of this completion per target step; 0 without steps."""
        return sum(self.sources.values()) / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class SchemaCheck:
    """The outcome of checking the finished text against the parts of its JSON schema that no grammar enforces."""

    ok: bool | None  # whether the text is valid; None: no complete JSON value, or too large to check
    path: str  # JSON pointer to the invalid part of the value
    keyword: str  # keyword of the schema that this part violates


@dataclass(frozen=True)
class Finish:
    """How a completion ended."""

    reason: str  # "stop", "length" or "context"
    stop: str  # the stop string that ended it, or empty
    prompt_tokens: int
    completion_tokens: int  # including resumed ones
    speculation: Speculation
    numerics: str  # numerics fingerprint: equal ones give equal bits
    exact: bool  # True: the tokens do not depend on other texts in their steps
    preemptions: int  # times the text was preempted and recomputed
    cached_tokens: int  # tokens of the prompt found in the KV cache
    reproducible: bool  # True: repeating the request gives the same tokens
    reasoning_tokens: int  # part of `completion_tokens`
    schema_check: SchemaCheck | None = None  # None: the grammar enforces all of the schema, or there is none
    kept_for_learning: bool = False  # True: a draft service keeps the text to learn from it; if resumed, perhaps a part


@dataclass(frozen=True)
class ReasoningPosition:
    """The position of a text's reasoning."""

    opening_token: int  # the opening mark; unless `begun`, only a text that begins with it has reasoning
    closing_token: int  # the closing mark
    begun: bool  # True: the prompt ends inside the reasoning


@dataclass(frozen=True)
class Resolved:
    """The request with all defaults resolved by the server."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    typical_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    max_tokens: int
    end_tokens: list[int]  # all end tokens: the model's, unless ignored, and the request's
    prompt_digest: str  # of the prompt's tokens
    time: datetime | None  # current time passed to the chat template; None without one
    model: str = ""  # the revision serving the request, as NAME@REVISION; empty if the model has no named revisions
    prompt_tokens: int = 0  # tokens of the prompt; 0 from an older server
    # name in `specdec.wire.tool_formats` of the format of tool calls; empty without tools, or from an older server
    tool_format: str = ""
    reasoning: ReasoningPosition | None = None  # None: the whole text is the answer


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream. The last chunk of each sample has `finish`."""

    index: int  # which of the n samples
    text: str  # without a chat's reasoning; empty while a character is incomplete
    tokens: list[int]
    token_texts: list[str]  # for each token, the part of `reasoning`, then `text`, that it completes
    # "remote_draft", "local_model", "heads", "ngram", "lookahead", "grammar", "correction", "bonus", "plain"
    sources: list[str]
    logprobs: list[Logprobs]  # of each token, if requested
    elapsed_seconds: float  # since the request arrived, pauses included
    forward_seconds: float  # of the target's forward pass
    step_seconds: float  # of the whole verification step
    steps: int  # target steps for these tokens
    offered: int  # candidates verified in them
    finish: Finish | None
    seed: int | None  # of the request; in the first chunk
    model_fingerprint: str  # of the generating model; empty after the first chunk
    resolved: Resolved | None  # the request with defaults resolved; in the first chunk of each sample
    rejected: tuple[Rejected, ...] = ()  # if requested; the candidates of one step are in preorder
    reasoning: str = ""  # of a chat
    reasoning_tokens: int = 0  # number of leading `tokens` that are reasoning
    prompt: Sequence[PromptToken] = ()  # next tokens of the prompt, if requested; only in chunks of sample 0
    prompt_token_ids: list[int] | None = None  # if requested; in the first chunk


@dataclass(frozen=True)
class Completion:
    """One whole sample."""

    text: str
    tokens: list[int]
    sources: list[str]  # of each token, as in Chunk
    logprobs: list[Logprobs]  # of each token, if requested
    finish: Finish
    rejected: tuple[Rejected, ...] = ()  # candidates, as in Chunk
    reasoning: str = ""  # of a chat
    reasoning_tokens: int = 0  # number of leading `tokens` that are reasoning


@dataclass(frozen=True)
class Result:
    """The result of `complete`: a completion for each sample, in order."""

    completions: list[Completion]
    seed: int
    resolved: Resolved  # the request with defaults resolved
    request_id: str = ""  # in logs and traces of the services
    prompt: Sequence[PromptToken] = ()  # the tokens of the prompt, if requested
    prompt_token_ids: list[int] | None = None  # if requested

    @property
    def text(self) -> str:
        """The text of the first sample."""
        return self.completions[0].text


@dataclass(frozen=True)
class Model:
    """A model available to requests."""

    name: str
    context_tokens: int  # longest text, prompt included
    vocabulary_size: int
    chat: bool  # True: accepts `messages`
    text_fingerprint: str  # models with equal ones tokenize requests identically
    tool_format: str = ""  # name in `specdec.wire.tool_formats`; empty: the model takes no tools
    reasons: bool = False  # True: chats may contain reasoning
    revisions: tuple[str, ...] = ()  # selectable as NAME@REVISION; the fields above describe the main one
    aliases: tuple[str, ...] = ()  # further names, equivalent to `name` in requests

    def is_asked_as(self, name: str) -> bool:
        """Return True if a request for this name gets this model, in any revision."""
        return name in (self.name, *self.aliases, *(f"{self.name}@{revision}" for revision in self.revisions))


# Values unknown to this client, from a newer server, become "unspecified".
_REASONS = {number: name.removeprefix("FINISH_REASON_").lower() for name, number in model_pb2.FinishReason.items()}


def read_chunk(response: pb.GenerateResponse, *, before_seconds: float = 0.0) -> Chunk:
    """Convert a response into a chunk. `before_seconds`: time from the start of the stream until its current server
    received the request."""
    return Chunk(
        index=response.index,
        text=response.text,
        tokens=list(response.tokens),
        token_texts=list(response.token_texts),
        sources=list(map(source_name, response.sources)),
        logprobs=[_read_logprobs(logprobs) for logprobs in response.logprobs],
        elapsed_seconds=before_seconds + response.timings.elapsed_us / 1e6,
        forward_seconds=response.timings.forward_us / 1e6,
        step_seconds=response.timings.step_us / 1e6,
        steps=response.steps,
        offered=response.offered,
        finish=_read_finish(response.finish) if response.HasField("finish") else None,
        seed=response.seed if response.HasField("seed") else None,
        model_fingerprint=response.model_fingerprint,
        resolved=_read_resolved(response.resolved) if response.HasField("resolved") else None,
        rejected=_read_rejected(response.rejected),
        reasoning=response.reasoning,
        reasoning_tokens=response.reasoning_tokens,
        prompt=list(map(_read_prompt_token, response.prompt)),
        prompt_token_ids=list(response.prompt_token_ids) or None,
    )


def read_result(response: pb.CompleteResponse) -> Result:
    """Convert the answer of `Complete`."""
    completions = [
        Completion(
            text=completion.text,
            tokens=list(completion.tokens),
            sources=list(map(source_name, completion.sources)),
            logprobs=[_read_logprobs(logprobs) for logprobs in completion.logprobs],
            finish=_read_finish(completion.finish),
            rejected=_read_rejected(completion.rejected),
            reasoning=completion.reasoning,
            reasoning_tokens=completion.reasoning_tokens,
        )
        for completion in response.completions
    ]
    return Result(
        completions,
        response.seed,
        _read_resolved(response.resolved),
        prompt=list(map(_read_prompt_token, response.prompt)),
        prompt_token_ids=list(response.prompt_token_ids) or None,
    )


def read_models(response: pb.ListModelsResponse) -> list[Model]:
    """Convert the answer of `ListModels`."""
    return [
        Model(
            m.name,
            m.context_tokens,
            m.vocabulary_size,
            m.chat,
            m.text_fingerprint,
            m.tool_format,
            m.reasons,
            tuple(m.revisions),
            tuple(m.aliases),
        )
        for m in response.models
    ]


def _read_rejected(rejected: Sequence[model_pb2.RejectedCandidate]) -> tuple[Rejected, ...]:
    return tuple(Rejected(r.position, r.depth, r.token, _piece(r.bytes), source_name(r.source)) for r in rejected)


def _read_finish(finish: pb.Finish) -> Finish:
    statistics = finish.speculation
    return Finish(
        reason=_REASONS.get(finish.reason, "unspecified"),
        stop=finish.stop,
        prompt_tokens=finish.usage.prompt_tokens,
        completion_tokens=finish.usage.completion_tokens,
        speculation=Speculation(
            steps=statistics.steps,
            offered=statistics.offered,
            accepted=statistics.accepted,
            overrun=statistics.overrun,
            accepted_histogram=list(statistics.accepted_histogram),
            undrafted_reason=statistics.undrafted_reason,
            undrafted_tokens=statistics.undrafted_tokens,
            sources=dict(statistics.sources),
            failover_events=dict(statistics.failover_events),
            granted=_read_limits(statistics.granted),
            decisions=_read_decisions(statistics.decisions),
        ),
        numerics=finish.numerics_fingerprint,
        exact=finish.numerics_mode == model_pb2.NUMERICS_MODE_EXACT,
        preemptions=finish.preemptions,
        cached_tokens=finish.usage.cached_tokens,
        reproducible=finish.reproducible,
        reasoning_tokens=finish.usage.reasoning_tokens,
        schema_check=_read_check(finish.schema_check) if finish.HasField("schema_check") else None,
        kept_for_learning=finish.kept_for_learning,
    )


def _read_check(check: pb.SchemaCheck) -> SchemaCheck:
    return SchemaCheck(check.ok if check.HasField("ok") else None, check.path, check.keyword)


def _read_decisions(decisions: model_pb2.SpeculationDecisions) -> SpeculationDecisions:
    return SpeculationDecisions(
        mode=main_mode(decisions),
        why=explained(decisions),
        modes=dict(decisions.modes),
        without=dict(decisions.without),
        row_seconds=decisions.row_us / 1e6,
        break_even=decisions.break_even,
        best_candidate=decisions.best_candidate,
        mode_rates=dict(decisions.mode_rates),
    )


def _read_limits(limits: pb.SpeculationLimits) -> SpeculationLimits:
    return SpeculationLimits(
        max_candidates=limits.max_candidates if limits.HasField("max_candidates") else None,
        max_depth=limits.max_depth if limits.HasField("max_depth") else None,
        max_branches=limits.max_branches if limits.HasField("max_branches") else None,
        max_nodes=limits.max_nodes if limits.HasField("max_nodes") else None,
    )


def _read_resolved(resolved: pb.ResolvedRequest) -> Resolved:
    """Convert the resolved request; ValueError for a timestamp outside datetime's range."""
    sampling = resolved.sampling
    return Resolved(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        typical_p=sampling.typical_p or 1.0,  # unset by an older server
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        max_tokens=resolved.max_tokens,
        end_tokens=list(resolved.end_tokens),
        prompt_digest=resolved.prompt_digest,
        time=resolved.time.ToDatetime(UTC) if resolved.HasField("time") else None,
        model=resolved.model,
        prompt_tokens=resolved.prompt_tokens,
        tool_format=resolved.tool_format,
        reasoning=_read_reasoning(resolved.reasoning) if resolved.HasField("reasoning") else None,
    )


def _read_reasoning(reasoning: pb.Reasoning) -> ReasoningPosition | None:
    return (
        None if reasoning.none else ReasoningPosition(reasoning.opening_token, reasoning.closing_token, reasoning.begun)
    )


def _read_prompt_token(message: pb.PromptToken) -> PromptToken:
    piece = _piece(message.bytes)
    logprobs = _read_logprobs(message.logprobs, piece) if message.HasField("logprobs") else None
    return PromptToken(message.token, piece, logprobs)


def _read_logprobs(logprobs: verifier_pb2.TokenLogprobs, piece: Piece | None = None) -> Logprobs:
    """Convert log-probabilities; `piece` is the chosen token's, if the message lacks it."""
    return Logprobs(
        chosen=logprobs.chosen,
        top=dict(zip(logprobs.top_tokens, logprobs.top_logprobs, strict=True)),
        piece=piece or _piece(logprobs.chosen_bytes),
        rank=logprobs.rank,
        # Older servers send no bytes of alternatives.
        top_pieces={
            token: _piece(spelt) for token, spelt in zip(logprobs.top_tokens, logprobs.top_bytes, strict=False)
        },
    )


def _piece(spelt: bytes) -> Piece:
    return Piece(spelt.decode(errors="replace"), spelt)
