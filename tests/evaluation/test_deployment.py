"""The services on virtual time, with real models: texts equal those of plain decoding, for any drafter at any speed."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import cast

import pytest

from evaluation import hop, virtual_time
from evaluation.deployment import Deployment, Layout
from evaluation.measurements import (
    ABSENT,
    LOCAL,
    PLAIN,
    REMOTE_DRAFT,
    TREES,
    WAYS,
    Load,
    Way,
    acceptance,
    run,
    speed,
)
from evaluation.pair import EngineOptions, Pair
from evaluation.workers import OnVirtualTime, SpendingInbox, host_seconds, sleep, unspent_seconds
from orchestrator.requests.parsing import parse
from orchestrator.requests.sample import Sample
from specdec.client.request import build_request
from specdec.decoding.sampling import Rule
from specdec.engine.model_file import ModelDirectoryError
from tests.services.conftest import Directories

ONE_THREAD = EngineOptions(threads=1, dtype="float32")


@pytest.fixture(scope="module")
def pair(directories: Directories) -> Pair:
    return Pair(directories.target, directories.near, ONE_THREAD, ONE_THREAD, 4096)


@pytest.fixture(scope="module")
def samples(pair: Pair) -> list[Sample]:
    asked = [
        build_request("once upon a time", max_tokens=40, ignore_end_token=True, temperature=0.8 * (seed % 2), seed=seed)
        for seed in range(4)
    ]
    return [parse(each, pair.model).samples[0] for each in asked]


def texts(pair: Pair, layout: Layout, samples: list[Sample], streams: int) -> list[list[int]]:
    async def main() -> list[list[int]]:
        deployment = Deployment(pair, layout)
        found = await deployment.complete_all(samples, streams)
        await deployment.end()
        return [each.tokens for each in found]

    return virtual_time.run(main())


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize("streams", [1, 4])
def test_every_way_gives_the_texts_of_plain_decoding(pair: Pair, samples: list[Sample], way: Way, streams: int) -> None:
    plain = texts(pair, PLAIN.layout, [replace(each, speculation=PLAIN.speculation) for each in samples], 1)
    forced = replace(way.speculation, forced=bool(way.speculation.drafters))
    assert texts(pair, way.layout, [replace(each, speculation=forced) for each in samples], streams) == plain


def test_texts_with_a_grammar_run_on_virtual_time(pair: Pair) -> None:
    """Grammars are compiled in threads that virtual time does not wait for."""
    asked = [
        build_request("a person:", max_tokens=20, json_schema=schema, seed=seed)
        for seed, schema in enumerate(
            ('{"type": "boolean"}', '{"type": "integer", "maximum": 99}', '{"type": "boolean"}')
        )
    ]
    found = [parse(each, pair.model).samples[0] for each in asked]
    plain = texts(pair, PLAIN.layout, [replace(each, speculation=PLAIN.speculation) for each in found], 1)
    assert texts(pair, REMOTE_DRAFT.layout, found, 3) == plain


def test_a_draft_that_is_always_in_time_has_its_candidates_accepted(pair: Pair, samples: list[Sample]) -> None:
    short, long = (acceptance(pair, samples, Rule.COUPLED, tree) for tree in (TREES[0], TREES[2]))
    assert short.tokens == long.tokens == 160
    assert short.offered > 1.7 * short.steps  # fewer at the ends of texts, and after prompts
    assert 1.0 < short.tokens_a_step <= 3.0  # two candidates and a bonus token
    assert short.tokens_a_step < long.tokens_a_step <= 9.0
    assert 0.1 < long.acceptance < short.acceptance <= 1.0


def test_rejection_is_measured_as_well(pair: Pair, samples: list[Sample]) -> None:
    sampled = [each for each in samples if not each.sampling.greedy]
    assert acceptance(pair, sampled, Rule.REJECTION, TREES[1]).accepted > 0


def test_a_slower_target_is_slower(pair: Pair, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """In proportion to its speed. Virtual durations of passes are scaled real ones; here these are the thread's CPU
    time, which other load does not affect."""
    monkeypatch.setattr(time, "perf_counter", time.thread_time)
    plain = [replace(each, speculation=PLAIN.speculation) for each in samples]
    slow, slower = (run(pair, Layout(target_speed=speed), Load(plain, 1))[0] for speed in (0.1, 0.005))
    assert 5 < slow.rate / slower.rate < 80
    assert slower.target_busy > 0.9


def test_a_draft_far_away_helps_less(pair: Pair, samples: list[Sample]) -> None:
    def steps(delay: float) -> int:
        layout = replace(REMOTE_DRAFT.layout, delay=delay, target_speed=0.1, draft_speed=10.0)  # in time if not delayed
        forced = [replace(each, speculation=replace(REMOTE_DRAFT.speculation, forced=True)) for each in samples[:2]]
        return run(pair, layout, Load(forced, 1))[0].steps

    assert steps(0.0) < steps(0.5)  # after 0.5 s, no candidate is in time


def test_what_is_absent_does_not_work(pair: Pair, samples: list[Sample]) -> None:
    (absent,), (local,) = (speed(pair, way, Load(samples, 2)) for way in (ABSENT, LOCAL))
    assert absent.draft_busy == 0.0
    assert local.tokens == 160


def test_services_learn_from_one_load_for_the_next(pair: Pair, samples: list[Sample]) -> None:
    """For each load, counters start from zero and prompts are computed again."""
    found = speed(pair, LOCAL, Load(samples, 2), Load(samples, 1), Load(samples[:1], 1))
    assert [each.tokens for each in found] == [160, 160, 40]
    for each in found:
        assert 0.0 <= each.draft_busy < 1.0
        assert 0.0 < each.target_busy < 1.0


def test_another_tokenizer_is_refused(directories: Directories) -> None:
    with pytest.raises(ModelDirectoryError, match=r"the tokenizers of .*target and .*foreign differ"):
        Pair(directories.target, directories.foreign, ONE_THREAD, ONE_THREAD, 4096)


async def test_a_hop_takes_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hop, "ROUNDS", 50)
    assert 1e-5 < await asyncio.to_thread(hop.hop_seconds) < 0.1


class Busy(OnVirtualTime):
    """A worker that spends real time in its own code, beside a pass of one virtual second."""

    def __init__(self) -> None:
        super().__init__("busy", inbox=SpendingInbox)
        self.turns: list[tuple[float, float]] = []  # real seconds of its code, and the virtual time after the turn
        self.ahead = 0.0  # seconds that its clock advanced before they were spent
        self.told: list[float] = []  # virtual time of arrival of its messages

    def turn(self) -> float | None:
        now = time.monotonic()  # read before `begin`, so that `ahead` includes the whole loop
        begin = time.perf_counter()
        while time.perf_counter() - begin < 0.02:
            pass
        self.ahead = time.monotonic() - now
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(lambda: self.told.append(loop.time() - virtual_time.START))
        spent = host_seconds()
        sleep(1.0 + spent)
        self.turns.append((spent, time.monotonic() - virtual_time.START))
        return 10.0


def test_the_time_of_a_workers_own_code_counts() -> None:
    async def main() -> Busy:
        cast("virtual_time.VirtualLoop", asyncio.get_running_loop()).ahead = unspent_seconds
        worker = Busy()
        worker.start()
        await asyncio.sleep(5.0)
        await worker.end()
        return worker

    worker = virtual_time.run(main())
    ((spent, after),) = worker.turns
    assert spent >= 0.02
    assert after == pytest.approx(1.0 + spent, abs=0.02)
    # The time of the worker's code counts on its clock, and for its messages, even before it is spent.
    assert worker.ahead >= 0.02
    assert worker.told == [pytest.approx(spent, abs=0.02)]
