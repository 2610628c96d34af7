"""A target without a model, and hand-driven sessions.

`TextEngine` stores in every KV slot the number of the text ending there, computed from the slots that the row reads. A
wrong slot, path, position or copy therefore shows immediately: the logits, a function of that text alone, become those
of another text. `reference` returns the tokens that a session must get under any schedule.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.decoding.choice import Tokens
from specdec.decoding.logprobs import TokenLogprobs
from specdec.decoding.query import PenaltyState, RequestSampler, SamplingQuery
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import CandidateSource
from specdec.decoding.step_logits import StepLogits
from specdec.decoding.tree import Paths
from specdec.engine.batch import PackedBatch
from specdec.engine.cpu.layout import RaggedBatch, RaggedPacker
from specdec.engine.engine import Pass
from specdec.engine.gpu.sampler import GpuLogits
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import PADDING_SLOT, Slots
from specdec.engine.row_counts import InvariantRowCounts
from specdec.engine.working_memory import MAX_STEP_CANDIDATES
from testing.mailbox import Mailbox
from tests.choices import choose_token
from tests.paged import Paged
from tests.verifier_service.plain_loop import PlainLoop
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.result import Mode
from verifier_service.costs.step_latency import StepLatency
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import LatencyTuning
from verifier_service.speculation.controller import BatchProfile, SpeculationController
from verifier_service.step_loop import StepLoop

REMOTE = frozenset({CandidateSource.REMOTE})

VOCABULARY = 12
END = 1
BAD = 11
"""Token id with NaN logits, for its own row and every row reading its slot."""

UNWRITTEN = -1


class Language:
    """The fake model: logits for every text. Texts are numbered; 0 is the empty one."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], int] = {}
        self.seeds = [0]
        self.tokens = [0]  # last token of each text
        self._logits: dict[int, NDArray[np.float32]] = {}
        self.prefixes: list[NDArray[np.int64]] = [np.arange(0)]  # numbers of a text's prefixes, itself included

    def number(self, before: int, token: int) -> int:
        number = self._numbers.get((before, token))
        if number is None:
            number = self._numbers[before, token] = len(self.seeds)
            self.seeds.append(zlib.crc32(bytes([token]), self.seeds[before]))
            self.tokens.append(token)
            self.prefixes.append(np.append(self.prefixes[before], number))
        return number

    def number_of(self, text: Sequence[int]) -> int:
        number = 0
        for token in text:
            number = self.number(number, token)
        return number

    def logits(self, number: int) -> NDArray[np.float32]:
        if number not in self._logits:
            random = np.random.default_rng(self.seeds[number])
            self._logits[number] = random.normal(size=VOCABULARY).astype(np.float32)
        return self._logits[number]


LANGUAGE = Language()


def reference(request: VerifierSessionRequest) -> list[int]:
    """Return a session's expected tokens, chosen one by one by plain decoding."""
    sampler, text = request.sampler, request.prompt + request.generated
    penalty_state = PenaltyState(VOCABULARY, request.prompt, request.generated) if sampler.sampling.penalises else None
    number = LANGUAGE.number_of(text)
    tokens: list[int] = []
    while True:
        so_far = text + tokens
        ruled_out = [
            last for *before, last in sampler.sampling.banned_sequences if so_far[len(so_far) - len(before) :] == before
        ]
        token = choose_token(sampler, LANGUAGE.logits(number), len(so_far), penalty_state, ruled_out=ruled_out)
        tokens.append(token)
        length = len(text) + len(tokens)
        if token in request.end_tokens or length >= min(len(request.prompt) + request.max_tokens, request.context):
            return tokens
        number = LANGUAGE.number(number, token)
        if penalty_state is not None:
            penalty_state.extend([token])


