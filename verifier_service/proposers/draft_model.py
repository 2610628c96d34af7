"""A draft model of the verifier's own: it guesses between two steps.

A draft in a process of its own is for a device of its own: it guesses ahead while the target verifies. On the target's
cores it takes one of them from the target, and pays for every message. This one takes turns with the target: while it
guesses the target rests, either has every core, and nothing is sent. It reads a token of every session's chain in one
pass, for as long as that is worth its time, and nothing ahead of need.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import structlog

from specdec.decoding.calibration import Calibrations
from specdec.engine.batch import Packer
from specdec.engine.engine import Engine
from specdec.engine.kv.blocks import BLOCK, BlockPool
from specdec.engine.kv.slots import PADDING_SLOT
from verifier_service.proposers.draft_chain import DraftChain, PrefixState
from verifier_service.scheduling.step_latency import StepLatency
from verifier_service.session import Session

log = structlog.get_logger()

MAX_PREFILL_ROWS = 256
"""Committed tokens that are read between two steps, over all sessions, besides the two that each has at the end of a
step: who waits for the step waits for them."""

FIRST_ACCEPTANCE, FIRST_EXPECTED_ACCEPTED = 0.5, 1.0
SMOOTHING = 0.05


class ProposalStats(NamedTuple):
    """What was done before a step."""

    seconds: float
    sessions: int  # for which something was guessed


NO_PROPOSALS = ProposalStats(0.0, 0)


class DraftModelProposer:
    """Of the step loop's thread. `engine` knows the target's tokens; its bits may depend on what it reads together. A
    draft costs no token: one that fails is not asked again."""

    def __init__(self, engine: Engine, context: int, latency: StepLatency | None = None) -> None:
        """`context`: tokens that its model can read of a text; `latency`: of a pass, measured unless it is known."""
        blocks = engine.capacity // BLOCK
        self.engine = engine
        self.works = True
        self._context = context
        self._pool = BlockPool(blocks)
        self._latency = latency or StepLatency.measure(engine, blocks * BLOCK)
        self._prefixes: dict[Session, PrefixState] = {}
        self._calibrations = Calibrations()
        self._next_token_acceptance = FIRST_ACCEPTANCE  # that the next token of a chain is right
        self._expected_accepted = FIRST_EXPECTED_ACCEPTED  # right tokens of a chain

    @property
    def held(self) -> int:
        """Blocks of key/value memory."""
        return self._pool.held

    def serves(self, session: Session) -> bool:
        """Whether it may have guesses for a session now or later, as far as is known."""
        prefix = self._prefixes.get(session)
        return self.works and session.tree.base < self._context and (prefix is None or not prefix.over)

    def guess(self, sessions: Sequence[Session], decoding: int, latency: StepLatency, price: float) -> ProposalStats:
        """Suggest to these sessions what may follow their texts, as far as it is worth its time before a step of
        `decoding` ones that costs T_v, where a row more costs `price` tokens."""
        begin = time.monotonic()
        chains: list[DraftChain] = []
        try:
            chains += self._begin(
                [session for session in sessions if session.expected_tokens()[0] - 1.0 < self._expected_accepted]
            )
            self._go_on(chains, decoding, latency, price, begin)
        except Exception as error:
            self._fail(error)
        for chain in chains:
            self._expected_accepted += SMOOTHING * (chain.expected_accepted - self._expected_accepted)
            chain.offer()
            if chain.broken:
                self._close(chain.prefix, wipe=True)
        return ProposalStats(time.monotonic() - begin, len(chains))

    def leave(self, session: Session) -> None:
        """Forget a session; it may come back."""
        prefix = self._prefixes.pop(session, None)
        if prefix is not None:
            self._close(prefix)

    def _begin(self, sessions: Sequence[Session]) -> list[DraftChain]:
        """Read what was committed, the shortest first; chains of those of whom nothing is unread."""
        prefixes = [prefix for session in sessions if (prefix := self._followed(session)) is not None]
        prefixes.sort(key=lambda prefix: prefix.pending)
        packer, budget = self.engine.packer(), MAX_PREFILL_ROWS + 2 * len(prefixes)
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
                chains.append(DraftChain(prefix, self._calibrations.of(prefix.session.request.sampler)))
        if packer.tokens:
            self._read(packer, chains)
        return chains

    def _go_on(
        self, chains: Sequence[DraftChain], decoding: int, latency: StepLatency, price: float, begin: float
    ) -> None:
        """Read the ends of chains, for as long as a pass over them brings more than the step would in its time."""
        expected, rows = float(decoding), decoding
        longer = [chain for chain in chains if chain.tokens]
        while longer:
            expected += sum(math.exp(chain.path_logprob) for chain in longer)
            rows += len(longer)
            going = [chain for chain in longer if not chain.ended and self._gain(chain) > price]
            gain = sum(self._gain(chain) - price for chain in going)
            rate = expected / (latency.of(rows) + time.monotonic() - begin)
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
        """Tokens that one more in a chain is expected to bring."""
        return math.exp(chain.path_logprob) * self._next_token_acceptance

    def _read(self, packer: Packer, chains: Sequence[DraftChain]) -> list[DraftChain]:
        """One forward pass, whose wanted rows are these chains'; those that it makes longer."""
        rows, begin = len(packer.tokens), time.monotonic()
        logits = self.engine.forward(packer.pack())
        longer: list[DraftChain] = []
        for chain, row in zip(chains, logits, strict=False):  # others may be behind them
            before = chain.path_logprob
            try:
                if not chain.extend(row):
                    continue
            except Exception as error:  # one session's trouble is not the others'
                log.error("chain_failed", exc_info=error)
                chain.broken = chain.ended = True
                continue
            self._next_token_acceptance += SMOOTHING * (
                math.exp(chain.path_logprob - before) - self._next_token_acceptance
            )
            longer.append(chain)
        self._latency.observe(rows, time.monotonic() - begin)
        return longer

    def _followed(self, session: Session) -> PrefixState | None:
        """What has been read of a session, brought up to its text; None if nothing can be guessed for it now."""
        prefix = self._prefixes.get(session)
        if prefix is None:
            table, source, target = self._pool.open(session.tree.committed, session.request.tenant)
            if len(source):
                self.engine.copy(source, target)
            prefix = self._prefixes[session] = PrefixState(session, table, self._context, self.engine.vocabulary)
        if prefix.follow():
            return prefix
        if prefix.over:
            self._close(prefix)
        return None

    def _close(self, prefix: PrefixState, *, wipe: bool = False) -> None:
        """Give its memory back."""
        prefix.over = True
        spoiled = prefix.table.close(wipe=wipe)
        if len(spoiled) and self.works:
            try:
                self.engine.copy(np.full(len(spoiled), PADDING_SLOT), spoiled)
            except Exception as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        log.error("own_draft_failed", exc_info=error)
        self.works = False
