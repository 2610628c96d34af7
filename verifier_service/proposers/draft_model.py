"""The local draft: a small model in the verifier's process, proposing candidates between two steps.

A draft service is for a separate device: it drafts while the target verifies. On the target's machine it would take a
CPU core from the target, and every message costs time. The local draft alternates with the target: only one of them
computes at a time, with all CPU threads, and nothing is sent. Each pass reads one token of every session's chain;
passes continue while they are worth their time.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import structlog

from specdec.decoding.calibration import Calibrations
from specdec.decoding.speculation import CandidateSource
from specdec.engine.batch import Packer
from specdec.engine.engine import Engine, draft_pass_of
from specdec.engine.kv.blocks import BLOCK, BlockPool
from specdec.engine.kv.slots import PADDING_SLOT
from verifier_service.costs.step_latency import StepLatency
from verifier_service.proposers.draft_chain import DraftChain, PrefixState, extend
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, Phase, ProposalStats, Proposer
from verifier_service.proposers.usefulness import Usefulness
from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import DEFAULTS, Tuning

log = structlog.get_logger()

MAX_TENANTS = 256
"""Maximum tenants with a remembered usefulness of the draft; the least recently active one is forgotten first."""


class DraftModelProposer(Proposer):
    """The local draft of a verifier, owned by the step loop's thread. `engine` has the target's tokenizer and need not
    be exact. After a failure the draft is not used again; no token is lost."""

    phase = Phase.AFTER_DELAY
    drafter = CandidateSource.LOCAL_MODEL

    def __init__(
        self,
        engine: Engine,
        context: int,
        latency: StepLatency | None = None,
        tuning: Tuning = DEFAULTS,
    ) -> None:
        """`context`: maximum tokens of a text for the model; `latency`: of one pass, measured by default."""
        blocks = engine.capacity // BLOCK
        self.engine = engine
        self._forward = draft_pass_of(engine)
        self.works = True
        self._tuning = tuning.draft_model
        self._context = context
        self.pool = BlockPool(blocks)
        self._latency = latency or StepLatency.measure(engine, blocks * BLOCK, tuning.latency)
        self._prefixes: dict[VerifierSession, PrefixState] = {}
        self._calibrations = Calibrations()
        self._tenants: OrderedDict[str, Usefulness] = OrderedDict()

    def serves(self, session: VerifierSession) -> bool:
        """Return True if the draft may propose candidates for a session, now or later."""
        prefix = self._prefixes.get(session)
        return self.works and session.tree.base < self._context and (prefix is None or not prefix.over)

    def propose(self, step: ComingStep) -> ProposalStats:
        decoding = step.decoding
        asked = [session for session in decoding if step.eligibility.uses_local_model(session)]
        return self.guess(asked, len(decoding), step.latency, step.break_even) if asked else NO_PROPOSALS

    def guess(
        self, sessions: Sequence[VerifierSession], decoding: int, latency: StepLatency, break_even: float
    ) -> ProposalStats:
        """Propose candidates for these sessions, as long as they are worth the delay of the next step.

        The step has `decoding` sessions; `latency`: of the target's steps. Sessions are skipped if their existing
        candidates are expected to bring more than a chain.
        """
        begin = time.monotonic()
        chains: list[DraftChain] = []
        try:
            chains += self._begin(
                [
                    session
                    for session in sessions
                    if session.best_nodes.expected_accepted < self._expected_accepted(session)
                ]
            )
            self._go_on(chains, decoding, latency, break_even, begin)
        except Exception as error:
            self._fail(error)
        for chain in chains:
            chain.prefix.usefulness.observe_chain(chain.expected_accepted)
            chain.offer()
            if chain.broken:
                self._close(chain.prefix, wipe=True)
        return ProposalStats(time.monotonic() - begin, len(chains))

    def forget(self, session: VerifierSession) -> None:
        """Forget a session and free its memory; it may come back."""
        prefix = self._prefixes.pop(session, None)
        if prefix is not None:
            self._close(prefix)

    def _begin(self, sessions: Sequence[VerifierSession]) -> list[DraftChain]:
        """Read committed tokens, sessions with the fewest unread first; return the chains of fully read sessions."""
        prefixes = [prefix for session in sessions if (prefix := self._followed(session)) is not None]
        prefixes.sort(key=lambda prefix: prefix.pending)
        packer, budget = self.engine.packer(), self._tuning.max_prefill_rows + 2 * len(prefixes)
        chains: list[DraftChain] = []
        for prefix in prefixes:
            if not budget:
                break
            tokens, position, slots = prefix.take(budget)
            budget -= len(tokens)
            rows = packer.add_rows(tokens, position, slots[position:])
            packer.add_path(slots, rows)
            if not prefix.pending:
                packer.want(rows[-1])
                chains.append(DraftChain(prefix, self._tuning))
        if packer.tokens:
            self._read(packer, chains)
        return chains

    def _go_on(
        self, chains: Sequence[DraftChain], decoding: int, latency: StepLatency, break_even: float, begin: float
    ) -> None:
        """Extend chains by one token a pass, as long as a pass adds more tokens a second than the step would have
        without it."""
        expected, rows = float(decoding), decoding
        longer = [chain for chain in chains if chain.tokens]
        while longer:
            expected += sum(math.exp(chain.path_logprob) for chain in longer)
            rows += len(longer)
            going = [chain for chain in longer if not chain.ended and self._gain(chain) > break_even]
            gain = sum(self._gain(chain) - break_even for chain in going)
            rate = expected / (latency.of(rows) + time.monotonic() - begin)
            # The pass delays the whole step: it must add more tokens than the step brings in that time.
            if gain <= rate * self._latency.of(len(going)):
                return
            packer = self.engine.packer()
            for chain in going:
                token, position, slots = chain.take()
                row = packer.add_row(token, position, int(slots[position]))
                packer.add_path(slots, [row])
                packer.want(row)
            longer = self._read(packer, going)

    def _gain(self, chain: DraftChain) -> float:
        """Return the expected number of accepted tokens gained by extending a chain by one token."""
        return math.exp(chain.path_logprob) * chain.prefix.usefulness.next_token_acceptance

    def _read(self, packer: Packer, chains: Sequence[DraftChain]) -> list[DraftChain]:
        """Run a forward pass with the ends of these chains as wanted rows; return the chains it extended."""
        rows, begin = len(packer.tokens), time.monotonic()
        logits, lengths = self._forward(packer.pack()), [len(chain.tokens) for chain in chains]
        extend(chains, logits, self._tuning.branches)
        longer = [chain for chain, length in zip(chains, lengths, strict=True) if len(chain.tokens) > length]
        self._latency.observe(rows, time.monotonic() - begin)
        return longer

    def _followed(self, session: VerifierSession) -> PrefixState | None:
        """Return a session's prefix state, updated to its text; None if nothing can be proposed for it now."""
        prefix = self._prefixes.get(session)
        if prefix is None:
            table, source, target = self.pool.open(session.tree.committed, session.request.cache_scope)
            if len(source):
                self.engine.copy(source, target)
            request = session.request
            prefix = self._prefixes[session] = PrefixState(
                session,
                table,
                self._context,
                self.engine.vocabulary,
                self._tuning.max_depth,
                Usefulness(self._tuning, self._of_tenant(request.tenant)),
                self._calibrations.of(request.sampler, request.tenant),
            )
        if prefix.follow():
            return prefix
        if prefix.over:
            self._close(prefix)
        return None

    def _expected_accepted(self, session: VerifierSession) -> float:
        """Return the expected number of accepted tokens of a session's next chain."""
        prefix = self._prefixes.get(session)
        usefulness = self._of_tenant(session.request.tenant) if prefix is None else prefix.usefulness
        return usefulness.expected_accepted

    def _of_tenant(self, tenant: str) -> Usefulness:
        if tenant not in self._tenants:
            self._tenants[tenant] = Usefulness(self._tuning)
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)
        return self._tenants[tenant]

    def _close(self, prefix: PrefixState, *, wipe: bool = False) -> None:
        """Stop proposing for a session and free its memory."""
        prefix.over = True
        to_wipe = prefix.table.close(wipe=wipe)
        if len(to_wipe) and self.works:
            try:
                self.engine.copy(np.full(len(to_wipe), PADDING_SLOT), to_wipe)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        log.error("local_draft_failed", exc_info=error)
        self.works = False
