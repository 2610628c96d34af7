"""The servicer of VerifierService: connects gRPC streams to the step loop."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import grpc
import structlog
from prometheus_client.metrics_core import Metric

from specdec.decoding.proposal import DistributionSizes
from specdec.decoding.sampling import Rule, sampling_violations
from specdec.decoding.speculation import RECENT_DRAFTERS, CandidateSource, SpeculationOptions, drafters_of
from specdec.engine.fast_paths import fast_paths_off
from specdec.engine.kv.blocks import BLOCK
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import GrammarError, GrammarTooComplexError
from specdec.serving import checksum
from specdec.serving.errors import (
    GrammarFailureError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    ProtocolError,
    TenantLimitError,
)
from specdec.serving.grammar_trials import GrammarTrials
from specdec.serving.grammars import Grammars
from specdec.serving.identity import pod_info
from specdec.serving.messages import (
    RULES,
    lookahead_from,
    paths_from,
    rule_of,
    sampler_from,
    sampling_from,
)
from specdec.serving.response_queue import ResponseQueue
from specdec.serving.session_stream import SessionServicer
from specdec.serving.timeline import Timeline
from specdec.serving.tracing.servicer import TraceServicer
from specdec.serving.validation import (
    MAX_CACHE_SALT_CHARACTERS,
    MAX_LOGPROBS,
    MAX_NODES_A_MESSAGE,
    MAX_WINDOW_ROWS,
    candidate_limit_violations,
    depth_violations,
    drafter_violations,
    grammar_violations,
    open_size_violations,
    overruled_violations,
    rule_violations,
    text_violations,
    token_violations,
    too_many,
    typicality_violations,
    weight_violations,
    window_violations,
)
from specdec.v2 import model_pb2, verifier_pb2, verifier_pb2_grpc
from specdec.wire.sources import source_name
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.result import Without
from verifier_service.backend.session_backend import BackendSession, SessionBackend
from verifier_service.metrics import metrics
from verifier_service.responses import SessionResponses, decisions_message

log = structlog.get_logger()

QUEUE_SHARE = 8
"""Limit on a tenant's waiting sessions, in multiples of the free places in the waiting room: a single waiting tenant
gets eight ninths of the room, each of several gets less (dynamic thresholds, Choudhury and Hahne 1998)."""


@dataclass(frozen=True)
class VerifierLimits:
    """Limits of a verifier and of each session; also the defaults for unset values."""

    max_nodes: int = 256  # live candidates of a session's draft
    max_candidates: int = 64  # in one step of a session
    max_sessions: int = 512
    max_sessions_per_client: int | None = None  # None: no limit per client
    max_waiting: int = 128  # open sessions not admitted yet
    max_window_rows: int = MAX_WINDOW_ROWS  # of a requested lookahead window
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    """The speculation of requests that name neither drafters nor a window."""


class WaitingCounts(NamedTuple):
    """Numbers of sessions waiting for memory; negative: number of further sessions that would get memory
    immediately."""

    new: int
    """Sessions never admitted, which fill the waiting room. Preempted sessions do not count: those of a flooding tenant
    would cause refusals for other tenants."""

    ahead: int
    """Sessions ahead of one that arrives now: preempted ones included, throttled ones not."""

    coming: int
    """Sessions not yet taken by the step loop, less those that would get memory immediately."""


class VerifierServicer(
    SessionServicer[BackendSession, verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse],
    verifier_pb2_grpc.VerifierServiceServicer,
):
    name = "specdec.v2.VerifierService"
    timeline_name = "verify"

    def __init__(
        self,
        backend: SessionBackend,
        identity: model_pb2.ModelIdentity,
        limits: VerifierLimits,
        info: model_pb2.PodInfo | None = None,
        grammars: GrammarCompiler | None = None,
        trials: GrammarTrials | None = None,
    ) -> None:
        """Serve a backend. `info`: the `PodInfo` in statistics; without `grammars`, texts with a grammar are refused;
        `trials` tries grammars before they are compiled."""
        super().__init__(backend, limits.max_sessions, limits.max_sessions_per_client)
        self._info = info or pod_info()
        self._started = time.monotonic()
        self._backend = backend
        self.identity = identity
        self._limits = limits
        self._grammars = Grammars(grammars, trials)
        self._usual_tokens = float(BLOCK)  # KV cache tokens of a new session, moving average

    async def close(self) -> None:
        await super().close()
        await self._grammars.close()

    def register(self, server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)
        TraceServicer("verifier", self.timelines).register(server)

    async def Verify(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[verifier_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse],
    ) -> None:
        await self.run(request_iterator, context)

    def attach(
        self,
        session: BackendSession,
        responses: ResponseQueue[verifier_pb2.VerifyResponse],
        timeline: Timeline,
    ) -> None:
        timeline.event("queued")
        self._backend.serve(session, responses, SessionResponses(timeline), timeline)

    def admit(self, request: verifier_pb2.VerifyRequest, deadline: float | None) -> None:
        super().admit(request, deadline)
        text = len(request.open.prompt_tokens) + len(request.open.generated_tokens)
        tokens = BLOCK * -(-(text + 1) // BLOCK)  # whole blocks for the text and one more token
        self._usual_tokens += 0.1 * (tokens - self._usual_tokens)
        if request.open.attempt > 1:
            return  # a text in progress is not refused for lack of waiting room
        counts, limit, load = self._waiting_counts(tokens), self._limits.max_waiting, self._backend.stats
        wait = load.expected_wait(counts.ahead)
        if counts.new >= limit:
            raise OverloadedError(
                f"{counts.new} sessions are waiting for memory, the limit is {limit}", retry_after=wait
            )
        tenant = request.open.tenant
        own = load.new_of[tenant] + min(self.arriving.count(tenant), max(0, counts.coming))
        share = max(1, QUEUE_SHARE * (limit - counts.new))  # one place for every tenant, however full the room is
        if own >= share:
            problem = (
                f"{own} of its sessions are waiting for memory, the limit is {share} while {counts.new} wait in all"
            )
            raise TenantLimitError(tenant, problem, wait)
        missing = max(0, request.open.max_tokens - len(request.open.generated_tokens))  # not validated yet
        error = load.too_late(missing, deadline, max(0, counts.ahead))
        if error is not None:
            raise error

    def capacity(self) -> model_pb2.PodCapacity:
        counts = self._waiting_counts(self._usual_tokens)
        room = max(0, min(self.room, self._limits.max_waiting - counts.new))
        wait = self._backend.stats.expected_wait(max(0, counts.ahead))
        return model_pb2.PodCapacity(sessions=self._sessions, room=room, wait_us=int(1e6 * wait))

    def _waiting_counts(self, tokens: float) -> WaitingCounts:
        """Return the numbers of waiting sessions. Sessions not yet taken by the step loop count as texts of `tokens`
        tokens each."""
        load = self._backend.stats
        waiting = load.waiting - load.throttled
        coming = len(self.arriving) - (0 if waiting else self._backend.fitting(tokens))
        return WaitingCounts(load.new_of.total() + coming, waiting + coming, coming)

    def tenant_of(self, request: verifier_pb2.VerifyRequest) -> str:
        return request.open.tenant

    async def FindPrefix(
        self,
        request: verifier_pb2.FindPrefixRequest,
        context: grpc.aio.ServicerContext[verifier_pb2.FindPrefixRequest, verifier_pb2.FindPrefixResponse],
    ) -> verifier_pb2.FindPrefixResponse:
        known = self._backend.known_prefix(request.block_hashes)
        return verifier_pb2.FindPrefixResponse(cached_tokens=known, capacity=self.capacity())

    async def GetStats(
        self,
        request: verifier_pb2.GetStatsRequest,
        context: grpc.aio.ServicerContext[verifier_pb2.GetStatsRequest, verifier_pb2.GetStatsResponse],
    ) -> verifier_pb2.GetStatsResponse:
        return self._stats_response()

    def metrics(self) -> list[Metric]:
        return metrics(self._stats_response(), self._backend.stats)

    def _stats_response(self) -> verifier_pb2.GetStatsResponse:
        load, memory = self._backend.stats, self._backend.memory()
        return verifier_pb2.GetStatsResponse(
            running=load.running,
            waiting=load.waiting,
            kv_tokens=memory.tokens,
            kv_held_tokens=memory.held,
            kv_cached_tokens=memory.cached,
            steps=load.steps,
            rows=load.rows,
            committed_tokens=load.committed,
            offered_candidates=load.offered,
            accepted_candidates=load.accepted,
            refused_extends=load.refused,
            drafted_steps=load.drafted_steps,
            draft_ready_steps=load.draft_ready_steps,
            prompt_tokens=load.prompt_tokens,
            cached_tokens=load.cached_tokens,
            preemptions=load.preemptions,
            busy_us=int(1e6 * load.busy),
            up_us=int(1e6 * (time.monotonic() - self._started)),
            fast_paths_off=fast_paths_off(),
            identity=self.identity,
            pod=self._info,
            sessions=self._sessions,
            max_sessions=self._limits.max_sessions,
            max_waiting=self._limits.max_waiting,
            throttled=load.throttled,
            serving=self.works,
            mode=load.mode,
            sources={source_name(source): count for source, count in load.sources.items() if count},
            decisions=decisions_message(load.decisions, load.rates),
        )

    def takes_long(self, request: verifier_pb2.VerifyRequest) -> bool:
        return super().takes_long(request) or request.open.HasField("grammar")

    async def prepare(self, request: verifier_pb2.VerifyRequest) -> object:
        return await self._grammars.prepare(request.open.grammar, request.open.tenant)

    def detach(self, session: BackendSession) -> None:
        self._backend.detach(session)

    def act(self, session: BackendSession, request: verifier_pb2.VerifyRequest, arrived: float) -> None:
        match request.WhichOneof("message"):
            case "extend":
                self._extend(session, request.extend, arrived)
            case "policy":
                rule = session.request.sampler.rule
                if wrong := self._policy_violations(request.policy, rule):
                    raise ValueError("; ".join(" ".join(violation) for violation in wrong))
                session.set_policy(self._policy(request.policy, rule))
            case "consumed":
                session.client_has_read(request.consumed.tokens, request.consumed.scored_tokens)

    def _extend(self, session: BackendSession, extend: model_pb2.Extend, arrived: float) -> None:
        """Insert candidates. Invalid ones are dropped: a draft's error must not cost the text a token."""
        try:
            most = max(len(extend.tokens), len(extend.parents), len(extend.logprob_bytes), len(extend.distributions))
            if most > MAX_NODES_A_MESSAGE:
                raise ValueError(f"has {most} nodes, must have at most {MAX_NODES_A_MESSAGE}")
            rule, vocabulary = session.request.sampler.rule, self.identity.vocabulary_size
            paths = paths_from(extend, DistributionSizes.of(rule, vocabulary))
            session.extend(extend.base, paths, arrived, extend.base_age_us * 1e-6)
        except ValueError as error:
            self._backend.stats.refused += 1
            session.refused_extends += 1
            if session.refused_extends == 1:  # log once: a faulty draft keeps sending them
                log.warning("candidates_refused", why=str(error))

    def opened(self, session: BackendSession) -> verifier_pb2.VerifyResponse:
        outlook = self._backend.outlook(session, self._sessions)
        opened = verifier_pb2.VerifyOpened(
            identity=self.identity,
            max_nodes=self._limits.max_nodes,
            capacity=self.capacity(),
            drafting_wanted=outlook.drafting_wanted,
            min_candidate_probability=outlook.break_even,
            max_candidates=session.policy.max_candidates,
            follows_grammar=session.request.grammar is not None,
            max_branches=1 if self._backend.chains_only else 0,
            scores_prompt=session.request.prompt_logprobs is not None,
            bans_sequences=bool(session.request.sampler.sampling.banned_sequences),
            applies_typical_p=session.request.sampler.sampling.typical_p < 1.0,
            salts_cache=bool(session.request.cache_salt),
            takes_partial_distributions=session.request.sampler.rule is Rule.CONTRASTIVE,
            features_fingerprint=self._backend.features_fingerprint,
        )
        opened.checksum = checksum.of_opening(opened)
        return verifier_pb2.VerifyResponse(opened=opened)

    def heartbeat(self, session: BackendSession) -> verifier_pb2.VerifyResponse:
        load = self._backend.stats
        begun = load.step_begun
        heartbeat = model_pb2.Heartbeat(
            steps=load.steps,
            capacity=self.capacity(),
            step_age_us=int(1e6 * (time.monotonic() - begun)) if begun else 0,
            step_expected_us=int(1e6 * load.step_expected),
            awaits_draft=session.awaits_draft,
        )
        return verifier_pb2.VerifyResponse(heartbeat=heartbeat)

    def is_last(self, response: verifier_pb2.VerifyResponse) -> bool:
        return bool(response.commit.finish_reason)

    def _policy(self, message: verifier_pb2.VerifyPolicy, rule: Rule) -> Policy:
        most = self._limits.max_candidates
        options = _options(message)
        if message.unspecified and rule is not Rule.CONTRASTIVE:  # CONTRASTIVE needs a remote draft and nothing else
            options = self._by_default(options, rule)
        return Policy(
            drafters=options.drafters,
            max_candidates=min(message.max_candidates or most, most),
            patience=message.patience_us * 1e-6,
            forced=options.forced,
            lookahead=options.lookahead,
            jacobi=options.jacobi,
            max_depth=message.max_depth,
            overruled_logprobs=message.overruled_logprobs,
            features_session=message.features_session,
            why_none=self._why_none if message.unspecified else Without.NO_DRAFTER,
        )

    @property
    def _why_none(self) -> Without:
        """The reason to report if a session with this verifier's default speculation has no drafters."""
        default = self._limits.speculation.drafters
        if not default:
            return Without.OFF_BY_DEFAULT
        return Without.NO_DRAFT_SERVICE if default == {CandidateSource.REMOTE} else Without.NO_DRAFTER

    def _by_default(self, available: SpeculationOptions, rule: Rule) -> SpeculationOptions:
        """Return this verifier's default, limited to the `available` drafters. Recent drafters count as available if
        any drafter is. A window that the rule excludes is left out, since the request did not ask for it."""
        default, named = self._limits.speculation, available.drafters
        options = replace(default, drafters=default.drafters & (named | RECENT_DRAFTERS if named else named))
        if not window_violations("", options, rule):
            return options
        return replace(options, drafters=options.drafters - {CandidateSource.LOOKAHEAD}, lookahead=None, jacobi=False)

    def _policy_violations(self, policy: verifier_pb2.VerifyPolicy, rule: Rule) -> list[tuple[str, str]]:
        violations = candidate_limit_violations("policy", policy) + depth_violations("policy", policy)
        violations += drafter_violations("policy.drafters", policy.drafters)
        violations += overruled_violations("policy", policy)
        if violations:
            return violations
        options = _options(policy)
        violations += window_violations("policy", options, rule, self._limits.max_window_rows)
        for window in ("lookahead", "jacobi"):
            if getattr(options, window) and self._backend.chains_only:
                violations.append((f"policy.{window}", "is set, but this verifier's engine has no lookahead windows"))
        return violations

    def parse(self, request: verifier_pb2.VerifyRequest, deadline: float | None) -> BackendSession:
        """Return the session requested by an `open`. Values are validated for all callers, trusted or not."""
        message = request.open
        opening_checksum = checksum.of_opening(message)
        if message.HasField("checksum") and message.checksum != opening_checksum:
            raise ProtocolError("`open` does not match its checksum")
        vocabulary, context = self.identity.vocabulary_size, self.identity.context_tokens
        too_long = len(message.prompt_tokens) + len(message.generated_tokens) >= context
        refusal = PromptTooLongError if too_long else InvalidRequestError  # another verifier may have more memory
        if violations := open_size_violations(message, vocabulary, context):
            raise refusal(violations)
        prompt, generated = list(message.prompt_tokens), list(message.generated_tokens)
        sampling = sampling_from(message.sampling)
        end_tokens = frozenset(message.end_tokens)
        violations = sampling_violations(sampling, vocabulary, end_tokens if message.min_tokens else frozenset())
        violations += rule_violations(message.rule, message.contrast, sampling)
        violations += typicality_violations(message.rule, message.typicality)
        violations += text_violations(prompt, generated, message.max_tokens, vocabulary=vocabulary, context=context)
        violations += token_violations("end_tokens", list(message.end_tokens), vocabulary)
        for name in ("top_logprobs", "prompt_logprobs"):
            if (wanted_top := getattr(message, name)) > MAX_LOGPROBS:
                violations.append((name, f"is {wanted_top}, must be at most {MAX_LOGPROBS}"))
        if message.scored_tokens > len(prompt):
            problem = f"is {message.scored_tokens}, must be at most the {len(prompt)} prompt_tokens"
            violations.append(("scored_tokens", problem))
        violations += weight_violations(message.tenant_weight)
        if too_long_salt := too_many("cache_salt", len(message.cache_salt), MAX_CACHE_SALT_CHARACTERS, "characters"):
            violations.append(too_long_salt)
        rule = rule_of(message.rule, sampling) if message.rule in RULES else Rule.COUPLED  # an unknown one is refused
        violations += self._policy_violations(message.policy, rule)
        if message.HasField("grammar"):
            violations += grammar_violations(message.grammar, end_tokens, vocabulary)
        if violations:
            raise refusal(violations)
        sampler = sampler_from(sampling, end_tokens, len(prompt) + message.min_tokens, message)
        wanted = VerifierSessionRequest(
            prompt,
            generated,
            sampler,
            end_tokens,
            message.max_tokens,
            message.top_logprobs if message.HasField("top_logprobs") else None,
            context,
            message.tenant,
            weight=message.tenant_weight or 1.0,
            priority=message.priority,
            deadline=deadline if message.attempt <= 1 else None,
            checksum=opening_checksum,
            coalesce_commits=message.coalesce_commits,
            rejected_candidates=message.rejected_candidates,
            grammar=self._grammars.compiled(message.grammar, message.tenant),
            prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
            scored_tokens=message.scored_tokens,
            cache_salt=message.cache_salt,
        )
        policy, nodes = self._policy(message.policy, rule), self._limits.max_nodes
        try:
            return cast("BackendSession", self._backend.session(wanted, policy, nodes, vocabulary))
        except GrammarTooComplexError as error:
            raise GrammarFailureError(str(error)) from None
        except GrammarError as error:
            raise InvalidRequestError([("generated_tokens", str(error))]) from None


def _options(policy: verifier_pb2.VerifyPolicy) -> SpeculationOptions:
    """Return the drafters and the window of a validated policy."""
    return SpeculationOptions(
        drafters=drafters_of(policy.drafters),
        forced=policy.forced,
        lookahead=lookahead_from(policy.lookahead) if policy.HasField("lookahead") else None,
        jacobi=policy.jacobi,
    )
