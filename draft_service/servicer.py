"""The DraftService servicer: connects gRPC streams to the draft loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
from prometheus_client.metrics_core import Metric

from draft_service.candidate_queue import Extension
from draft_service.draft_loop import DraftLoop, ServedSession
from draft_service.learning_servicer import Learning, LearningServicer, key_gate
from draft_service.metrics import metrics
from draft_service.request import (
    MAX_KEPT_BYTES,
    MIN_CONTRASTED_PROBABILITY,
    DrafterSessionRequest,
    ExpansionPolicy,
)
from draft_service.session import DrafterSession
from draft_service.traffic import NOTHING_KEPT
from draft_service.translation import Translation
from draft_service.version import Version
from draft_service.version_follower import VersionFollower
from specdec.decoding.calibration import Calibrations
from specdec.decoding.proposal import MIN_PART
from specdec.decoding.sampling import Rule, sampling_violations
from specdec.engine.fast_paths import fast_paths_off
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import GrammarError
from specdec.serving.errors import InvalidRequestError
from specdec.serving.grammar_trials import GrammarTrials
from specdec.serving.grammars import Grammars
from specdec.serving.identity import pod_info
from specdec.serving.messages import RULES, paths_message, query_from, rule_of, sampler_from, sampling_from, scorer_of
from specdec.serving.response_queue import ResponseQueue
from specdec.serving.session_stream import SessionServicer
from specdec.serving.target_logprobs import MAX_TOP, TargetLogprobs, places_of
from specdec.serving.timeline import Timeline
from specdec.serving.tracing.servicer import TraceServicer
from specdec.serving.validation import (
    MAX_BRANCHES,
    MAX_DEPTH,
    MAX_NODES,
    grammar_violations,
    open_size_violations,
    rule_violations,
    text_violations,
    token_tree_violations,
    weight_violations,
)
from specdec.v2 import draft_pb2, draft_pb2_grpc, model_pb2

MAX_COMMIT_TOKENS = 4096
"""Maximum tokens of a commit: all sessions wait while it is applied. A target's step commits at most a few hundred."""

MAX_AGE_US = 2**32 - 1
"""Maximum of `base_age_us` (uint32), 71 minutes. Larger ages (for example, with a slow reader) are sent as this
value."""


def version_message(version: Version) -> draft_pb2.DraftVersion:
    return draft_pb2.DraftVersion(
        name=version.name,
        state=draft_pb2.DraftVersionState.Value(f"DRAFT_VERSION_STATE_{version.state.name}"),
        reason=version.reason,
        model_fingerprint=version.fingerprint,
        sessions=version.sessions,
        committed_tokens=version.committed,
        guessed_tokens=version.guessed,
        passes=version.passes,
        busy_us=int(1e6 * version.busy),
    )


@dataclass(frozen=True)
class DraftLimits:
    """Limits on a session's requested values, and the defaults for unset ones."""

    defaults: ExpansionPolicy = field(default_factory=ExpansionPolicy)
    max_nodes: int = MAX_NODES
    max_depth: int = MAX_DEPTH
    max_branches: int = MAX_BRANCHES
    max_sessions: int = 256
    max_sessions_per_client: int | None = None  # None: no limit per client


