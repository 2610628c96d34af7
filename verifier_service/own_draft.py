"""A draft model of the verifier's own: it guesses between two steps.

A draft in a process of its own is for a device of its own: it guesses ahead while the target verifies. On the target's
cores it takes one of them from the target, and pays for every message. This one takes turns with the target: while it
guesses the target rests, either has every core, and nothing is sent. It reads a token of every session's chain in one
pass, for as long as that is worth its time, and nothing ahead of need.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import structlog

from specdec.decoding.calibration import Calibration
from specdec.decoding.sampling import Rule
from specdec.engine.batch import Packer
from specdec.engine.blocks import BLOCK, BlockPool
from specdec.engine.engine import Engine
from specdec.engine.kv import NOWHERE
from verifier_service.chain import Chain, Reading
from verifier_service.cost import StepCost
from verifier_service.session import Session

log = structlog.get_logger()

TEXT_ROWS = 256
"""Committed tokens that are read between two steps, over all sessions: who waits for the step waits for them."""

FIRST_HOPE, FIRST_PROMISE = 0.5, 1.0
LEARNS = 0.05


class OwnDraft:
    """Of the step loop's thread. `engine` knows the target's tokens; its bits may depend on what it reads together. A
    draft costs no token: one that fails is not asked again."""

    def __init__(self, engine: Engine, context: int, cost: StepCost | None = None) -> None:
        """`context`: tokens that its model can read of a text; `cost`: of a pass, measured unless it is known."""
        blocks = engine.capacity // BLOCK
        self._engine = engine
        self._context = context
        self._pool = BlockPool(blocks)
        self._cost = cost or StepCost.measure(engine, blocks * BLOCK)
        self._readings: dict[Session, Reading] = {}
        self._calibrations: defaultdict[tuple[Rule, float], Calibration] = defaultdict(Calibration)
        self._hope = FIRST_HOPE  # that the next token of a chain is right
        self._promise = FIRST_PROMISE  # right tokens of a chain
        self._failed = False

    @property
    def held(self) -> int:
        """Blocks of key/value memory."""
        return self._pool.held

    def guess(self, sessions: Sequence[Session], decoding: int, cost: StepCost, price: float) -> float:
        """Suggest to these sessions what may follow their texts, as far as it is worth its time before a step of
        `decoding` ones that costs T_v, where a row more costs `price` tokens. The seconds that it took."""
        begin = time.monotonic()
        if self._failed:
            return 0.0
        try:
            chains = self._begin([session for session in sessions if session.outlook()[0] - 1.0 < self._promise])
            self._go_on(chains, decoding, cost, price, begin)
        except Exception as error:
            log.error("own_draft_failed", exc_info=error)
            self._failed = True
            return 0.0
        for chain in chains:
            self._promise += LEARNS * (chain.promise - self._promise)
            chain.offer()
            if chain.broken:
                self.leave(chain.reading.session, wipe=True)
        return time.monotonic() - begin

    def leave(self, session: Session, *, wipe: bool = False) -> None:
        """Forget a session."""
        reading = self._readings.pop(session, None)
        if reading is not None:
            spoiled = reading.table.close(wipe=wipe)
            if len(spoiled):
                self._engine.copy(np.full(len(spoiled), NOWHERE), spoiled)

    def _begin(self, sessions: Sequence[Session]) -> list[Chain]:
        """Read what was committed, the shortest first; chains of those of whom nothing is unread."""
        readings = [reading for session in sessions if (reading := self._reading(session)).follow()]
        readings.sort(key=lambda reading: reading.unread)
        packer, budget = self._engine.packer(), TEXT_ROWS
        chains: list[Chain] = []
        for reading in readings:
            if not budget:
                break
            tokens, position, slots = reading.take(budget)
            budget -= len(tokens)
            rows = packer.add_rows(tokens, position, slots[position:])
            packer.add_path(slots, rows)
            if not reading.unread:
                packer.want(rows[-1])
                chains.append(Chain(reading, self._calibration(reading.session)))
        if packer.tokens:
            self._read(packer, chains)
        return chains

    def _go_on(self, chains: Sequence[Chain], decoding: int, cost: StepCost, price: float, begin: float) -> None:
        """Read the ends of chains, for as long as a pass over them brings more than the step would in its time."""
        expected, rows = float(decoding), decoding
        while chains:
            expected += sum(math.exp(chain.reach) for chain in chains)
            rows += len(chains)
            going = [chain for chain in chains if not chain.ended and self._gain(chain) > price]
            gain = sum(self._gain(chain) - price for chain in going)
            rate = expected / (cost.of(rows) + time.monotonic() - begin)
            if gain <= rate * self._cost.of(len(going)):
                return
            packer = self._engine.packer()
            for chain in going:
                token, position, slots = chain.take()
                row = packer.add_row(token, position, int(slots[position]))
                packer.add_path(slots, [row])
                packer.want(row)
            self._read(packer, going)
            chains = going

    def _gain(self, chain: Chain) -> float:
        """Tokens that one more in a chain is expected to bring."""
        return math.exp(chain.reach) * self._hope

    def _read(self, packer: Packer, chains: Sequence[Chain]) -> None:
        """One forward pass, and a guess more for each of these, whose rows are the wanted ones."""
        rows, begin = len(packer.tokens), time.monotonic()
        logits = self._engine.forward(packer.pack())
        for chain, row in zip(chains, logits, strict=False):  # others may be behind them
            before = chain.reach
            if chain.extend(row):
                self._hope += LEARNS * (math.exp(chain.reach - before) - self._hope)
        self._cost.observe(rows, time.monotonic() - begin)

    def _reading(self, session: Session) -> Reading:
        reading = self._readings.get(session)
        if reading is None:
            table, source, target = self._pool.open(session.tree.committed, session.request.tenant)
            if len(source):
                self._engine.copy(source, target)
            reading = self._readings[session] = Reading(session, table, self._context, self._engine.vocabulary)
        return reading

    def _calibration(self, session: Session) -> Calibration:
        chooser = session.request.chooser
        return self._calibrations[chooser.rule, chooser.sampling.temperature]
