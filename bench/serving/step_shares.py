"""Measure the processor time of a text in a verifier's step loop under another tenant's load.

    python -m bench step-shares [--kinds texts lookahead --texts 8 --rounds 1]

The loop is stepped in one thread, without messages, drafts or processes, and its clock is processor time too, so on a
busy machine the ratios are more reliable than in `bench shares`. A quiet tenant decodes text after text alone, then
together with another tenant of equal weight, which has a constant number of sessions of one kind. With fair sharing the
ratio is at most 2.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import count
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.arguments import parser_of
from demo.prompts import held_out
from specdec.decoding.lookahead import Lookahead
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.decoding.speculation import NO_DRAFTERS, OWN_DRAFTERS
from specdec.engine.engines.loading import load_engine
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar, Kind
from specdec.local import DEMO
from testing.mailbox import Mailbox
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.sessions.running_session import RunningSession
from verifier_service.step_loop import StepLoop

PROMPT_TOKENS, TOKENS = 64, 48
CAPACITY = 1 << 16
MAX_CANDIDATES = 64
TARGET = ModelDirectory(DEMO / "target")
GRAMMARS = GrammarCompiler.of(TARGET)
PLAIN = Policy(NO_DRAFTERS, 0, 0.0)
PROPOSERS = Policy(OWN_DRAFTERS, MAX_CANDIDATES, 0.0)
WINDOW = Policy(OWN_DRAFTERS, MAX_CANDIDATES, 0.0, lookahead=Lookahead(15, 5, 15))

GREEDY = Sampling()
REGEX = Grammar(Kind.REGEX, (r"([a-zA-Z0-9 ,.;:!?'-]{1,40}\n)*",))


class Asked(NamedTuple):
    """A load of the other tenant: its sessions, and the request of each."""

    sessions: int  # at any time
    policy: Policy = PLAIN
    tokens: int = 256
    sampling: Sampling = GREEDY
    grammar: Grammar | None = None


KINDS = {
    "texts": Asked(16),
    "proposers": Asked(16, PROPOSERS),
    "lookahead": Asked(16, WINDOW),
    "samples": Asked(240),
    "grammar": Asked(16, PROPOSERS, sampling=Sampling(temperature=1.0), grammar=REGEX),
    "prompts": Asked(1, tokens=1),
}
QUIET = Asked(1, tokens=TOKENS)


class Stream:
    """A session of the step loop."""

    def __init__(self, loop: StepLoop, tenant: str, prompt: list[int], asked: Asked) -> None:
        grammar = None if asked.grammar is None else GRAMMARS.compile(asked.grammar, tenant)
        request = VerifierSessionRequest(
            prompt=prompt,
            generated=[],
            sampler=RequestSampler(asked.sampling),
            end_tokens=frozenset(),
            max_tokens=asked.tokens,
            top_logprobs=None,
            context=loop.context,
            tenant=tenant,
            grammar=grammar,
        )
        self.session = loop.session(request, asked.policy, MAX_CANDIDATES, TARGET.vocabulary)
        self.mail = Mailbox()
        loop.attach(RunningSession(self.session, self.mail, lambda result, times: (result, times)))

    @property
    def over(self) -> bool:
        if self.mail.error is not None:
            raise self.mail.error
        self.session.consumed = self.session.tree.base  # all of it has been read
        return bool(self.mail.finish)


class Site:
    """A step loop, and the other tenant's sessions."""

    def __init__(self) -> None:
        engine = load_engine(TARGET, Placement("torch", "float32", kv_tokens=CAPACITY), threads=(1,))
        self.loop = StepLoop(engine, max_unread_tokens=1 << 20)
        self._prompts = prompts()
        self._others: list[Stream] = []
        self._more: Callable[[], Stream] | None = None
        self._sessions = 0

    def crowd(self, kind: str) -> None:
        """Keep the other tenant's sessions of a kind running from now on."""
        asked = KINDS[kind]
        self._sessions = asked.sessions
        self._more = lambda: Stream(self.loop, "other", next(self._prompts), asked)

    def leave(self) -> None:
        """End the other tenant's sessions."""
        for stream in self._others:
            self.loop.detach(stream.session)
        self._others, self._more = [], None

    def turn(self) -> None:
        if self._more is not None:
            self._others = [stream for stream in self._others if not stream.over]
            self._others += [self._more() for _ in range(self._sessions - len(self._others))]
        if self.loop.turn() is None:
            raise RuntimeError("some sessions are unfinished, and the loop has no work")

    def text(self) -> tuple[float, float]:
        """Return the processor seconds until a quiet tenant's first token, and from there to its last."""
        begin = time.process_time()
        stream = Stream(self.loop, "quiet", next(self._prompts), QUIET)
        first: float | None = None
        while not stream.over:
            self.turn()
            if first is None and stream.mail.results:
                first = time.process_time()
        assert first is not None
        return first - begin, time.process_time() - first


def prompts() -> Iterator[list[int]]:
    """Yield prompts endlessly, distinct until all are used."""
    for seed in count():
        yield from held_out(64, tokens=PROMPT_TOKENS, seed=seed)


def measured(site: Site, kind: str, texts: int, warm_up: int) -> dict[str, Any]:
    """Return the cost of a quiet text under this kind of load as a multiple of its cost alone, by medians."""
    alone = [site.text() for _ in range(texts)]
    site.crowd(kind)
    for _ in range(warm_up):
        site.turn()
    beside = [site.text() for _ in range(texts)]
    site.leave()
    of_first, of_rest = (median(each) for each in zip(*alone, strict=True))
    first, rest = (median(each) for each in zip(*beside, strict=True))
    return {
        "kind": kind,
        "alone_ms": round(1e3 * of_rest, 1),
        "first": round(first / of_first, 2),
        "rest": round(rest / of_rest, 2),
    }


def main(given: list[str]) -> None:
    parser = parser_of("step-shares", __doc__)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument(
        "--texts", type=int, default=8, help="texts of the quiet tenant in each measurement (default: 8)"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--warm-up", type=int, default=50, help="steps with the other tenant alone, before (default: 50)"
    )
    args = parser.parse_args(given)
    torch.set_num_threads(1)
    time.monotonic = time.process_time  # the clock of the loop's own step times
    site = Site()
    for _ in range(args.texts):  # warm-up of the loop's estimates
        site.text()
    for _ in range(args.rounds):
        for kind in args.kinds:
            print(json.dumps(measured(site, kind, args.texts, args.warm_up)), flush=True)
