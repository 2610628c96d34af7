"""The prompt tokens of a step (chunked prefill): chunks beside decoding sessions, within their tenants' parts and the
memory for logits.

A step with prompts is longer, and all decoding sessions wait for it; smaller chunks make the prompt itself take longer.
As in Sarathi-Serve (Agrawal et al. 2024), the slowdown of a step is bounded.

With T_v(n) the seconds of a step over n rows, and s the slowdown of steps with prompts (`PrefillSlowdown`):

- Decoding sessions sit out a step for urgent prompts of other tenants (`TenantShares.urgent`) if the step would take
  notably longer with them. With p urgent prompt rows, d decoding sessions in total, and d' that do not yield:

      T_v(p + d)  >  worth_a_wait * T_v(p + d')

- Chunks of prompts fill the rest of the step. With r rows of d decoding sessions, and P prompts, chunks of c tokens in
  total are within the time limit if

      s * T_v(r + c) <= max((1 + max_decode_slowdown * k) * T_v(r), slice_seconds * k),    k = max(1, P / d)

- Each row of a prompt that needs log-probabilities has logits: m such rows fit beside k candidates if
  m + k <= MAX_STEP_CANDIDATES.
- c tokens of a tenant with t seconds left in its part fit beside r rows if

      s * (T_v(r + c) - T_v(r))  <=  t
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from specdec.engine.working_memory import MAX_STEP_CANDIDATES
from verifier_service.costs.step_latency import StepLatency
from verifier_service.scheduling.cpu_threads import ThreadPolicy
from verifier_service.scheduling.shares import NO_URGENT, Urgent, prompt_weights
from verifier_service.scheduling.step_shares import Division, StepShares
from verifier_service.sessions.running_session import RunningSession
from verifier_service.settings.tuning import DEFAULTS, PrefillTuning

Chunk = tuple[RunningSession, int]
"""A session, and the number of its prompt's tokens to compute."""


class PrefillSlowdown:
    """Moving average of (duration of steps with prompts) / T_v(n). T_v is measured over short texts, but a row of a
    long prompt attends to everything before it."""

    def __init__(self, tuning: PrefillTuning = DEFAULTS.prefill) -> None:
        self._tuning = tuning
        self.factor = 1.0

    def observe(self, expected: float, seconds: float) -> None:
        """Add a step with prompts: its duration and its expected duration by T_v, in seconds."""
        self.factor += self._tuning.slowdown_smoothing * (max(1.0, seconds / expected) - self.factor)


