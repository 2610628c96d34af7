"""A verifier and a draft without threads or network: messages between them arrive at fixed ticks.

In a tick the step loop takes one turn; for that turn's duration on the virtual clock, the draft takes turns as well.
Every pass, commit and message of candidates becomes a line of the recording. The words in these lines belong to the
recording format, which does not follow renamings in the code.
"""

from __future__ import annotations

import logging
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import structlog

from draft_service.draft_loop import DraftLoop
from draft_service.language_model import LanguageModelDrafter
from draft_service.servicer import DraftLimits, DraftServicer
from orchestrator.generation.draft_control import DraftControl
from orchestrator.generation.speculation_policy import first_min_probability
from specdec.engine.engine import Engine
from specdec.serving.response_queue import ResponseQueue
from specdec.serving.timeline import Timeline
from specdec.v2 import draft_pb2, model_pb2, verifier_pb2
from tests.replay.clock import Clock
from tests.replay.engines import HabitEngine, TimedEngine
from tests.replay.scenarios import CONTRASTIVE, Request, Scenario
from verifier_service.proposers.draft_model import DraftModelProposer
from verifier_service.servicer import VerifierLimits, VerifierServicer
from verifier_service.step_loop import StepLoop

SERVICES = tuple(
    str(Path(__file__).parents[2] / folder)
    for folder in ("specdec/decoding", "specdec/serving", "verifier_service", "draft_service")
)
"""Packages whose calls are counted; engines are left out, since they are fakes here."""

IDLE_SECONDS = 0.005
"""Duration of a tick without a step."""

Engines = Callable[[Scenario], tuple[Engine, Engine, Engine | None]]
"""Target, draft, and the verifier's local draft, if a scenario has one."""


@dataclass
class Costs:
    """Costs of a recording. `calls`: calls of this project's Python functions in the turns of both loops."""

    tokens: int = 0
    target_passes: int = 0
    target_rows: int = 0
    draft_passes: int = 0
    draft_rows: int = 0
    messages: int = 0
    bytes: int = 0
    calls: int = 0


@dataclass
class Recording:
    lines: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)  # serialized, in hexadecimal
    costs: Costs = field(default_factory=Costs)


class Calls:
    """A context that counts calls of this project's Python functions if it is `on`, which takes much of the time."""

    def __init__(self, *, on: bool) -> None:
        self.count = 0
        self._on = on

    def __enter__(self) -> None:
        if self._on:
            sys.setprofile(self._seen)

    def __exit__(self, *_: object) -> None:
        if self._on:
            sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SERVICES):
            self.count += 1


class _AtOnce:
    def call_soon_threadsafe(self, callback: Callable[..., None], *args: Any) -> None:
        callback(*args)


class Mail(ResponseQueue[Any]):
    """Keeps a loop's messages to a session until they are taken."""

    def __init__(self) -> None:
        self._loop = _AtOnce()  # type: ignore[assignment]
        self._items: list[Any] = []

    @property
    def full(self) -> bool:
        return False

    def _append(self, item: Any) -> None:
        self._items.append(item)

    def take(self) -> list[Any]:
        items, self._items = self._items, []
        return items


class Text:
    """A running request: its sessions at both loops, and their messages."""

    def __init__(self, number: int, request: Request, prompt: list[int], generated: list[int]) -> None:
        self.number, self.request = number, request
        self.prompt, self.generated = prompt, generated
        self.verifier_mail, self.draft_mail = Mail(), Mail()
        self.verifier: Any = None
        self.draft: Any = None
        self.draft_control: DraftControl | None = None
        self.tokens = 0
        self.read = 0
        self.over = False


