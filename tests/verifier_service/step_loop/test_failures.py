"""Failed forward passes, NaN logits, and the load that the loop reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specdec.decoding.query import SamplingQuery, TokenMask
from specdec.decoding.sampling import Sampling
from specdec.decoding.step_logits import StepLogits
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import Pass
from specdec.engine.gpu.sampler import GpuLogits
from specdec.engine.kv.blocks import BLOCK
from specdec.grammar.grammar import GrammarTooComplexError
from specdec.serving.engine_worker import CHECK_SECONDS, LOST_SECONDS, SHORTAGE_PAUSES, SHORTAGE_SECONDS
from specdec.serving.errors import EngineLostError, GrammarFailureError, ModelFailureError, ShortOfMemoryError
from tests.verifier_service.fakes import (
    BAD,
    VOCABULARY,
    Client,
    PagedTextEngine,
    TextEngine,
    run,
    step_loop,
)
from tests.verifier_service.step_loop.helpers import NO_BAD, check_over, client, text, turns
from verifier_service.backend.request import Policy
from verifier_service.backend.result import REMOTE_DRAFT
from verifier_service.step_loop import StepLoop


class Fails:
    """A permissive grammar that raises GrammarTooComplexError after `after` tokens."""

    def __init__(self, after: int) -> None:
        self._left = after

    def commit(self, tokens: Sequence[int]) -> None:
        self._left -= len(tokens)

    def allowed(self, path: Sequence[int]) -> None:
        if len(path) >= self._left:
            raise GrammarTooComplexError("the grammar is too complex for this text")

    def hint(self, path: Sequence[int]) -> None: ...

    def permits(self, path: Sequence[int], token: int) -> bool:
        return True

    def forced(self) -> list[int]:
        return []


class Hesitates(Fails):
    """A grammar of even tokens that fails on the first query at each position and answers the second."""

    def __init__(self) -> None:
        super().__init__(after=1000)
        self._asked: set[tuple[int, ...]] = set()

    def allowed(self, path: Sequence[int]) -> TokenMask:  # type: ignore[override]
        place = (self._left, *path)
        if place not in self._asked:
            self._asked.add(place)
            raise GrammarTooComplexError("not now")
        return np.full(-(-VOCABULARY // 8), 0b01010101, dtype=np.uint8)


@dataclass(frozen=True)
class Computed:
    """A pass that is over."""

    logits: Callable[[Callable[[], Mapping[int, SamplingQuery]]], StepLogits]


class OnDemand(TextEngine):
    """A text engine whose logits stay on the device."""

    def launch(self, batch: PackedBatch) -> Pass:
        logits = torch.from_numpy(self.forward(batch))
        return Computed(lambda asked: GpuLogits(logits, asked()))


SHORTAGES = [
    MemoryError(),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
    RuntimeError("a matrix product has failed: out of memory"),
]


class OutOfMemory(TextEngine):
    """A text engine whose passes raise MemoryError while it is `short`."""

    short = False

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        if self.short:
            raise MemoryError
        return super().forward(batch)


class Cramped(TextEngine):
    """A text engine without memory for passes over positions from `longest` on."""

    longest = 50

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        if batch.positions.max() >= self.longest:
            raise MemoryError
        return super().forward(batch)


def turns_until(loop: StepLoop, condition: Callable[[], bool]) -> None:
    """Turn until `condition`, sleeping between turns as the loop asks."""
    while not condition():
        time.sleep(loop.turn() or 0.0)


class TestFailures:
    @pytest.mark.parametrize("steps", [0, 1, 4])
    def test_a_pass_that_fails_costs_nobody_a_token(self, steps: int) -> None:
        """Whether the pass has prompts, candidates or neither: its sessions are retried one by one."""
        engine = TextEngine(20)
        loop = step_loop(engine)
        several = [client(loop, 100, 1, 20), client(loop, 10, 2, 20), client(loop, 30, 3, 20)]
        turns(loop, steps)
        several[0].offer(right=3, wrong=[4])
        engine.failure = MemoryError()
        turns(loop, 1)
        assert all(each.mail.error is None for each in several)
        run(loop, *several)
        check_over(loop, engine, *several)

    @pytest.mark.parametrize("shortage", SHORTAGES, ids=lambda error: type(error).__name__)
    def test_no_text_is_blamed_for_a_shortage_of_memory(self, shortage: Exception) -> None:
        """Even if a step with this text alone runs out of memory repeatedly."""
        engine = TextEngine(20)
        loop = step_loop(engine)
        reader = client(loop, 30, 1, 20)
        for _ in SHORTAGE_PAUSES:
            engine.failure = shortage
            turns_until(loop, lambda: engine.failure is None)
        assert reader.mail.error is None
        turns_until(loop, lambda: reader.session.generated > 0)
        run(loop, reader)
        check_over(loop, engine, reader)

    def test_a_step_that_gets_its_memory_ends_a_shortage(self) -> None:
        engine = TextEngine(20)
        loop = step_loop(engine)
        reader = client(loop, 30, 1, 20)
        for _ in range(2 * len(SHORTAGE_PAUSES)):
            engine.failure = MemoryError()
            turns_until(loop, lambda: engine.failure is None)
            done = len(engine.steps) + 2  # a probe of the engine, then a step
            turns_until(loop, lambda done=done: len(engine.steps) >= done)  # type: ignore[misc]
        run(loop, reader)
        check_over(loop, engine, reader)

    def test_a_shortage_that_lasts_ends_the_loop(self) -> None:
        engine = TextEngine(20)
        loop = step_loop(engine)
        client(loop, 30, 1, 20)

        def fail() -> bool:
            engine.failure = engine.failure or MemoryError()
            return False

        with pytest.raises(MemoryError, match="6 consecutive steps could not allocate memory"):
            turns_until(loop, fail)

    def test_a_text_that_never_gets_memory_goes_elsewhere(self) -> None:
        """Until it does, the others get tokens."""
        engine = Cramped(20)
        loop = step_loop(engine)
        large, small = client(loop, 100, 1, 20), client(loop, 10, 2, 30)
        turns_until(loop, lambda: large.over or small.over)
        assert isinstance(large.mail.error, ShortOfMemoryError)
        assert small.tokens
        left, begun = 30 - len(small.tokens), len(engine.steps)
        turns_until(loop, lambda: small.over)
        assert engine.steps[begun:] == [1] * left
        check_over(loop, engine, small)

    def test_a_text_that_got_no_memory_may_fail_once_more(self) -> None:
        engine = TextEngine(20)
        loop = step_loop(engine)
        reader = client(loop, 30, 1, 20)
        for failure in (MemoryError(), RuntimeError("a device error")):
            engine.failure = failure
            turns_until(loop, lambda: engine.failure is None)
        run(loop, reader)
        check_over(loop, engine, reader)

    def test_an_engine_without_memory_sends_its_texts_elsewhere(self) -> None:
        engine = OutOfMemory(20)
        loop = step_loop(engine)
        reader = client(loop, 30, 1, 20)
        engine.short = True
        turns(loop, 1)
        assert isinstance(reader.mail.error, ShortOfMemoryError)
        assert not loop.works
        engine.short = False
        turns_until(loop, lambda: loop.works)
        again = client(loop, 30, 1, 20)
        run(loop, again)
        check_over(loop, engine, again)

    def test_what_no_pass_takes_is_ended_alone(self) -> None:
        """Nothing of the failing text stays in memory or in the prefix cache."""
        engine = TextEngine(20)
        engine.poison = BAD
        loop = step_loop(engine)
        to_poison = Sampling(logit_bias={BAD: 100.0})
        good = [client(loop, 100, 1, 20), client(loop, 10, 3, 20)]
        doomed = client(loop, 100, 2, 20, sampling=to_poison)
        run(loop, *good, doomed)
        assert isinstance(doomed.mail.error, ModelFailureError)
        assert doomed.tokens == [BAD]
        assert not engine.broken.any()
        again = client(loop, 100, 2, 5)
        run(loop, again)
        assert again.mail.details[0].cached == 0
        check_over(loop, engine, *good, again)

    @pytest.mark.parametrize("offered", [0, 3])
    def test_a_grammar_that_becomes_too_complex_ends_a_text_behind_what_was_chosen(self, offered: int) -> None:
        """With and without candidates. Other sessions keep the shared prefix."""
        engine = TextEngine(20)
        loop = step_loop(engine)
        doomed = client(loop, 100, 1, 20, rejected_candidates=True)
        doomed.session.grammar = Fails(after=7)  # type: ignore[assignment]
        turns(loop, 5)
        if offered:
            doomed.offer(right=offered)
        while doomed.mail.error is None:
            turns(loop, 1)
        assert isinstance(doomed.mail.error, GrammarFailureError)
        assert doomed.tokens == doomed.want[:7]
        for result in doomed.mail.results:  # orchestrators require a token of the target's own in each step
            assert result.accepted == sum(source == REMOTE_DRAFT for source in result.sources)
            assert result.steps == len(result.tokens) - result.accepted
            assert result.rejected == []  # nothing was chosen in their place
        again = client(loop, 100, 1, 5)
        run(loop, again)
        assert again.mail.details[0].cached == BLOCK

    def test_a_row_of_which_a_grammar_says_nothing_at_first_is_chosen_by_it_when_it_does(self) -> None:
        """On a GPU, this row's token is not chosen in advance."""
        loop = step_loop(OnDemand(20))
        bound = client(loop, 100, 1, 5)
        bound.session.grammar = Hesitates()  # type: ignore[assignment]
        while not bound.over:
            bound.read()
            turns(loop, 1)
        assert bound.mail.error is None
        assert all(token % 2 == 0 for token in bound.tokens)
        assert any(token % 2 for token in bound.want)

    def test_a_grammar_that_is_too_complex_at_once_costs_nobody_a_prefix(self) -> None:
        engine = TextEngine(20)
        loop = step_loop(engine)
        run(loop, client(loop, 100, 1, 5))
        doomed = client(loop, 100, 1, 20)
        doomed.session.grammar = Fails(after=0)  # type: ignore[assignment]
        while doomed.mail.error is None:
            loop.turn()
        assert isinstance(doomed.mail.error, GrammarFailureError)
        again = client(loop, 100, 1, 5)
        run(loop, again)
        assert again.mail.details[0].cached == BLOCK
        check_over(loop, engine, again)

    def test_tokens_committed_before_a_failed_step_are_sent_at_once(self) -> None:
        """Retrying all other sessions one by one may take long."""
        engine = TextEngine(20)
        loop = step_loop(engine)
        alone = Policy(frozenset(), 8, 0.0)  # no draft waits for commits
        clients = [client(loop, 10, number, 200, policy=alone) for number in range(4)]
        for _ in range(20):
            turns(loop, 1)
            for each in clients:
                each.read()
            if any(each.running.pending_result for each in clients):
                break
        assert any(each.running.pending_result for each in clients)
        engine.failure = RuntimeError("once")
        turns(loop, 1)
        assert not any(each.running.pending_result for each in clients)
        for each in clients:
            assert each.tokens == each.want[: len(each.tokens)]

    def test_one_that_leaves_on_trial_holds_up_nobody(self) -> None:
        engine = TextEngine(20)
        loop = step_loop(engine)
        left, stays = client(loop, 10, 1, 20), client(loop, 10, 2, 20)
        engine.failure = MemoryError()
        turns(loop, 1)
        left.cancel()
        run(loop, stays)
        check_over(loop, engine, stays)

    def test_an_engine_that_does_not_recover_ends_all_until_it_does(self) -> None:
        """Running and waiting sessions can go elsewhere; their computed prefixes are not found again."""
        engine = TextEngine(8)
        loop = step_loop(engine)
        several = [client(loop, 130, 2, 30), client(loop, 200, 4, 5), client(loop, 100, 1, 30)]
        turns(loop, 3)
        assert not all(each.has_memory for each in several)
        engine.dead = True
        turns(loop, 1)
        assert all(isinstance(each.mail.error, EngineLostError) for each in several)
        assert several[0].tokens == several[0].want[: len(several[0].tokens)] != []
        assert not loop.works
        assert loop.turn() == CHECK_SECONDS
        with pytest.raises(EngineLostError):
            client(loop, 10, 3, 5)
        loop._failed_at -= LOST_SECONDS
        with pytest.raises(EngineLostError):  # ends the process
            loop.turn()
        engine.dead = False
        assert loop.turn() is None
        assert loop.works
        again = client(loop, 130, 2, 5)
        run(loop, again)
        assert again.mail.details[0].cached == 0
        check_over(loop, engine, again)

    def test_a_device_lost_after_a_shortage_is_given_time_to_come_back(self) -> None:
        """Only a process without memory ends early: a restarted one needs less of it."""
        engine = TextEngine(20)
        loop = step_loop(engine)
        client(loop, 30, 1, 20)
        engine.failure = MemoryError()
        turns_until(loop, lambda: engine.failure is None)
        engine.dead = True
        turns_until(loop, lambda: not loop.works)
        loop._failed_at -= 2 * SHORTAGE_SECONDS
        assert loop.turn() == CHECK_SECONDS

    def test_an_engine_that_cannot_clear_single_tokens_comes_back(self) -> None:
        """Like vLLM on CPUs: it loses all sessions and nothing else."""
        paged = PagedTextEngine(8)
        paged.mixes_tokens = True
        engine, loop = paged.inner, step_loop(paged)
        lost = client(loop, 100, 2, 30)
        turns(loop, 3)
        engine.failure = RuntimeError("a device error")
        turns(loop, 1)
        assert isinstance(lost.mail.error, EngineLostError)
        assert loop.turn() is None
        assert loop.works
        again = client(loop, 130, 2, 5)
        run(loop, again)
        check_over(loop, engine, again)

    @pytest.mark.parametrize("offered", [0, 4])
    def test_logits_that_are_no_numbers_end_one_session(self, offered: int) -> None:
        """NaN logits may be at the tip or below it. Other sessions get their tokens, and no NaN stays in memory."""
        engine = TextEngine(20)
        loop = step_loop(engine)
        to_bad = Sampling(logit_bias={BAD: 100.0})
        good, doomed = client(loop, 100, 1, 20), client(loop, 100, 2, 20, sampling=to_bad)
        turns(loop, 1)
        assert doomed.tokens == [BAD]  # BAD itself was chosen from finite logits
        for each in (good, doomed):
            each.offer(right=offered, wrong=[2, 3])
        turns(loop, 1)
        assert isinstance(doomed.mail.error, FloatingPointError)
        assert doomed.tokens == [BAD]
        assert not engine.broken[: 20 * BLOCK].any()
        run(loop, good)
        again = client(loop, 100, 2, 20)
        run(loop, again)
        assert again.mail.details[0].cached == 0  # and no prefix of the text is found
        check_over(loop, engine, good, again)

    def test_a_prompt_of_no_numbers(self) -> None:
        """The prompt is computed in chunks: NaN shows only at its end. Until then, no session shares the prefix."""
        engine = TextEngine(20)
        loop = step_loop(engine, step_rows=64)
        good = client(loop, 10, 1, 20)
        prompt = text(150, 2)
        prompt[70] = BAD
        doomed = Client(loop, prompt, 5, sampling=NO_BAD)
        turns(loop, 2)
        beside = Client(loop, [*prompt[:65], 3], 5, sampling=NO_BAD)
        run(loop, good, beside)
        assert isinstance(doomed.mail.error, FloatingPointError)
        assert doomed.tokens == []
        assert not engine.broken[: 20 * BLOCK].any()
        assert beside.mail.details[0].cached == 0
        check_over(loop, engine, good, beside)

    def test_a_session_that_gets_no_memory_leaves_its_prefix(self) -> None:
        """Its logits were finite: others may go on using what it has computed."""
        loop = step_loop(TextEngine(20))
        prompt = text(2 * BLOCK + 10, 1)
        first = Client(loop, prompt, 40, sampling=NO_BAD)
        turns(loop, 2)
        ended = Client(loop, [*prompt, 5], 40, sampling=NO_BAD)
        turns(loop, 2)
        loop.end_session(ended.session, ShortOfMemoryError())
        assert isinstance(ended.mail.error, ShortOfMemoryError)
        other = Client(loop, [*prompt, 6], 5, sampling=NO_BAD)
        run(loop, first, other)
        assert other.mail.details[0].cached >= 2 * BLOCK

    def test_sharers_of_a_wiped_beginning_go_on(self) -> None:
        """Sharing sessions keep the wiped prefix while they hold it; no other session finds it."""
        engine = TextEngine(20)
        loop = step_loop(engine)
        prompt = text(BLOCK + 10, 1)
        first = Client(loop, prompt, 40, sampling=NO_BAD)
        turns(loop, 1)
        doomed = Client(loop, [*prompt, BAD], 5, sampling=NO_BAD)
        turns(loop, 1)
        assert isinstance(doomed.mail.error, FloatingPointError)
        other = Client(loop, [*prompt, 5], 5, sampling=NO_BAD)
        run(loop, first, other)
        assert other.mail.details[0].cached == 0
        assert not engine.broken[: 20 * BLOCK].any()
        check_over(loop, engine, first, other)


class TestLoad:
    def test_counters(self) -> None:
        engine = TextEngine(20)
        loop = step_loop(engine)
        clients = [client(loop, 100, seed, 10) for seed in (1, 1, 2)]
        turns(loop, 1)
        clients[0].offer(right=3, wrong=[2])
        run(loop, *clients)
        load = loop.stats
        assert load.steps == len(engine.steps)
        assert load.rows == sum(engine.steps)
        assert load.committed == 30
        assert (load.accepted, load.offered) == (3, sum(v.offered for each in clients for v in each.mail.results))
        assert load.prompt_tokens == 300
        assert load.busy > 0
        check_over(loop, engine, *clients)

    def test_the_expected_wait_grows_with_the_queue(self) -> None:
        engine = TextEngine(20)
        load = step_loop(engine).stats
        waits = [load.expected_wait(waiting) for waiting in range(100)]
        assert waits == sorted(waits)
        assert all(0.1 <= wait <= 60 for wait in waits)
        assert waits[-1] > waits[0]