class DraftServicer(
    SessionServicer[DrafterSession, draft_pb2.DraftRequest, draft_pb2.DraftResponse],
    draft_pb2_grpc.DraftServiceServicer,
):
    name = "specdec.v2.DraftService"
    timeline_name = "draft"
    place_seconds = 0.25

    def __init__(
        self,
        loop: DraftLoop,
        identity: model_pb2.ModelIdentity,
        limits: DraftLimits,
        info: model_pb2.PodInfo | None = None,
        grammars: GrammarCompiler | None = None,
        trials: GrammarTrials | None = None,
        translation: Translation | None = None,
        learning: Learning | None = None,
        versions: VersionFollower | None = None,
    ) -> None:
        """Serve a draft loop.

        `info`: the `PodInfo` in statistics. Without `grammars`, texts with a grammar are refused; `trials` tries
        grammars before they are compiled. `translation`: between the target's tokens and the draft's, if the two models
        use different tokenizers; `identity` and `grammars` are then the target's. `learning`: the key and the tenants
        of LearningService; None disables that service. `versions`: the follower of the folder of versions, if there is
        one.
        """
        super().__init__(loop, limits.max_sessions, limits.max_sessions_per_client)
        self.gates = () if learning is None else (key_gate(learning.key),)
        self._started = time.monotonic()
        self._info = info or pod_info()
        self._loop = loop
        self._identity = identity
        self._limits = limits
        self._calibrations = Calibrations()
        self._grammars = Grammars(grammars, trials)
        self._translation = translation
        self._versions = versions
        self._learning = learning

    async def close(self) -> None:
        if self._versions is not None:
            await asyncio.to_thread(self._versions.close)
        await super().close()
        await self._grammars.close()

    def register(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)
        TraceServicer("draft", self.timelines).register(server)
        if self._learning is not None:
            LearningServicer(self._loop, self._learning).register(server)

    async def Draft(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftRequest],
        context: grpc.aio.ServicerContext[draft_pb2.DraftRequest, draft_pb2.DraftResponse],
    ) -> None:
        await self.run(request_iterator, context)

    async def GetStats(
        self,
        request: draft_pb2.DraftServiceGetStatsRequest,
        context: grpc.aio.ServicerContext[
            draft_pb2.DraftServiceGetStatsRequest, draft_pb2.DraftServiceGetStatsResponse
        ],
    ) -> draft_pb2.DraftServiceGetStatsResponse:
        return self._stats_response()

    def metrics(self) -> list[Metric]:
        return metrics(self._stats_response())

    def _stats_response(self) -> draft_pb2.DraftServiceGetStatsResponse:
        loop, stats = self._loop, self._loop.stats
        kept = NOTHING_KEPT if loop.traffic is None else loop.traffic.kept()
        versions = None if self._versions is None else self._versions.drafter
        return draft_pb2.DraftServiceGetStatsResponse(
            pod=self._info,
            up_us=int(1e6 * (time.monotonic() - self._started)),
            fast_paths_off=fast_paths_off(),
            sessions=self._sessions,
            max_sessions=self._limits.max_sessions,
            kv_tokens=loop.drafter.slots,
            kv_held_tokens=loop.drafter.slots_used,
            steps=loop.steps,
            busy_us=int(1e6 * stats.busy),
            committed_tokens=stats.committed,
            guessed_tokens=stats.guessed,
            sent_candidates=stats.sent,
            sent_messages=stats.messages,
            identity=self._identity if versions is None else self._identity_of(versions.serving),
            serving=self.works,
            kept_texts=kept.texts,
            kept_tokens=kept.tokens,
            kept_age_us=int(1e6 * kept.age),
            kept_logprob_bytes=kept.logprob_bytes,
            versions=[] if versions is None else [version_message(version) for version in versions.known],
            version_outcomes={} if versions is None else dict(versions.outcomes),
        )

    def _identity_of(self, version: Version) -> model_pb2.ModelIdentity:
        identity = model_pb2.ModelIdentity()
        identity.CopyFrom(self._identity)
        identity.model_fingerprint = version.fingerprint
        return identity

    def _version_of(self, session: DrafterSession) -> Version | None:
        return None if self._versions is None else self._versions.drafter.version_of(session)

    def attach(
        self, session: DrafterSession, responses: ResponseQueue[draft_pb2.DraftResponse], timeline: Timeline
    ) -> None:
        drafted_by: Version | None = None

        def message(extension: Extension) -> draft_pb2.DraftResponse:
            nonlocal drafted_by
            timeline.first("first_candidates")
            if self._versions is not None and (version := self._version_of(session)) is not drafted_by:
                drafted_by = version
                timeline.event("version", version="" if version is None else version.name)
            timeline.add(messages=1, candidates=len(extension.paths.tokens))
            extend = paths_message(extension.base, extension.paths)
            extend.base_age_us = min(int(1e6 * extension.base_age), MAX_AGE_US)
            return draft_pb2.DraftResponse(extend=extend)

        self._loop.attach(ServedSession(session, responses, message))
        timeline.event("admitted")

    def takes_long(self, request: draft_pb2.DraftRequest) -> bool:
        return super().takes_long(request) or request.open.HasField("grammar") or self._translation is not None

    async def prepare(self, request: draft_pb2.DraftRequest) -> object:
        return await self._grammars.prepare(request.open.grammar, request.open.tenant)

    def detach(self, session: DrafterSession) -> None:
        self._loop.detach(session)

    def act(self, session: DrafterSession, request: draft_pb2.DraftRequest, arrived: float) -> None:
        match request.WhichOneof("message"):
            case "committed":
                committed, places = request.committed, list[TargetLogprobs]()
                if len(committed.tokens) > MAX_COMMIT_TOKENS:
                    problem = f"has {len(committed.tokens)} tokens, must have at most {MAX_COMMIT_TOKENS}"
                    raise ValueError(f"committed: {problem}")
                if committed.overruled and self._learns_logprobs(session):
                    end = committed.base + len(committed.tokens)
                    places = places_of(committed.overruled, committed.base, end, session.request.target_vocabulary)
                self._loop.commit(session, committed.base, list(committed.tokens), arrived)
                session.add_places(places)
            case "policy":
                if wrong := token_tree_violations("policy", request.policy):
                    raise ValueError("; ".join(" ".join(violation) for violation in wrong))
                session.set_policy(self._policy(request.policy, session.max_nodes, session.request.sampler.rule))
            case "resend":
                session.outgoing.resend()
            case "features":
                self._loop.add_features(session, request.features.first, request.features.values)
            case "query":
                session.ask(query_from(request.query, int(session.vocabulary / MIN_PART)))

    def opened(self, session: DrafterSession) -> draft_pb2.DraftResponse:
        policy, features = session.policy, self._loop.drafter.features
        version = self._version_of(session)
        opened = draft_pb2.DraftOpened(
            identity=self._identity if version is None else self._identity_of(version),
            version="" if version is None else version.name,
            max_depth=len(policy.expansion) or policy.max_depth,
            max_branches=max(policy.expansion, default=policy.max_branches),
            max_nodes=policy.max_nodes,
            keeps_text=self._loop.traffic is not None and self._loop.traffic.keeps(session),
            overruled_logprobs=MAX_TOP if self._learns_logprobs(session) else 0,
            features=None if features is None else draft_pb2.FeatureFormat(**features._asdict()),
        )
        return draft_pb2.DraftResponse(opened=opened)

    def _learns_logprobs(self, session: DrafterSession) -> bool:
        traffic = self._loop.traffic
        return traffic is not None and traffic.most_places > 0 and traffic.keeps(session)

    def heartbeat(self, session: DrafterSession) -> draft_pb2.DraftResponse:
        return draft_pb2.DraftResponse(heartbeat=model_pb2.Heartbeat(steps=self._loop.steps, capacity=self.capacity()))

    def is_last(self, response: draft_pb2.DraftResponse) -> bool:
        return False  # only the caller ends a draft session

    def _policy(self, message: draft_pb2.DraftPolicy, most_nodes: int, rule: Rule) -> ExpansionPolicy:
        """Clamp a policy to this pod's limits and to `most_nodes`, the nodes that memory is reserved for. Under
        REJECTION a tree is a chain, which is verified as a block, unless the request asks for siblings or default
        widths apply."""
        limits, defaults = self._limits, self._limits.defaults
        least = MIN_CONTRASTED_PROBABILITY if rule is Rule.CONTRASTIVE else 0.0
        branches = 1 if rule is Rule.REJECTION else defaults.max_branches
        chosen = message.max_depth or message.max_branches  # the request chooses, so default fixed widths do not apply
        widths = tuple(message.expansion) or (() if chosen else defaults.expansion)
        return ExpansionPolicy(
            max_nodes=min(message.max_nodes or defaults.max_nodes, most_nodes),
            max_depth=min(message.max_depth or defaults.max_depth, limits.max_depth),
            max_branches=min(message.max_branches or branches, limits.max_branches),
            scorer=scorer_of(message.scorer) or defaults.scorer,
            expansion=tuple(min(width, limits.max_branches) for width in widths[: limits.max_depth]),
            min_path_probability=max(message.min_path_probability, defaults.min_path_probability, least),
            paused=message.paused,
            partial_distributions=message.partial_distributions,
            extend_interval=message.extend_interval_us * 1e-6,
            round_trip=message.round_trip_us * 1e-6,
        )

    def parse(self, request: draft_pb2.DraftRequest, deadline: float | None) -> DrafterSession:
        """Return the session requested by an `open`; InvalidRequestError if a value is invalid. Values are validated
        for all callers, trusted or not."""
        message = request.open
        # Only tokens in both vocabularies are proposed: the target would drop any others. Sampling parameters may name
        # tokens outside the draft's vocabulary, which affect none of its candidates.
        own, context = self._identity.vocabulary_size, self._identity.context_tokens
        targets = message.vocabulary_size or own
        vocabulary = min(own, targets)
        if violations := open_size_violations(message, max(own, targets), context):
            raise InvalidRequestError(violations)
        prompt, generated = list(message.prompt_tokens), list(message.generated_tokens)
        sampling = sampling_from(message.sampling)
        violations = sampling_violations(sampling, targets, frozenset())
        if own < targets and not violations:
            sampling = sampling.within(own)
            violations = sampling_violations(sampling, own, frozenset())
        violations += rule_violations(message.rule, message.contrast, sampling)
        violations += text_violations(prompt, generated, message.max_tokens, vocabulary=vocabulary, context=context)
        violations += weight_violations(message.tenant_weight)
        end_tokens = frozenset(token for token in message.end_tokens if token < vocabulary)  # others are not proposed
        if message.HasField("grammar"):
            violations += grammar_violations(message.grammar, end_tokens, vocabulary)
        rule = rule_of(message.rule, sampling) if message.rule in RULES else Rule.COUPLED  # an unknown rule is refused
        violations += token_tree_violations("policy", message.policy)
        if not violations and rule not in self._loop.drafter.rules:
            served = ", ".join(known.name for known in Rule if known in self._loop.drafter.rules)
            violations.append(("rule", f"is {rule.name}, this draft serves {served}"))
        own_prompt: list[int] = []
        if self._translation is not None and not violations:
            own_prompt = self._translation.prompt(prompt)
            if len(own_prompt) >= context:
                problem = f"has {len(own_prompt)} tokens of the draft, must have fewer than its context of {context}"
                violations.append(("prompt_tokens", problem))
        if violations:
            raise InvalidRequestError(violations)
        wanted = DrafterSessionRequest(
            prompt,
            generated,
            sampler_from(sampling, end_tokens, len(prompt) + message.min_tokens, message),
            end_tokens,
            message.max_tokens,
            context,
            self._grammars.compiled(message.grammar, message.tenant),
            message.tenant,
            message.tenant_weight or 1.0,
            own_prompt,
            message.learn,
            1e-6 * message.age_us,
            targets,
        )
        most_nodes = self._limits.max_nodes
        if wanted.distributions_required:  # a row takes 2 bytes per token; the root's row is not counted
            most_nodes = max(1, min(most_nodes, MAX_KEPT_BYTES // (2 * vocabulary)))
        policy = self._policy(message.policy, most_nodes, rule)
        try:
            return DrafterSession(wanted, policy, vocabulary, self._calibrations.of(wanted.sampler, message.tenant))
        except GrammarError as error:
            raise InvalidRequestError([("generated_tokens", str(error))]) from None
