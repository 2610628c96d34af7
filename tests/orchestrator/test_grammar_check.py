"""After a pod has died under a grammar, the grammar is replayed along its text before another pod gets the text. The
grammar is quarantined if pods keep dying."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import grpc
import pytest

from orchestrator.generation.sample_context import SampleContext
from orchestrator.generation.verification import Verification
from orchestrator.models import grammar_check
from orchestrator.models.grammar_check import AMONG_OTHERS, MAX_BLAME, MAX_DEATHS, GrammarCheck, GrammarWatch
from orchestrator.pods.errors import LostError
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pod, Pods
from specdec.grammar.grammar import Grammar, Kind
from specdec.local import DEMO
from specdec.serving.errors import (
    EngineLostError,
    InvalidRequestError,
    OverloadedError,
    PeerLostError,
    ServiceError,
    to_status,
)
from specdec.serving.grammar_trials import TrialResult
from specdec.v2 import model_pb2, verifier_pb2
from tests.orchestrator.samples import context
from tests.orchestrator.test_verification import Refusing, identity, serving

GRAMMAR = Grammar(Kind.REGEX, ("a+",))
DIED = LostError("UNAVAILABLE: Socket closed", conclusive=True, died=True)


class Trials:
    """Trials with these outcomes in order; the last one repeats."""

    def __init__(self, *outcomes: str | Exception) -> None:
        self.outcomes = outcomes
        self.replayed: list[list[int]] = []
        self.insistent: list[bool] = []

    async def verdict(self, grammar: Grammar, owner: str = "") -> TrialResult:
        return TrialResult()

    async def replay(
        self,
        grammar: Grammar,
        owner: str,
        tokens: Sequence[int],
        end_tokens: frozenset[int],
        *,
        insistent: bool = False,
    ) -> TrialResult:
        self.insistent.append(insistent)
        outcome = self.outcomes[min(len(self.replayed), len(self.outcomes) - 1)]
        self.replayed.append(list(tokens))
        if isinstance(outcome, Exception):
            raise outcome
        return TrialResult(outcome)

    async def close(self) -> None:
        pass


def checking(*outcomes: str | Exception) -> tuple[GrammarCheck, Trials]:
    check, trials = GrammarCheck(DEMO / "target"), Trials(*outcomes)
    check.trials = trials  # type: ignore[assignment]
    return check, trials


def watched(check: GrammarCheck, peers: Peers | None = None, **fields: Any) -> SampleContext:
    given = context(peers, grammar=model_pb2.Grammar(regex="a+"), grammar_field="chat.tools", **fields)
    return replace(given, grammar_watch=check.watch(given.sample, given.text, given.peers))


def watch_of(given: SampleContext) -> GrammarWatch:
    assert given.grammar_watch is not None
    return given.grammar_watch


def pod(address: str = "a", sessions: int = 0) -> Pod:
    found: Any = Pod(address, None)  # type: ignore[arg-type]
    found.load.ours = sessions
    return found  # type: ignore[no-any-return]


def lose(given: SampleContext, lost: Pod, *, verifier: bool = True) -> None:
    """Lose a text's session because its pod died."""
    given.peers.verifiers.died(lost)
    watch_of(given).lost(lost, DIED, verifier=verifier)


async def test_a_death_during_a_trial_is_tried_too() -> None:
    """The trial began without the tokens under which the second pod died."""
    check, trials = checking("")
    given = watched(check)
    replay, first, go = trials.replay, asyncio.Event(), asyncio.Event()

    async def slow(grammar: Grammar, owner: str, *rest: Any, **options: Any) -> TrialResult:
        found = await replay(grammar, owner, *rest, **options)
        first.set()
        await go.wait()
        return found

    trials.replay = slow  # type: ignore[method-assign]
    lose(given, pod("draft"), verifier=False)
    trying = asyncio.create_task(watch_of(given).retry_if_suspect())
    await first.wait()
    given.text.add([5])
    lose(given, pod("verifier"))
    go.set()
    await trying
    await watch_of(given).retry_if_suspect()
    assert trials.replayed == [[], [5]]


class Dying(Refusing):
    """A verifier that opens a session, then fails with these errors in order, or without a status (None)."""

    def __init__(self, *last_words: ServiceError | None) -> None:
        super().__init__("")
        self.last_words = last_words

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        last_words = self.last_words[min(self.asked, len(self.last_words) - 1)]
        self.asked += 1
        opened = verifier_pb2.VerifyOpened(identity=identity(), follows_grammar=True)
        await context.write(verifier_pb2.VerifyResponse(opened=opened))
        if last_words is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        else:
            await context.abort_with_status(to_status(last_words))