class TextEngine:
    """An engine with `blocks` blocks (the first reserved) and `tree_slots` further slots."""

    exact = True
    numerics = "text"
    vocabulary = VOCABULARY
    bad = BAD

    def __init__(
        self, blocks: int, tree_slots: int = MAX_STEP_CANDIDATES, rows: InvariantRowCounts | None = None
    ) -> None:
        self.capacity = blocks * BLOCK + tree_slots
        self.memory = np.full(self.capacity, UNWRITTEN)
        self.broken = np.zeros(self.capacity, dtype=bool)  # holds NaN
        self.faults: list[str] = []
        self.steps: list[int] = []  # rows per step, without padding
        self.failure: Exception | None = None  # raised by the next pass
        self.poison: int | None = None  # every pass over this token fails
        self.dead = False  # every pass fails
        self._rows = rows

    def packer(self) -> RaggedPacker:
        return RaggedPacker(rows=self._rows)

    def speak(self, number: int) -> NDArray[np.float32]:
        """Return the logits [V] after a text."""
        return LANGUAGE.logits(number)

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        assert isinstance(batch, RaggedBatch)
        batch.check(self.capacity)
        written = batch.slots[batch.slots != PADDING_SLOT]
        self.steps.append(len(written))
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        if self.dead or self.poison in batch.tokens:
            self.broken[written] = True  # a failed pass may have written already
            raise RuntimeError("the device is gone" if self.dead else "a token that cannot be")
        if len(set(written.tolist())) < len(written):
            self.faults.append("two rows write one slot")
        tokens, slots = batch.tokens.tolist(), batch.slots.tolist()
        numbers = np.zeros(len(tokens), dtype=np.int64)
        paths = [batch.keys[f : f + p + 1] for f, p in zip(batch.first.tolist(), batch.positions.tolist(), strict=True)]
        spoilt = self.bad in tokens or bool(self.broken.any())  # otherwise no row can become NaN
        for row in np.argsort(batch.positions, kind="stable").tolist():  # rows read what earlier rows have written
            path, slot, token = paths[row], slots[row], tokens[row]
            before = max(0, int(self.memory[path[-2]])) if len(path) > 1 else 0
            numbers[row] = self.memory[slot] = LANGUAGE.number(before, token)
            self.broken[slot] = spoilt and (token == self.bad or bool(self.broken[path[:-1]].any()))
        for row, path in enumerate(paths):
            if self.memory[path].tobytes() != LANGUAGE.prefixes[numbers[row]].tobytes():  # quicker than lists
                self.faults.append(f"row {row} at position {len(path) - 1} does not read one text")
        logits = np.array([self.speak(number) for number in numbers[batch.wanted].tolist()], dtype=np.float32)
        logits = logits.reshape(-1, VOCABULARY)
        logits[self.broken[batch.slots[batch.wanted]]] = np.nan
        return logits

    def copy(self, source: Slots, target: Slots) -> None:
        self.memory[target] = self.memory[source]
        self.broken[target] = self.broken[source]


class ThreadedTextEngine(TextEngine):
    """A CPU text engine with an adjustable thread count, `used`."""

    threads: tuple[int, ...] = (2, 1)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.used = self.threads[0]

    def use_threads(self, count: int) -> None:
        assert count in self.threads
        self.used = count


class DeviceTextEngine(TextEngine):
    """A text engine whose logits stay on the device: tokens can be chosen only from rows announced in advance."""

    def launch(self, batch: PackedBatch) -> Pass:
        return DevicePass(self.forward(batch))


@dataclass
class DevicePass:
    """A pass that completes when launched: memory changes as on a device that runs all work in order."""

    wanted: NDArray[np.float32]
    waited: bool = False

    def logits(self, asked: Callable[[], Mapping[int, SamplingQuery]]) -> StepLogits:
        self.waited = True
        return Announced(torch.from_numpy(self.wanted), asked())


class QueuedTextEngine(DeviceTextEngine):
    """A text engine that takes the next pass before the last one is committed."""

    queues_passes = True
    last = DevicePass(np.zeros((0, VOCABULARY), dtype=np.float32), waited=True)

    @property
    def computes(self) -> bool:
        """True if the last pass has been launched and not waited for."""
        return not self.last.waited

    def launch(self, batch: PackedBatch) -> Pass:
        self.last = DevicePass(self.forward(batch))
        return self.last


