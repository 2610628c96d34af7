"""Grammar checks: a grammar is tried before any pod gets it, and again after a pod has died under it.

A dead pod reports no reason. So every grammar that was open there is tried again in isolation, along its text, before
that text goes to another pod. A grammar with repeated deaths is quarantined even if its trials pass.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import structlog

from orchestrator.pods.errors import LostError
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import SAME_DEATH_SECONDS, Pod, PodDeath
from orchestrator.requests.sample import CommittedText, Sample
from specdec.grammar.grammar import Grammar
from specdec.serving.errors import InternalError, InvalidRequestError, OverloadedError
from specdec.serving.grammar_trials import PATIENCE, SECONDS, GrammarTrials, Key, key_of
from specdec.serving.messages import grammar_from

log = structlog.get_logger()

MAX_DEATHS = 3
"""Consecutive deaths of verifiers under one text, without growth in between, after which its grammar is refused. Deaths
of drafts do not count: while a text waits for a verifier, it does not grow, so unrelated deaths would add up."""

MAX_BLAME = 6.0
"""Total blame within DEATH_SECONDS, over all texts of a grammar, at which it is refused. The blame of a death is
1/(1+c) for a pod with a `crowd` of c, since a widespread grammar is open at every death, whatever the cause. Unrelated
kills count too (several a minute during node drains), so the limit is twice MAX_DEATHS."""

AMONG_OTHERS = 2
"""Factor on both limits while pods without the grammar die as well: something else is killing pods. The factor is
finite: two grammars killing pods in turns would otherwise excuse each other forever."""

DEATH_SECONDS = 60.0
"""Seconds until a death is forgotten."""

QUARANTINE_SECONDS = 60.0
"""Seconds of a grammar's quarantine."""

MAX_SUSPECTS = 1024
"""Maximum grammars with remembered deaths; the grammar whose last death is oldest is dropped first."""


class Death(NamedTuple):
    """The death of a pod, and the grammar's part in it."""

    at: float
    """Monotonic time."""
    pod: str
    blame: float

    def is_of(self, pod: str, at: float) -> bool:
        """Return True if this death also explains a session lost at this pod at this time."""
        return self.pod == pod and abs(self.at - at) < SAME_DEATH_SECONDS


class GrammarCheck:
    """Checks the grammars of requests for the model of a directory. Each check may take `seconds` of processor time,
    and `patience` seconds of wall-clock time."""

    def __init__(self, model: Path, seconds: float = SECONDS, patience: float = PATIENCE) -> None:
        self.trials = GrammarTrials(model, seconds, patience)
        self._deaths: OrderedDict[Key, deque[Death]] = OrderedDict()
        self._refused_until: dict[Key, float] = {}  # grammars in quarantine

    async def check(self, grammar: Grammar, field: str, tenant: str = "") -> None:
        """Check a grammar from this field of a tenant's request. Raise InvalidRequestError if it cannot be used,
        OverloadedError if it is in quarantine, or an error of `GrammarTrials.verdict`."""
        self.check_quarantine(grammar, field, tenant)
        verdict = await self.trials.verdict(grammar, tenant)
        if verdict.problem:
            raise InvalidRequestError([(field, verdict.problem)])

    def check_quarantine(self, grammar: Grammar, field: str, tenant: str) -> None:
        key = key_of(grammar, tenant)
        left = self._refused_until.get(key, 0.0) - time.monotonic()
        if left > 0:
            raise OverloadedError(f"{field}: pods have crashed repeatedly under this grammar, it is now refused", left)
        self._refused_until.pop(key, None)

    def watch(self, sample: Sample, text: CommittedText, peers: Peers) -> GrammarWatch | None:
        """Return the watch over a sample's grammar; None if it has none."""
        grammar = None if sample.grammar is None else grammar_from(sample.grammar)
        return None if grammar is None else GrammarWatch(self, grammar, sample, text, peers)

    def died(
        self,
        grammar: Grammar,
        tenant: str,
        pod: Pod,
        in_a_row: int,
        of_all: Iterable[PodDeath],
        *,
        counted: bool = False,
    ) -> None:
        """Count a pod's death under a grammar. `in_a_row`: consecutive deaths of verifiers under one text without
        growth, this one included; 0 if this death does not count. `of_all`: the deaths of all pods, with the grammar or
        without. `counted`: the text has counted this death already, at this pod or another."""
        key, now = key_of(grammar, tenant), time.monotonic()
        deaths = self._deaths.setdefault(key, deque())
        self._deaths.move_to_end(key)
        if len(self._deaths) > MAX_SUSPECTS:
            self._deaths.popitem(last=False)
        while deaths and deaths[0].at < now - DEATH_SECONDS:
            deaths.popleft()
        blame = 0.0 if counted else 1 / (1 + pod.load.crowd)
        same = [death for death in deaths if death.is_of(str(pod), now)]
        for death in same:
            deaths.remove(death)
            blame = max(blame, death.blame)
        deaths.append(Death(now, str(pod), blame))
        # A pod has died without this grammar: something else may be killing pods.
        others_die = any(
            at > now - DEATH_SECONDS and not any(death.is_of(address, at) for death in deaths) for at, address in of_all
        )
        total, most = sum(death.blame for death in deaths), AMONG_OTHERS if others_die else 1
        if in_a_row >= most * MAX_DEATHS or total >= most * MAX_BLAME:
            self._refused_until[key] = now + QUARANTINE_SECONDS
            for other, until in list(self._refused_until.items()):
                if until < now:
                    del self._refused_until[other]
            log.warning(
                "grammar_quarantined",
                tenant=tenant,
                kind=grammar.kind.value,
                sha256=key[1].hex(),
                in_a_row=in_a_row,
                blame=total,
            )

    async def close(self) -> None:
        await self.trials.close()