async def end_of(
    verifiers: Sequence[Refusing], check: GrammarCheck, tokens: Iterable[int] = (), **peers: Any
) -> Exception:
    """Return the error that ends a grammar-bound text served by these verifiers alone."""
    async with AsyncExitStack() as servers:
        addresses = [await servers.enter_async_context(serving(verifier)) for verifier in verifiers]
        pods = Pods(addresses, connect=grpc.aio.insecure_channel)
        given = watched(check, Peers(pods, **peers))
        given.text.add(list(tokens))
        with pytest.raises(ServiceError) as ended:
            async for _ in Verification(given).messages():
                pass
        await pods.close()
    return ended.value


async def test_a_grammar_that_does_not_pass_again_ends_its_text_and_kills_no_other_pod() -> None:
    check, trials = checking("is nested too deeply")
    verifier = Dying(None)
    error = await end_of([verifier], check, [5, 6])
    assert isinstance(error, InvalidRequestError)
    assert str(error) == "chat.tools: is nested too deeply"
    assert trials.replayed == [[5, 6]]  # and no other pod has died of it


async def test_a_verifier_that_refuses_the_grammar_refuses_the_field_that_set_it() -> None:
    check, _ = checking("")
    error = await end_of([Dying(InvalidRequestError([("grammar.regex", "is wrong"), ("rule", "is too")]))], check)
    assert str(error) == "chat.tools: is wrong; rule: is too"


async def test_a_grammar_that_passes_again_and_again_is_refused_in_the_end() -> None:
    check, trials = checking("")
    error = await end_of([Dying(None) for _ in range(MAX_DEATHS)], check)
    assert isinstance(error, OverloadedError)
    assert 0 < error.retry_after <= grammar_check.QUARANTINE_SECONDS
    assert trials.insistent == [False, True]
    with pytest.raises(OverloadedError, match=r"grammar.regex: pods have crashed repeatedly under this grammar"):
        await check.check(GRAMMAR, "grammar.regex")
    await check.check(GRAMMAR, "grammar.regex", "another tenant")
    await check.check(Grammar(Kind.REGEX, ("b+",)), "grammar.regex")


async def test_a_quarantine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "QUARANTINE_SECONDS", 0.0)
    check, _ = checking("")
    check.died(GRAMMAR, "", pod(), MAX_DEATHS, ())
    await check.check(GRAMMAR, "grammar.regex")


async def test_a_pod_that_says_why_it_goes_is_no_death_under_a_grammar() -> None:
    check, trials = checking("is nested too deeply")
    verifier = Dying(EngineLostError())
    assert isinstance(await end_of([verifier], check, failover_seconds=1.0), PeerLostError)
    assert verifier.asked > 1
    assert not trials.replayed


async def test_a_verifier_that_was_never_there_is_no_death_under_a_grammar() -> None:
    check, trials = checking("is nested too deeply")
    assert isinstance(await end_of([Refusing("failed to connect")], check, failover_seconds=0.1), PeerLostError)
    assert not trials.replayed


async def test_a_machine_too_busy_to_try_ends_no_text() -> None:
    """The text continues, and its grammar is replayed before the next session; deaths count regardless."""
    check, trials = checking(OverloadedError("busy"), "")
    given = watched(check)
    watch_of(given).lost(pod(), DIED, verifier=True)
    await watch_of(given).retry_if_suspect()
    await watch_of(given).retry_if_suspect()
    await watch_of(given).retry_if_suspect()
    assert len(trials.replayed) == 2


async def test_a_text_that_grows_is_not_blamed_for_one_pod_after_another() -> None:
    """With many users of one grammar on crowded pods, deaths are not the grammar's fault."""
    check, _ = checking("")
    texts = [watched(check) for _ in range(10)]
    for number in range(10):
        for given in texts:
            watch_of(given).lost(pod(f"pod {number}", sessions=20), DIED, verifier=True)
            given.text.add([1])
    await check.check(GRAMMAR, "grammar.regex")


@pytest.mark.parametrize("others", [False, True])
async def test_pods_that_die_under_one_text_after_another_are_its_grammars_fault(others: bool) -> None:
    """Each text is a new request; deaths of pods shared with other sessions count half."""
    pods = Pods()
    check, _ = checking("")
    if others:
        pods.died(pod("gone"))
    deaths = 0
    while True:
        try:
            await check.check(GRAMMAR, "grammar.regex")
        except OverloadedError:
            break
        given = watched(check, Peers(pods))
        watch_of(given).lost(pod(f"pod {deaths}", sessions=1), DIED, verifier=True)
        deaths += 1
    assert deaths == 2 * MAX_BLAME * (AMONG_OTHERS if others else 1)


