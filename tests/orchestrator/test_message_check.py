"""Every valid message of a verifier is accepted, and every invalid one rejected."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.requests.sample import CommittedText
from orchestrator.text.message_check import LEAST_FEATURE_BYTES, MAX_FED_BYTES, MAX_QUERIES, MessageCheck
from specdec.decoding.sampling import Rule
from specdec.serving.validation import MAX_FEATURE_BYTES
from specdec.v2 import model_pb2, verifier_pb2
from tests.orchestrator.samples import CONTEXT, END, MODEL, PROMPT, VOCABULARY, sample

DRAFT, BONUS, PLAIN = model_pb2.TOKEN_SOURCE_REMOTE_DRAFT, model_pb2.TOKEN_SOURCE_BONUS, model_pb2.TOKEN_SOURCE_PLAIN
STOP, LENGTH, FULL = model_pb2.FINISH_REASON_STOP, model_pb2.FINISH_REASON_LENGTH, model_pb2.FINISH_REASON_CONTEXT
NONE = model_pb2.FINISH_REASON_UNSPECIFIED


def commit(generated: int, steps: list[tuple[list[int], int]], finish: int = NONE, **fields: Any) -> Any:
    """Return a commit of steps (accepted candidates, the target's own token or -1 if the last candidate ends the
    text)."""
    tokens: list[int] = []
    sources: list[int] = []
    for accepted, own in steps:
        tokens += accepted
        sources += [DRAFT] * len(accepted)
        if own >= 0:
            tokens.append(own)
            sources.append(BONUS if accepted else PLAIN)
    usual: dict[str, Any] = {
        "committed": model_pb2.Committed(base=len(PROMPT) + generated, tokens=tokens),
        "sources": sources,
        "accepted": sum(len(accepted) for accepted, _ in steps),
        "offered": 8 * len(steps),
        "steps": len(steps),
        "finish_reason": finish,
        "min_candidate_probability": 0.5,
    }
    return verifier_pb2.Commit(**(usual | fields))


def violation(found: Any, generated: int = 5, context: int = CONTEXT, **fields: Any) -> str:
    text = CommittedText(sample(**fields))
    text.add([9] * generated)
    return MessageCheck(sample(**fields), MODEL, context).commit_violation(found, text)


def overruled(position: int, token: int = 9) -> model_pb2.TargetLogprobs:
    return model_pb2.TargetLogprobs(position=position, tokens=[token], logprobs=b"\x00\xbc")  # -1


def test_features_are_bounded_between_commits() -> None:
    text = CommittedText(sample())
    check = MessageCheck(sample(), MODEL, CONTEXT)
    assert "they begin at position" in check.features_violation(model_pb2.Features(first=CONTEXT))
    part, small = model_pb2.Features(values=bytes(MAX_FEATURE_BYTES)), model_pb2.Features(values=b"ab")
    assert "they have 0 bytes, must have 1 to" in check.features_violation(model_pb2.Features())
    more = model_pb2.Features(values=bytes(MAX_FEATURE_BYTES + 1))
    assert f"they have {MAX_FEATURE_BYTES + 1} bytes" in check.features_violation(more)
    for message, least in ((part, MAX_FEATURE_BYTES), (small, LEAST_FEATURE_BYTES)):
        assert not any(check.features_violation(message) for _ in range(MAX_FED_BYTES // least))
        assert "bytes without a commit" in check.features_violation(message)
        assert not check.commit_violation(commit(0, [([], 9)]), text)


ordinary = st.integers(10, VOCABULARY - 1)


@given(
    st.lists(st.tuples(st.lists(ordinary, max_size=3), ordinary), min_size=1, max_size=4),
    st.sampled_from(["goes on", "end token", "end candidate", "length", "context"]),
    st.sampled_from([None, 0, 1, 2]),
)
def test_what_a_verifier_sends_is_taken(steps: list[tuple[list[int], int]], end: str, asked: int | None) -> None:
    """Steps of any number of candidates, with any ending, with and without logprobs."""
    finish, last = NONE, steps[-1]
    if end == "end token":
        steps, finish = [*steps[:-1], (last[0], END)], STOP
    elif end == "end candidate":
        steps, finish = [*steps[:-1], ([*last[0], END], -1)], STOP
    count = sum(len(accepted) + (own >= 0) for accepted, own in steps)
    most, context = 30, CONTEXT
    if end == "length":
        most, finish = count + 5, LENGTH
    elif end == "context":
        context, finish = len(PROMPT) + 5 + count, FULL
    each = verifier_pb2.TokenLogprobs(chosen=-0.5, top_tokens=range(asked or 0), top_logprobs=[-1.0] * (asked or 0))
    logprobs = [] if asked is None else [each] * count
    found = commit(5, steps, finish, logprobs=logprobs)
    assert violation(found, context=context, max_tokens=most, top_logprobs=asked) == ""


def changed(change: Callable[[Any], None], **options: Any) -> str:
    """Return the violation found in a commit after `change`; there was none before."""
    found = commit(5, [([10, 11], 12), ([], 13)], **options)
    assert violation(found) == ""
    change(found)
    return violation(found)


def put(field: str, value: Any) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        setattr(found, field, value)

    return change


def put_in(field: str, values: list[Any]) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        getattr(found, field)[:] = values

    return change


def put_tokens(values: list[int]) -> Callable[[Any], None]:
    def change(found: Any) -> None:
        found.committed.tokens[:] = values

    return change


def put_base(found: Any) -> None:
    found.committed.base += 1


LIES = {
    "base": put_base,
    "no tokens": put_tokens([]),
    "a token beyond the vocabulary": put_tokens([10, 11, 12, VOCABULARY]),
    "no steps": put("steps", 0),
    "a step too few": put("steps", 1),
    "a step too many": put("steps", 3),
    "steps without end": put("steps", 2**32 - 1),
    "a source too few": put_in("sources", [DRAFT, DRAFT, BONUS]),
    "a source that is none": put_in("sources", [DRAFT, DRAFT, BONUS, 0]),
    "a source that nobody knows": put_in("sources", [DRAFT, DRAFT, BONUS, 99]),
    "other sources": put_in("sources", [DRAFT, BONUS, BONUS, PLAIN]),
    "fewer accepted": put("accepted", 1),
    "more accepted": put("accepted", 2**32 - 1),
    "more accepted than offered": put("offered", 1),
    "candidates without end": put("offered", 2**32 - 1),
    "an early end": put("finish_reason", LENGTH),
    "a stop without end token": put("finish_reason", STOP),
    "a context that is not full": put("finish_reason", FULL),
    "a reason that is none": put("finish_reason", 77),
    "an end token in the midst": put_tokens([10, END, 12, 13]),
    "an end token that ends nothing": put_tokens([10, 11, 12, END]),
    "log-probabilities that nobody asked for": lambda found: found.logprobs.add(chosen=-1.0),
    "rejected candidates that nobody asked for": lambda found: found.rejected.add(position=5, token=9, source=DRAFT),
    "reasons for a draft that keeps nothing": lambda found: found.committed.overruled.append(overruled(8)),
    "a probability of NaN": put("min_candidate_probability", math.nan),
    "a probability above 1": put("min_candidate_probability", 1.5),
    "a probability below 0": put("min_candidate_probability", -0.5),
    "preemptions without end": put("preemptions", 2**32 - 1),
    "a queue without end": put("queued_us", 2**64 - 1),
    "more found than there is": put("cached_tokens", 2**32 - 1),
    "many reasons": lambda found: found.decisions.without.update({str(number): 1 for number in range(33)}),
    "many modes": lambda found: found.decisions.modes.update({str(number): 1 for number in range(33)}),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_it_may_not_send_is_not(lie: str) -> None:
    problem = changed(LIES[lie])
    assert problem
    assert len(problem) < 200


def test_tokens_past_the_limits() -> None:
    many = commit(5, [([], 10)] * 16)
    assert "must be at most 23" in violation(many)
    assert "must be at most 20" in violation(many, max_tokens=2**32 - 1, context=20)


def test_a_text_that_is_full_must_end() -> None:
    whole = commit(5, [([], 10)] * 15)
    assert "finish reason is unspecified, must be length" in violation(whole)
    assert "finish reason is unspecified, must be context" in violation(whole, max_tokens=2**32 - 1, context=23)


def test_an_end_token_before_its_time() -> None:
    found = commit(5, [([], END)], STOP)
    assert violation(found) == violation(found, min_tokens=5) == ""
    assert violation(found, min_tokens=6)
    assert violation(found, end_tokens=frozenset())


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        [verifier_pb2.TokenLogprobs(chosen=-1.0, top_tokens=[1], top_logprobs=[-1.0])] * 2,
        [verifier_pb2.TokenLogprobs(chosen=-1.0, top_tokens=[1, 2], top_logprobs=[-1.0, -2.0])],
        [verifier_pb2.TokenLogprobs(chosen=-1.0, top_tokens=[1], top_logprobs=[-1.0, -2.0])],
        [verifier_pb2.TokenLogprobs(chosen=-1.0, top_tokens=[VOCABULARY], top_logprobs=[-1.0])],
        [verifier_pb2.TokenLogprobs(chosen=math.nan, top_tokens=[1], top_logprobs=[-1.0])],
        [verifier_pb2.TokenLogprobs(chosen=-1.0, top_tokens=[1], top_logprobs=[math.nan])],
        [verifier_pb2.TokenLogprobs(chosen=5.0, top_tokens=[1], top_logprobs=[-1.0])],
        [verifier_pb2.TokenLogprobs(chosen=-1.0, top_tokens=[1], top_logprobs=[math.inf])],
    ],
    ids=[
        "none",
        "too many",
        "more best ones",
        "of other tokens",
        "beyond the vocabulary",
        "NaN",
        "NaN of the best",
        "above zero",
        "infinite",
    ],
)
def test_log_probabilities_that_were_not_asked_for(wrong: list[Any]) -> None:
    right = [verifier_pb2.TokenLogprobs(chosen=-1.0, top_tokens=[1], top_logprobs=[-1.0])]
    assert violation(commit(5, [([], 10)], logprobs=right), top_logprobs=1) == ""
    assert violation(commit(5, [([], 10)], logprobs=wrong), top_logprobs=1)


LONG = list(range(1, 31))
"""A prompt whose log-probabilities are still to come."""


def scores(first: int, count: int, top: int = 2, **fields: Any) -> Any:
    each: dict[str, Any] = {"chosen": -0.5, "top_tokens": range(top), "top_logprobs": [-1.0] * top, "rank": 3} | fields
    return verifier_pb2.PromptLogprobs(first=first, logprobs=[verifier_pb2.TokenLogprobs(**each)] * count)


def wrong_scores(found: Any, scored: int) -> str:
    asking = sample(prompt=LONG, prompt_logprobs=2)
    text = CommittedText(asking)
    text.scored = scored
    return MessageCheck(asking, MODEL, CONTEXT).scores_violation(found, text)


@pytest.mark.parametrize(("scored", "first"), [(0, 1), (1, 1), (17, 17), (29, 29)])
def test_scores_go_on_where_they_ended(scored: int, first: int) -> None:
    for count in (1, 30 - first):
        assert wrong_scores(scores(first, count), scored) == ""
    assert wrong_scores(scores(first - 1, 1), scored)
    assert wrong_scores(scores(first + 1, 1), scored)
    assert wrong_scores(scores(first, 0), scored)
    assert wrong_scores(scores(first, 31 - first), scored)


@pytest.mark.parametrize(
    "fields",
    [
        {"chosen": math.nan},
        {"chosen": 0.5},
        {"rank": VOCABULARY + 1},
        {"top": 3},
        {"top_tokens": [0, VOCABULARY]},
        {"top_logprobs": [-1.0, math.nan]},
        {"top_logprobs": [-1.0]},
    ],
)
def test_scores_are_log_probabilities(fields: dict[str, Any]) -> None:
    assert wrong_scores(scores(1, 5, **fields), 0)
    assert wrong_scores(scores(1, 5, chosen=-math.inf), 0) == ""


def test_no_token_comes_before_the_scores() -> None:
    asking = sample(prompt_logprobs=0)
    text = CommittedText(asking)
    first = commit(0, [([], 10)])
    for scored, problem in ((0, "before"), (2, "before"), (3, "")):
        text.scored = scored
        assert problem in MessageCheck(asking, MODEL, CONTEXT).commit_violation(first, text)
    assert MessageCheck(asking, MODEL, CONTEXT).commit_violation(first, text) == ""


def rejected(position: int = 5, depth: int = 0, token: int = 9, source: int = DRAFT) -> Any:
    return model_pb2.RejectedCandidate(position=position, depth=depth, token=token, source=source)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "sound"),
    [
        ([rejected()], True),
        ([rejected(6), rejected(7, depth=1), rejected(8, depth=1)], True),
        ([rejected()] * 7, True),
        ([rejected()] * 8, False),  # of 8 verified candidates one is accepted
        ([rejected(4)], False),
        ([rejected(8)], False),
        ([rejected(5, depth=6)], False),
        ([rejected(token=VOCABULARY)], False),
        ([rejected(source=BONUS)], False),
        ([rejected(source=99)], False),
    ],
)
def test_rejected_candidates_are_near_the_tokens(found: list[Any], sound: bool) -> None:
    problem = violation(commit(5, [([10], 11)], rejected=found), rejected_candidates=True)
    assert (problem == "") is sound
    assert violation(commit(5, [([10], 11)], rejected=found))


@pytest.mark.parametrize(
    ("places", "sound"),
    [
        ([(5, 9)], True),
        ([(5, 9), (7, 9)], True),
        ([(4, 9)], False),
        ([(8, 9)], False),
        ([(7, 9), (5, 9)], False),
        ([(5, VOCABULARY)], False),
    ],
)
def test_log_probabilities_for_a_draft_are_of_these_tokens(places: list[tuple[int, int]], sound: bool) -> None:
    found = commit(5, [([10, 11], 12)])
    found.committed.overruled.extend([overruled(len(PROMPT) + position, token) for position, token in places])
    text = CommittedText(sample())
    text.add([9] * 5)
    assert (MessageCheck(sample(), MODEL, CONTEXT, ["a draft"]).commit_violation(found, text) == "") is sound
    assert MessageCheck(sample(), MODEL, CONTEXT).commit_violation(found, text)


def query(base: int = len(PROMPT) + 5, gaps: Sequence[int] = ()) -> model_pb2.DraftQuery:
    return model_pb2.DraftQuery(base=base, id_gaps=gaps)


def test_a_query_is_about_the_text_and_the_vocabulary() -> None:
    contrasted = sample(rule=Rule.CONTRASTIVE)
    text, check = CommittedText(contrasted), MessageCheck(contrasted, MODEL, CONTEXT)
    text.add([9] * 5)
    for taken in (query(), query(gaps=[0, 1, VOCABULARY - 2])):
        assert check.query_violation(taken, text) == ""
    assert check.query_violation(query(7), text) == "its base is 7, the text has 8 tokens"
    assert "names token 50, the vocabulary has 50 tokens" in check.query_violation(query(gaps=[VOCABULARY]), text)
    assert "has a gap of 0 after the first" in check.query_violation(query(gaps=[3, 0]), text)


def test_queries_about_one_text_end() -> None:
    contrasted = sample(rule=Rule.CONTRASTIVE)
    text, check = CommittedText(contrasted), MessageCheck(contrasted, MODEL, CONTEXT)
    for base in range(len(PROMPT), len(PROMPT) + 3):
        for _ in range(MAX_QUERIES):
            assert check.query_violation(query(base), text) == ""
        assert f"at most {MAX_QUERIES} are allowed" in check.query_violation(query(base), text)
        text.add([9])