class Deployment:
    """`target`, `draft`, and optionally the verifier's `local` draft, on one `clock`."""

    def __init__(
        self,
        scenario: Scenario,
        target: TimedEngine,
        draft: TimedEngine,
        local: TimedEngine | None,
        clock: Clock,
        *,
        count_calls: bool,
    ) -> None:
        self._scenario, self._clock = scenario, clock
        self._target, self._draft = target, draft
        own = None if local is None else DraftModelProposer(local, 4096)
        self._steps = StepLoop(
            target,
            max_unread_tokens=scenario.max_unread_tokens,
            suffix_cache_tokens=scenario.suffix_cache_tokens,
            draft_model=own,
        )
        self._growth = DraftLoop(LanguageModelDrafter(draft))
        identity = model_pb2.ModelIdentity(vocabulary_size=target.vocabulary, context_tokens=1024)
        self._verifier = VerifierServicer(self._steps, identity, VerifierLimits())
        self._drafts = DraftServicer(self._growth, identity, DraftLimits())
        self._due: dict[int, list[Callable[[], None]]] = defaultdict(list)
        self._texts: list[Text] = []
        self._draft_now = clock.now
        self._tick = 0
        self._calls = Calls(on=count_calls)
        self.recording = Recording()
        for engine in (target, draft, *([] if local is None else [local])):
            engine.passes = engine.rows = 0
            getattr(engine.inner, "faults", []).clear()  # measurements so far have read unwritten memory

    def run(self) -> Recording:
        """Serve every request of the scenario to its end."""
        for number, request in enumerate(self._scenario.requests):
            self._open(number, request)
        for tick in range(self._scenario.ticks):
            self._tick = tick
            for deliver in self._due.pop(self._tick, []):
                deliver()
            begin = self._clock.now
            self._step()
            self._draft_until(begin, self._clock.now)
            if all(text.over for text in self._texts) and not any(self._due.values()):
                break
        else:
            raise AssertionError(f"not over after {self._scenario.ticks} ticks")
        for engine in (self._target, self._draft):
            assert getattr(engine.inner, "faults", []) == []
        costs = self.recording.costs
        costs.target_passes, costs.target_rows = self._target.passes, self._target.rows
        costs.draft_passes, costs.draft_rows = self._draft.passes, self._draft.rows
        costs.calls = self._calls.count
        return self.recording

    # --- both loops, turned by hand ------------------------------------------------------------------

    def _step(self) -> None:
        passes, rows, load = self._target.passes, self._target.rows, self._steps.stats
        candidates, preempted, moment = load.offered, load.preemptions, self._clock.now
        with self._calls:
            wait = self._steps.turn()
        if self._target.passes > passes:
            self._line(
                f"step at={moment - 1000:.6f} mode={self._steps._speculation.mode.value.replace('_', '-')} "
                f"rows={self._target.rows - rows} candidates={load.offered - candidates} "
                f"break_even={self._steps._speculation.eligibility.break_even:.5f} "
                f"preempted={load.preemptions - preempted}"
            )
        elif wait is None or wait > 0:
            self._clock.now += min(IDLE_SECONDS, IDLE_SECONDS if wait is None else wait) + 1e-9
            if wait is not None:
                self._line(f"waits {wait:.6f}")
        for text in self._texts:
            for item in text.verifier_mail.take():
                self._committed(text, item)

    def _draft_until(self, begin: float, end: float) -> None:
        """Let the draft take turns until `end`, from `begin` or from its own time, if that is later."""
        self._clock.now = max(begin, self._draft_now)
        passes, rows = self._draft.passes, self._draft.rows
        while self._clock.now < end:
            with self._calls:
                wait = self._growth.turn()
            for text in self._texts:
                for item in text.draft_mail.take():
                    self._extended(text, item)
            if wait is None or self._clock.now + wait >= end:
                break
            self._clock.now += wait + 1e-9 if wait else 0.0
        if self._draft.passes > passes:
            self._line(f"draft passes={self._draft.passes - passes} rows={self._draft.rows - rows}")
        self._draft_now, self._clock.now = self._clock.now, end

    # --- what the loops say --------------------------------------------------------------------------

    def _committed(self, text: Text, response: Any) -> None:
        if isinstance(response, Exception):
            self._line(f"{text.number} ended by {response!r}")
            text.over = True
            return
        commit = response.commit
        self._count(response)
        self.recording.costs.tokens += len(commit.committed.tokens)
        text.tokens += len(commit.committed.tokens)
        probabilities = [(round(p.chosen, 4), *p.top_tokens) for p in commit.logprobs]
        told = {
            "base": commit.committed.base,
            "tokens": _list(commit.committed.tokens),
            "sources": _list(commit.sources),
            "offered": commit.offered,
            "accepted": commit.accepted,
            "steps": commit.steps,
            "finish": commit.finish_reason,
            "break_even": f"{commit.min_candidate_probability if commit.drafting_wanted else 1.0:.5f}",
            "drafted": commit.drafted_sessions,
            "waited": commit.waited_us,
            "queued": commit.queued_us,
            "found": commit.cached_tokens,
            "preempted": commit.preemptions,
            "round_trip": commit.round_trip_us,
            "logprobs": probabilities,
        }
        self._line(f"{text.number} commit " + " ".join(f"{name}={value}" for name, value in told.items() if value))
        if commit.finish_reason:
            text.over = True
            self._leave(text)
        elif text.draft_control is not None:
            for message in text.draft_control.messages(commit):
                self._to_draft(text, message)

    def _extended(self, text: Text, response: Any) -> None:
        if isinstance(response, Exception):
            self._line(f"{text.number} draft ended by {response!r}")
            return
        self._count(response)
        extend = response.extend
        nodes = repr([*zip(extend.tokens, extend.parents, extend.logprob_bytes, strict=True)])
        rows = repr([(row.parent, *row.ids, row.values) for row in extend.distributions])
        self._line(
            f"{text.number} extend base={extend.base} nodes={len(extend.tokens)}:{_sum(nodes)} "
            f"rows={len(extend.distributions)}:{_sum(rows)} held={extend.base_age_us}"
        )
        message = verifier_pb2.VerifyRequest(extend=extend)
        self._later(text.request.delay, lambda: self._to_verifier(text, message))

    # --- what is said to them ------------------------------------------------------------------------

    def _open(self, number: int, request: Request) -> None:
        random = np.random.default_rng(number if request.same is None else request.same)
        prompt = random.integers(2, self._target.vocabulary - 1, request.prompt).tolist()
        generated = random.integers(2, self._target.vocabulary - 1, request.generated).tolist()
        text = Text(number, request, prompt, generated)
        self._texts.append(text)
        at = self._due[request.arrives]
        at.append(lambda: self._open_verifier(text))
        for tick, policy in request.later.items():
            change = verifier_pb2.VerifyRequest(policy=verifier_pb2.VerifyPolicy(**{**request.policy, **policy}))
            self._due[tick].append(lambda change=change: self._to_verifier(text, change))  # type: ignore[misc]
        if request.resends is not None:
            again = draft_pb2.DraftRequest(resend=draft_pb2.Resend())
            self._due[request.resends].append(lambda: self._to_draft(text, again))
        if request.leaves is not None:
            self._due[request.leaves].append(lambda: self._leave(text))

    def _common(self, text: Text) -> dict[str, Any]:
        options = {
            name: text.request.options[name]
            for name in ("min_tokens", "contrast", "tenant")
            if name in text.request.options
        }
        return options | {
            "prompt_tokens": text.prompt,
            "generated_tokens": text.generated,
            "sampling": model_pb2.Sampling(**text.request.sampling),
            "rule": text.request.rule,
            "max_tokens": text.request.tokens,
            "end_tokens": text.request.options.get("end_tokens", []),
        }

    def _open_verifier(self, text: Text) -> None:
        policy = verifier_pb2.VerifyPolicy(**text.request.policy)
        opening = verifier_pb2.VerifyOpen(**{**text.request.options, **self._common(text)}, policy=policy)
        request = verifier_pb2.VerifyRequest(open=opening)
        self._count(request)
        text.verifier = self._verifier.parse(request, None)
        self._verifier.attach(text.verifier, text.verifier_mail, Timeline())
        opened = self._verifier.opened(text.verifier).opened
        break_even = opened.min_candidate_probability if opened.drafting_wanted else 1.0
        self._line(f"{text.number} opens break_even={break_even:.5f}")
        self._read(text)
        if text.request.draft is not None:
            needed = text.request.rule == CONTRASTIVE
            growth = draft_pb2.DraftPolicy(**text.request.draft)
            if not needed:
                growth.paused = not opened.drafting_wanted
                growth.min_path_probability = first_min_probability(break_even)
            text.draft_control = DraftControl(growth, needed=needed)
            self._later(text.request.delay, lambda: self._open_draft(text, growth))

    def _open_draft(self, text: Text, policy: draft_pb2.DraftPolicy) -> None:
        if text.over:
            return
        request = draft_pb2.DraftRequest(open=draft_pb2.DraftOpen(**self._common(text), policy=policy))
        self._count(request)
        text.draft = self._drafts.parse(request, None)
        self._drafts.attach(text.draft, text.draft_mail, Timeline())

    def _to_verifier(self, text: Text, request: verifier_pb2.VerifyRequest) -> None:
        if not text.over:
            self._count(request)
            self._verifier.act(text.verifier, request, self._clock.now)

    def _to_draft(self, text: Text, request: draft_pb2.DraftRequest) -> None:
        def act() -> None:
            if text.draft is not None and not text.over:
                self._count(request)
                self._drafts.act(text.draft, request, max(self._clock.now, self._draft_now))

        self._later(text.request.delay, act)

    def _read(self, text: Text) -> None:
        """Report received tokens as consumed, periodically."""
        if text.over:
            return
        if text.tokens > text.read:
            text.read = text.tokens
            consumed = verifier_pb2.Consumed(tokens=text.tokens + len(text.generated))
            self._to_verifier(text, verifier_pb2.VerifyRequest(consumed=consumed))
        self._later(text.request.reads, lambda: self._read(text))

    def _leave(self, text: Text) -> None:
        text.over = True
        self._verifier.detach(text.verifier)
        if text.draft is not None:
            self._drafts.detach(text.draft)

    def _later(self, ticks: int, action: Callable[[], None]) -> None:
        self._due[self._tick + max(1, ticks)].append(action)

    def _count(self, message: Any) -> None:
        wire = message.SerializeToString(deterministic=True)
        self.recording.messages.append(wire.hex())
        self.recording.costs.messages += 1
        self.recording.costs.bytes += len(wire)

    def _line(self, line: str) -> None:
        self.recording.lines.append(f"{self._tick} {line}")


def _sum(values: str) -> str:
    return f"{zlib.crc32(values.encode()):08x}"


def _list(values: Any) -> str:
    return ",".join(map(str, values))


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress all logging."""
    settings = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        structlog.configure(**settings)


def record(scenario: Scenario, engines: Engines, *, count_calls: bool = False) -> Recording:
    """Serve a scenario on a new clock; the costs include calls only if asked."""
    clock = Clock()
    target, draft, local = engines(scenario)
    with clock.rules(), _silence():
        return Deployment(
            scenario,
            TimedEngine(target, clock, scenario.base, scenario.row),
            TimedEngine(draft, clock, scenario.draft_base, scenario.draft_row),
            None if local is None else TimedEngine(local, clock, scenario.draft_base, scenario.draft_row),
            clock,
            count_calls=count_calls,
        ).run()


def made_up(scenario: Scenario) -> tuple[Engine, Engine, Engine | None]:
    """Return engines without models, the same on every machine."""
    local = HabitEngine(256, noise=1.2 * scenario.noise) if scenario.local_draft else None
    target = HabitEngine(scenario.blocks, threads=scenario.threads, row_counts=scenario.row_counts)
    return target, HabitEngine(256, noise=scenario.noise), local