class GrammarWatch:
    """Watches the pods that have the grammar of one text."""

    def __init__(
        self, check: GrammarCheck, grammar: Grammar, sample: Sample, text: CommittedText, peers: Peers
    ) -> None:
        self._check = check
        self._peers = peers
        self._grammar = grammar
        self._sample = sample
        self._text = text
        self._suspect = False  # a pod has died since the last trial began
        self._losses = 0  # number of pods that died
        self._counted = False  # a death was counted since the last trial: draft and verifier may die together
        self._verifier_counted = False  # a verifier's death was counted since the last trial
        self._died_at: dict[Pod, float] = {}  # monotonic times
        self._in_a_row = 0  # deaths of verifiers since the text last grew
        self._length = -1  # length of the text at the last of these deaths
        self._trying = asyncio.Lock()

    def lost(self, pod: Pod, lost: LostError, *, verifier: bool) -> None:
        """Note that a session with the grammar was lost, at a verifier or a draft. It counts only if the pod died."""
        if not lost.died:
            return
        self._suspect = True
        self._losses += 1
        now = time.monotonic()
        # A session opened on a broken connection, before the break is noticed, is lost by the same death.
        same_death = self._died_at.get(pod, -math.inf) > now - SAME_DEATH_SECONDS
        counted, in_a_row = self._counted or same_death, 0
        if verifier and not (self._verifier_counted or same_death):
            length = len(self._text.generated)
            in_a_row = self._in_a_row + 1 if length == self._length else 1
            self._verifier_counted, self._in_a_row, self._length = True, in_a_row, length
        if in_a_row or not counted:
            self._counted, self._died_at[pod] = True, now
        of_all = (*self._peers.verifiers.deaths, *(self._peers.drafts.deaths if self._peers.drafts is not None else ()))
        self._check.died(self._grammar, self._sample.tenant, pod, in_a_row, of_all, counted=counted)

    async def retry_if_suspect(self) -> None:
        """Try the grammar again if a pod has died under it, before another pod gets it. InvalidRequestError if the
        trial fails, OverloadedError if the grammar is in quarantine."""
        if not self._suspect:
            return
        async with self._trying:
            self._check.check_quarantine(self._grammar, self._sample.grammar_field, self._sample.tenant)
            while self._suspect:  # a pod that dies during a trial may have died of later tokens
                losses = self._losses
                try:
                    verdict = await self._check.trials.replay(
                        self._grammar,
                        self._sample.tenant,
                        self._text.generated,
                        self._sample.end_tokens,
                        insistent=self._in_a_row > 1,
                    )
                except (OverloadedError, InternalError) as error:
                    # Continue the text: most grammars at a dead pod are innocent. Deaths still count.
                    log.warning("grammar_not_tried_again", why=str(error))
                    return
                finally:
                    if self._losses == losses:
                        self._counted = self._verifier_counted = False
                log.info("grammar_tried_again", tokens=len(self._text.generated), problem=verdict.problem)
                if verdict.problem:
                    raise InvalidRequestError([(self._sample.grammar_field, verdict.problem)])
                self._suspect = self._losses != losses