class StepPrompts:
    """Chooses the chunks of prompts in a step. Row limits: `step_rows` for a step with decoding sessions, to which the
    time limit of chunked prefill applies too; `prefill_rows` for a step of only prompts."""

    def __init__(
        self, threads: ThreadPolicy, shares: StepShares, step_rows: int, prefill_rows: int, tuning: PrefillTuning
    ) -> None:
        self._threads = threads
        self._shares = shares
        self._step_rows = step_rows
        self._prefill_rows = prefill_rows
        self._tuning = tuning
        self.slowdown = PrefillSlowdown(tuning)

    def worth_sitting_out(
        self, prompts: Sequence[RunningSession], urgent: Urgent, decoding: Sequence[RunningSession]
    ) -> bool:
        """Return whether sessions yielding to `urgent` prompts sit out this step: only if it gets notably shorter."""
        # In the flat region of T_v, decoding sessions hardly delay the prompts, and sitting out would gain nothing.
        rows = sum(entry.session.computable for entry in prompts if entry.tenant in urgent.tenants)
        if not rows:
            return False
        staying = sum(entry.tenant not in urgent.yielding for entry in decoding)
        rows = min(rows, self._prefill_rows)
        latency = self._threads.latency
        return latency.of(rows + len(decoding)) > self._tuning.worth_a_wait * latency.of(rows + staying)

    def chunks(
        self,
        prompts: Sequence[RunningSession],
        urgent: Urgent,
        decoding: int,
        rows: int,
        candidates: int,
        division: Division | None,
        *,
        goes_first: bool,
    ) -> list[Chunk]:
        """Return how many tokens of each prompt to compute beside `rows` rows of `decoding` sessions, which have
        `candidates` candidates. Prompts of urgent tenants come first; with `goes_first`, they are limited neither by
        decoding sessions nor by their tenants' parts of the step."""
        chunks = self._filling(prompts, urgent, decoding, rows, goes_first=goes_first)
        chunks = self._with_room_for_scores(chunks, candidates)
        if division is None:
            return chunks
        return self._within_parts(chunks, division, urgent if goes_first else NO_URGENT, rows)

    def _filling(
        self, prompts: Sequence[RunningSession], urgent: Urgent, decoding: int, rows: int, *, goes_first: bool
    ) -> list[Chunk]:
        """Return the chunks that fill the step."""
        first = [entry for entry in prompts if entry.tenant in urgent.tenants]
        others = [entry for entry in prompts if entry.tenant not in urgent.tenants]
        if goes_first:
            budget = max(self._tuning.min_chunk_tokens, self._prefill_rows - rows)
        else:
            budget = self._budget(len(first), decoding, rows)
        ahead = _divided(first, budget)
        urgent_rows = sum(chunk for _, chunk in ahead)
        return ahead + _divided(others, self._budget(len(others), decoding, rows, urgent_rows))

    def _budget(self, prompts: int, decoding: int, rows: int, urgent_rows: int = 0) -> int:
        """Return how many tokens of `prompts` prompts to compute beside `rows` rows of `decoding` sessions and
        `urgent_rows` rows of urgent prompts.

        Without decoding sessions, `prefill_rows` alone limits the prompts, urgent ones included. With decoding
        sessions, the lowest multiple of `step_rows` that leaves room for `min_chunk_tokens` limits all rows together,
        and the time limit in the module docstring applies too.
        """
        if not decoding:
            return self._prefill_rows - urgent_rows
        latency, tuning, most = self._threads.latency, self._tuning, self._step_rows
        prefills = max(1.0, prompts / decoding)  # per decoding session: many prompts may take more of a step
        seconds = max((1.0 + tuning.max_decode_slowdown * prefills) * latency.of(rows), tuning.slice_seconds * prefills)
        full = most * math.ceil((rows + tuning.min_chunk_tokens) / most)
        within = min(full, latency.rows_within(seconds / self.slowdown.factor))
        # At least `min_chunk_tokens`: a prompt must progress even if decoding alone fills the step.
        return max(tuning.min_chunk_tokens, within - rows - urgent_rows)

    def _with_room_for_scores(self, chunks: list[Chunk], candidates: int) -> list[Chunk]:
        """Cut chunks of prompts that need log-probabilities to fit the memory for logits left by the step's
        candidates."""
        scored = [(entry, chunk) for entry, chunk in chunks if entry.session.scores_prompt]
        most = max(self._tuning.min_chunk_tokens, MAX_STEP_CANDIDATES - candidates)
        if sum(chunk for _, chunk in scored) <= most:
            return chunks
        return [(entry, chunk) for entry, chunk in chunks if not entry.session.scores_prompt] + _cut(scored, most)

    def _within_parts(self, chunks: Sequence[Chunk], division: Division, unlimited: Urgent, rows: int) -> list[Chunk]:
        """Cut chunks to their tenants' parts of the step, beside `rows` rows; chunks of `unlimited` tenants stay
        whole."""
        kept: list[Chunk] = []
        latency = self._threads.latency
        of_tenant: defaultdict[str, list[Chunk]] = defaultdict(list)
        for entry, chunk in chunks:
            of_tenant[entry.tenant].append((entry, chunk))
        for tenant, own in of_tenant.items():
            seconds = division.prompt_seconds.get(tenant)
            if seconds is not None and tenant not in unlimited.tenants:
                own = _cut(own, self._fitting(seconds, rows, latency))
                count = sum(chunk for _, chunk in own)
                took = (latency.of(rows + count) - latency.of(rows)) * self.slowdown.factor
                self._shares.charge(tenant, took - seconds)
            rows += sum(chunk for _, chunk in own)
            kept += own
        return kept

    def _fitting(self, seconds: float, rows: int, latency: StepLatency) -> int:
        """Return the number of prompt rows that fit in these seconds of a step, beside `rows` rows."""
        # The part is in seconds of this step, T_v in seconds of short texts: divide by the slowdown.
        fitting = latency.rows_within(latency.of(rows) + seconds / self.slowdown.factor) - rows
        # A prompt must progress: if its minimum chunk exceeds the part, the excess is charged to the next steps.
        return max(fitting, self._tuning.min_chunk_tokens if seconds > 0 else 0)


def _divided(prompts: Sequence[RunningSession], budget: int) -> list[Chunk]:
    """Return how many tokens of each prompt to compute, at least one. The prompts share the budget by weight, and the
    unused share of a short prompt goes to the others (max-min)."""
    remaining, weights = [entry.session.computable for entry in prompts], prompt_weights(prompts)
    shares = [0] * len(prompts)
    waiting = sum(weights)
    # Smallest need per weight first: its unused share is then divided among the rest.
    for index in sorted(range(len(remaining)), key=lambda index: remaining[index] / weights[index]):
        shares[index] = min(remaining[index], max(1, int(budget * weights[index] / max(waiting, weights[index]))))
        budget -= shares[index]
        waiting -= weights[index]
    return list(zip(prompts, shares, strict=True))


def _cut(chunks: list[Chunk], most: int) -> list[Chunk]:
    """Return chunks cut to `most` tokens in total, in proportion, rounded in favour of the first ones."""
    left = sum(chunk for _, chunk in chunks)
    if left <= most:
        return chunks
    cut = []
    for entry, chunk in chunks:
        own = math.ceil(most * chunk / left) if left else 0
        most, left = most - own, left - chunk
        if own:
            cut.append((entry, own))
    return cut