class Announced(GpuLogits):
    def choose(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> tuple[Tokens, NDArray[np.bool_]]:
        assert self._known.keys() >= set(rows)
        return super().choose(rows, queries)


class Decided(SpeculationController):
    """A controller with a fixed mode."""

    def __init__(self, mode: Mode) -> None:
        super().__init__()
        self.decided = mode

    @property
    def mode(self) -> Mode:
        return self.decided

    def mode_for(self, batch: BatchProfile, now: float) -> Mode:
        return self.decided


class FixedLatency(StepLatency):
    """Step latency of `of_any` + `slope` per row; observations are ignored."""

    def __init__(self, slope: float, *, of_any: float = 1.0) -> None:
        certain = LatencyTuning(start_error=0.0)  # no exploration
        super().__init__((1, 1001), [of_any + slope, of_any + 1001 * slope], certain)

    def observe(self, rows: int, seconds: float) -> None:
        pass


FREE, DEAR = FixedLatency(0.0), FixedLatency(10.0)


class PagedTextEngine(Paged):
    """A text engine without tree slots: candidates must be chains."""

    inner: TextEngine

    def __init__(self, blocks: int, _: int = 0, rows: InvariantRowCounts | None = None) -> None:
        super().__init__(TextEngine(blocks, 0, rows))


class Client:
    """A session of a step loop whose thread is not started: tests call `turn`."""

    def __init__(
        self,
        loop: StepLoop | PlainLoop,
        prompt: Sequence[int],
        max_tokens: int = 20,
        *,
        generated: Sequence[int] = (),
        sampling: Sampling | None = None,
        end_tokens: frozenset[int] = frozenset(),
        tenant: str = "",
        weight: float = 1.0,
        priority: int = 0,
        deadline: float | None = None,
        top_logprobs: int | None = None,
        max_candidates: int = 8,
        rule: Rule = Rule.COUPLED,
        policy: Policy | None = None,
        rejected_candidates: bool = False,
        coalesce_commits: bool = False,
        prompt_logprobs: int | None = None,
        scored_tokens: int = 0,
        cache_salt: str = "",
        knows_its_tenant: bool = False,
    ) -> None:
        """With `knows_its_tenant`, the session starts with what the loop learned from the tenant's earlier texts."""
        sampler = RequestSampler(sampling or Sampling(), end_tokens, rule=rule)
        request = VerifierSessionRequest(
            list(prompt),
            list(generated),
            sampler,
            end_tokens,
            max_tokens,
            top_logprobs,
            loop.context,
            tenant,
            weight,
            priority,
            deadline,
            rejected_candidates=rejected_candidates,
            coalesce_commits=coalesce_commits,
            prompt_logprobs=prompt_logprobs,
            scored_tokens=scored_tokens,
            cache_salt=cache_salt,
        )
        policy = policy or Policy(REMOTE, max_candidates, 0.0)
        chains_only = isinstance(loop, StepLoop) and loop.chains_only
        if knows_its_tenant and isinstance(loop, StepLoop):
            self.session = loop.session(request, policy, 64, VOCABULARY)
        else:
            self.session = VerifierSession(request, policy, 64, VOCABULARY, chains_only=chains_only)
        self.want = reference(request)
        self.mail = Mailbox()
        self.running = RunningSession(self.session, self.mail)
        self._loop = loop
        loop.enqueue(self.running)

    @property
    def tokens(self) -> list[int]:
        return [token for result in self.mail.results for token in result.tokens]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [p for result in self.mail.results for p in result.logprobs]

    @property
    def over(self) -> bool:
        return bool(self.mail.finish) or self.mail.error is not None

    @property
    def has_memory(self) -> bool:
        return self.session.table is not None

    def read(self) -> None:
        """Mark all received tokens as consumed, as the stream would."""
        self.session.client_has_read(len(self.session.request.generated) + len(self.tokens), self.session.scored)

    def offer(self, right: int, wrong: Sequence[int] = ()) -> None:
        """Propose the next `right` correct tokens as a chain, with one token of `wrong` as a sibling at each
        position."""
        done = len(self.tokens)
        chain = self.want[done : done + right]
        tokens, parents, logprobs = list(chain), list(range(len(chain))), [-0.1] * len(chain)
        for parent, token in enumerate(wrong[: len(chain) + 1]):
            if parent >= len(chain) or token != chain[parent]:
                tokens.append(token)
                parents.append(parent)
                logprobs.append(-0.05 if parent % 2 else -1.0)  # some siblings look better than the correct token
        self.session.extend(self.session.tree.base, Paths(tokens, parents, logprobs), 0.0)

    def cancel(self) -> None:
        self._loop.detach(self.session)


def run(loop: StepLoop | PlainLoop, *clients: Client, turns: int = 2000) -> None:
    """Turn the loop until all clients are over, reading all their tokens; raise AssertionError after `turns` turns or
    without progress."""
    for _ in range(turns):
        for client in clients:
            client.read()
        if all(client.over for client in clients):
            return
        assert loop.turn() == 0.0, "some are not over, and nothing moves"
    raise AssertionError(f"not over after {turns} turns")


def step_loop(engine: TextEngine | PagedTextEngine, latency: StepLatency = FREE, **options: Any) -> StepLoop:
    return StepLoop(engine, latency=latency, **options)