@pytest.mark.parametrize(("last_words", "died"), [(None, True), (EngineLostError(), False)])
async def test_a_pod_that_goes_without_a_word_has_died(last_words: ServiceError | None, died: bool) -> None:
    async with serving(Dying(last_words)) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        peers = Peers(pods, failover_seconds=0.1)
        with pytest.raises(ServiceError):
            async for _ in Verification(context(peers)).messages():
                pass
        (asked,) = pods
        await pods.close()
    assert [death.address for death in pods.deaths] == [asked.address] * died


@pytest.mark.parametrize("others", [False, True])
async def test_pods_that_die_without_a_grammar_too_speak_for_it(others: bool) -> None:
    """If something else kills pods, a text may lose several pods before it grows. They may be gone for good."""
    pods = Pods()
    check, _ = checking("")
    given = watched(check, Peers(pods))
    if others:
        pods.died(pod("gone"))
    deaths = 0
    while True:
        try:
            await watch_of(given).retry_if_suspect()
        except OverloadedError:
            break
        lose(given, pod(f"pod {deaths}", sessions=20))
        deaths += 1
    assert deaths == (AMONG_OTHERS if others else 1) * MAX_DEATHS


async def test_a_draft_that_dies_with_its_verifier_does_not_speak_for_its_grammar() -> None:
    check, _ = checking("")
    given = watched(check, Peers(Pods()))
    for number in range(MAX_DEATHS):
        lose(given, pod(f"pod {number}", sessions=20))
        lose(given, pod(f"draft {number}", sessions=20), verifier=False)
        if number < MAX_DEATHS - 1:
            await watch_of(given).retry_if_suspect()
    with pytest.raises(OverloadedError):
        await watch_of(given).retry_if_suspect()


async def test_a_draft_that_dies_while_its_text_has_no_verifier_is_not_its_grammars_fault() -> None:
    """The text cannot grow meanwhile, so drafts may die any number of times."""
    check, _ = checking("")
    given = watched(check, Peers(Pods()))
    for number in range(MAX_DEATHS - 1):
        lose(given, pod(f"verifier {number}", sessions=100))
        await watch_of(given).retry_if_suspect()
        for turn in range(MAX_DEATHS):
            lose(given, pod(f"draft {number} {turn}", sessions=100), verifier=False)
            await watch_of(given).retry_if_suspect()
    await check.check(GRAMMAR, "grammar.regex")


async def test_a_draft_that_dies_first_hides_no_verifiers_death() -> None:
    check, _ = checking("")
    given = watched(check, Peers(Pods()))
    for number in range(MAX_DEATHS):
        await watch_of(given).retry_if_suspect()
        lose(given, pod(f"draft {number}", sessions=20), verifier=False)
        lose(given, pod(f"verifier {number}", sessions=20))
    with pytest.raises(OverloadedError):
        await watch_of(given).retry_if_suspect()


async def test_texts_do_not_speak_for_their_own_grammar() -> None:
    """Two texts kill pods alternately."""
    check, _ = checking("")
    peers = Peers(Pods())
    one, other = watched(check, peers), watched(check, peers)
    for number in range(MAX_DEATHS):
        await watch_of(one).retry_if_suspect()
        lose(one, pod(f"pod {number}", sessions=20))
        if number < MAX_DEATHS - 1:
            await watch_of(other).retry_if_suspect()
            lose(other, pod(f"another pod {number}", sessions=20))
    with pytest.raises(OverloadedError):
        await watch_of(one).retry_if_suspect()


async def test_sessions_that_are_opened_at_a_dead_pod_are_lost_by_the_same_death() -> None:
    check, _ = checking("")
    given, dead = watched(check), pod("dead", sessions=20)
    for _ in range(2 * MAX_DEATHS):
        watch_of(given).lost(dead, DIED, verifier=True)
        await watch_of(given).retry_if_suspect()
    await check.check(GRAMMAR, "grammar.regex")


async def test_a_verifier_and_a_draft_that_die_together_are_one_death() -> None:
    check, _ = checking("")
    given = watched(check)
    for _ in range(MAX_DEATHS - 1):
        for name in ("verifier", "draft", "another draft"):
            watch_of(given).lost(pod(name, sessions=20), DIED, verifier=name == "verifier")
        await watch_of(given).retry_if_suspect()
    await check.check(GRAMMAR, "grammar.regex")


def test_texts_lost_with_the_same_pod_count_once() -> None:
    check, _ = checking("")
    for _ in range(50):
        check.died(GRAMMAR, "", pod("one"), 1, ())
    assert not check._refused_until
