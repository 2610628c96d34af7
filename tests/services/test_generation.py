"""What clients may rely on besides the tokens themselves: text, stops, counts, samples, log-probabilities."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from orchestrator.requests.parsing import parse
from specdec.decoding.logprobs import log_softmax
from specdec.v2 import generation_pb2, model_pb2
from specdec.v2.generation_pb2 import Speculation
from tests.models import END, VOCABULARY
from tests.services.conftest import Directories
from tests.services.test_equality import slow_target
from tests.stack import REMOTE, Stack, request_of, stack

PROMPT = [50, 60, 70, 80, 90]
WARM = {"temperature": 0.8, "seed": 11}
GUESSED = (model_pb2.TOKEN_SOURCE_REMOTE_DRAFT, model_pb2.TOKEN_SOURCE_NGRAM, model_pb2.TOKEN_SOURCE_LOOKAHEAD)


@pytest.fixture
async def services(directories: Directories) -> AsyncIterator[Stack]:
    async with stack(directories.target, directories.near, target_delay=slow_target) as running:
        yield running


async def stream(services: Stack, request: generation_pb2.GenerateRequest) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in services.stub.Generate(request)]


async def test_stream_and_answer_hold_the_same(services: Stack) -> None:
    request = request_of(PROMPT, sampling=WARM, max_tokens=30)
    responses = await stream(services, request)
    whole = await services.generate(PROMPT, sampling=WARM, max_tokens=30)
    assert [t for r in responses for t in r.tokens] == list(whole.tokens)
    assert "".join(r.text for r in responses) == whole.text
    assert whole.text == services.model.tokenizer.decode(whole.tokens)
    assert responses[0].seed == WARM["seed"]
    assert [r.HasField("finish") for r in responses] == [False] * (len(responses) - 1) + [True]
    assert all(len(r.tokens) == len(r.sources) > 0 for r in responses)
    assert all(r.timings.step_us >= r.timings.forward_us > 0 for r in responses)
    elapsed = [r.timings.elapsed_us for r in responses]
    assert elapsed == sorted(elapsed)


async def test_rejected_candidates_are_told(services: Stack) -> None:
    """Together with the accepted candidates, they are all the verified ones, up to the end of the text."""
    always = Speculation(drafters=[REMOTE], forced=True)
    options: dict[str, Any] = {"sampling": WARM, "max_tokens": 60, "ignore_end_token": True, "speculation": always}
    responses = await stream(services, request_of(PROMPT, rejected_candidates=True, **options))
    whole = await services.generate(PROMPT, rejected_candidates=True, **options)
    streamed = [candidate for response in responses for candidate in response.rejected]
    tokens = [token for response in responses for token in response.tokens]
    for finish, rejected in ((responses[-1].finish, streamed), (whole.finish, list(whole.rejected))):
        speculation = finish.speculation
        assert len(rejected) == speculation.offered - speculation.accepted > 0
        assert {candidate.source for candidate in rejected} == {model_pb2.TOKEN_SOURCE_REMOTE_DRAFT}
        assert all(c.token != tokens[c.position] for c in rejected if c.depth == 0)
        assert all(c.bytes == services.model.tokenizer.piece(c.token) for c in rejected)
    assert not (await services.generate(PROMPT, **options)).rejected


async def test_what_is_not_streamed_has_time(services: Stack) -> None:
    """Its commits are coalesced, unless the text may have to stop at a string unknown to the verifier."""
    asked = request_of(PROMPT, max_tokens=3)
    assert [parse(asked, services.model, streamed=each).samples[0].coalesce_commits for each in (True, False)] == [
        False,
        True,
    ]
    asked.stop.append("x")
    assert not parse(asked, services.model, streamed=False).samples[0].coalesce_commits


async def test_counts_are_exact(services: Stack) -> None:
    always = Speculation(drafters=[REMOTE], forced=True)
    asked = request_of(PROMPT, sampling=WARM, max_tokens=100, ignore_end_token=True, speculation=always)
    responses = await stream(services, asked)
    finish = responses[-1].finish
    assert finish.reason == model_pb2.FINISH_REASON_LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens) == (len(PROMPT), 100)
    speculation = finish.speculation
    sources = [s for r in responses for s in r.sources]
    assert speculation.steps == sum(r.steps for r in responses) == sum(speculation.accepted_histogram)
    assert model_pb2.TOKEN_SOURCE_REMOTE_DRAFT in sources
    assert speculation.accepted == sum(source in GUESSED for source in sources)
    assert speculation.accepted == sum(i * n for i, n in enumerate(speculation.accepted_histogram))
    assert speculation.offered >= speculation.accepted
    assert sum(speculation.sources.values()) == 100
    assert finish.reproducible
    assert "/torch-" in finish.numerics_fingerprint


async def test_a_stop_string_cuts_exactly(services: Stack) -> None:
    """The text ends before the stop string, and no token follows it, even inside an accepted block."""
    decode = services.model.tokenizer.decode
    partial = [token for token in range(VOCABULARY) if "\ufffd" in decode([token])]
    warm = WARM | {"banned_tokens": partial}  # whole characters only, so that the cut is visible from outside
    whole = await services.generate(PROMPT, sampling=warm, max_tokens=24, ignore_end_token=True)
    for cut, plain in itertools.product(range(2, 24, 3), (False, True)):
        stop = decode(whole.tokens[: cut + 1])[-3:]
        at = whole.text.find(stop)
        responses = await stream(
            services,
            request_of(PROMPT, sampling=warm, max_tokens=24, ignore_end_token=True, stop=[stop, "never"], plain=plain),
        )
        finish = responses[-1].finish
        tokens = [t for r in responses for t in r.tokens]
        assert finish.reason == model_pb2.FINISH_REASON_STOP
        assert finish.stop == stop
        assert "".join(r.text for r in responses) == whole.text[:at]
        assert tokens == list(whole.tokens[: len(tokens)])
        assert stop in decode(tokens)
        assert stop not in decode(tokens[:-1])
        assert finish.usage.completion_tokens == len(tokens) == sum(finish.speculation.sources.values())


async def test_end_tokens_end_the_text(services: Stack) -> None:
    whole = await services.generate(PROMPT, sampling=WARM, max_tokens=24, ignore_end_token=True)
    stop = whole.tokens[9]
    first = list(whole.tokens).index(stop)
    ended = await services.generate(PROMPT, sampling=WARM, max_tokens=24, ignore_end_token=True, stop_tokens=[stop])
    assert list(ended.tokens) == list(whole.tokens[: first + 1])
    assert ended.finish.reason == model_pb2.FINISH_REASON_STOP
    assert ended.text == services.model.tokenizer.decode(ended.tokens[:-1])
    later = await services.generate(
        PROMPT, sampling=WARM, max_tokens=24, ignore_end_token=True, stop_tokens=[stop], min_tokens=first + 3
    )
    assert stop not in later.tokens[: first + 2]
    assert len(later.tokens) > first + 1


async def test_the_models_own_end_token_ends_the_text(services: Stack) -> None:
    """A bias makes the end token certain."""
    ended = await services.generate(PROMPT, sampling={"logit_bias": {END: 100.0}}, max_tokens=5)
    assert list(ended.tokens) == [END]
    assert ended.text == ""
    on = await services.generate(PROMPT, sampling={"logit_bias": {END: 100.0}}, max_tokens=5, ignore_end_token=True)
    assert list(on.tokens) == [END] * 5


async def test_banned_tokens_are_never_chosen(services: Stack) -> None:
    banned = list(range(3, 200))
    completion = await services.generate(PROMPT, sampling=WARM | {"banned_tokens": banned}, max_tokens=30)
    assert not set(banned) & set(completion.tokens)


async def test_samples_differ_and_each_can_be_had_again(services: Stack) -> None:
    warm = WARM | {"temperature": 1.5}
    three = await services.complete(PROMPT, sampling=warm, max_tokens=12, n=3)
    texts = [list(c.tokens) for c in three.completions]
    assert len({tuple(t) for t in texts}) == 3
    assert [
        list(c.tokens) for c in (await services.complete(PROMPT, sampling=warm, max_tokens=12, n=3)).completions
    ] == texts
    assert list((await services.generate(PROMPT, sampling=warm, max_tokens=12)).tokens) == texts[0]


async def test_a_seed_is_drawn_and_told(services: Stack) -> None:
    first = await services.complete(PROMPT, sampling={"temperature": 1.0}, max_tokens=12)
    other = await services.complete(PROMPT, sampling={"temperature": 1.0}, max_tokens=12)
    assert first.seed != other.seed
    again = await services.complete(PROMPT, sampling={"temperature": 1.0, "seed": first.seed}, max_tokens=12)
    assert list(again.completions[0].tokens) == list(first.completions[0].tokens)


async def test_logprobs_are_the_targets(services: Stack, directories: Directories) -> None:
    completion = await services.generate(PROMPT, sampling=WARM, max_tokens=10, logprobs=4, ignore_end_token=True)
    assert len(completion.logprobs) == 10
    text = list(PROMPT)
    for token, logprobs in zip(completion.tokens, completion.logprobs, strict=True):
        want = log_softmax(directories.oracle.logits(text))
        assert logprobs.chosen == pytest.approx(float(want[token]), abs=1e-3)
        assert list(logprobs.top_tokens) == np.argsort(-want)[:4].tolist()
        assert list(logprobs.top_logprobs) == pytest.approx(np.sort(want)[::-1][:4].tolist(), abs=1e-3)
        spelt = services.model.tokenizer.piece
        assert logprobs.chosen_bytes == spelt(token)
        assert list(logprobs.top_bytes) == [spelt(best) for best in logprobs.top_tokens]
        text.append(token)
    none = await services.generate(PROMPT, sampling=WARM, max_tokens=10)
    assert not none.logprobs


async def test_a_resumed_text_goes_on_in_mid_word(services: Stack) -> None:
    """Cut anywhere, including inside a character of several tokens and inside a stop string."""
    fields = {"sampling": WARM, "max_tokens": 24, "ignore_end_token": True, "stop": ["zzzz", "e e"]}
    responses = await stream(services, request_of(PROMPT, **fields))
    text = "".join(r.text for r in responses)
    tokens = [t for r in responses for t in r.tokens]
    seen_tokens, seen = 0, ""
    for response in responses[:-1]:
        seen_tokens += len(response.tokens)
        seen += response.text
        rest = await services.generate(PROMPT, generated_tokens=tokens[:seen_tokens], **fields)
        assert seen + rest.text == text


async def test_chat_uses_the_models_template(services: Stack) -> None:
    chat = generation_pb2.ChatPrompt(
        messages=[
            generation_pb2.ChatMessage(role="user", content="hello"),
            generation_pb2.ChatMessage(role="user", content="x"),
        ]
    )
    request = generation_pb2.GenerateRequest(chat=chat, max_tokens=5)
    (answer,) = (await services.stub.Complete(generation_pb2.CompleteRequest(request=request))).completions
    rendered = services.model.tokenizer.encode("<s>user: hello\nuser: x\nassistant:", special=False)
    assert answer.finish.usage.prompt_tokens == len(rendered)
    assert list(answer.tokens) == list((await services.generate(rendered, max_tokens=5)).tokens)


async def test_models_are_listed(services: Stack) -> None:
    (model,) = (await services.stub.ListModels(generation_pb2.ListModelsRequest())).models
    assert (model.name, model.context_tokens, model.vocabulary_size, model.chat) == ("target", 256, VOCABULARY, True)


def window(width: int, ngram: int, guesses: int, **fields: Any) -> Speculation:
    size = model_pb2.Lookahead(window=width, ngram=ngram, guesses=guesses)
    return Speculation(lookahead=size, **fields)


GOOD = {"max_tokens": 4}
NAN = float("nan")
UNKNOWN: Any = 7
BAD: list[tuple[str, dict[str, object], str]] = [
    ("empty prompt", {"prompt": []}, "tokens.ids"),
    ("token out of range", {"prompt": [5, VOCABULARY]}, "tokens.ids[1]"),
    ("prompt too long", {"prompt": [5] * 256}, "prompt"),
    ("negative temperature", {"sampling": {"temperature": -0.5}}, "sampling.temperature"),
    ("temperature nan", {"sampling": {"temperature": NAN}}, "sampling.temperature"),
    ("temperature infinite", {"sampling": {"temperature": math.inf}}, "sampling.temperature"),
    ("top_p 0", {"sampling": {"top_p": 0.0}}, "sampling.top_p"),
    ("top_p above 1", {"sampling": {"top_p": 1.5}}, "sampling.top_p"),
    ("top_p nan", {"sampling": {"top_p": NAN}}, "sampling.top_p"),
    ("min_p above 1", {"sampling": {"min_p": 1.5}}, "sampling.min_p"),
    ("typical_p 0", {"sampling": {"typical_p": 0.0}}, "sampling.typical_p"),
    ("repetition penalty 0", {"sampling": {"repetition_penalty": 0.0}}, "sampling.repetition_penalty"),
    ("frequency penalty", {"sampling": {"frequency_penalty": 3.0}}, "sampling.frequency_penalty"),
    ("presence penalty", {"sampling": {"presence_penalty": NAN}}, "sampling.presence_penalty"),
    ("bias", {"sampling": {"logit_bias": {4: 1e6}}}, "sampling.logit_bias[4]"),
    ("bias of no token", {"sampling": {"logit_bias": {9999: 1.0}}}, "sampling.logit_bias[9999]"),
    ("all banned", {"sampling": {"banned_tokens": list(range(VOCABULARY))}}, "sampling.banned_tokens"),
    ("max_tokens 0", {"max_tokens": 0}, "max_tokens"),
    ("min above max", {"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ("n", {"n": 17}, "n"),
    ("logprobs", {"logprobs": 21}, "logprobs"),
    ("empty stop", {"stop": ["ok", ""]}, "stop[1]"),
    ("too many stops", {"stop": ["x"] * 17}, "stop"),
    ("stop token", {"stop_tokens": [VOCABULARY]}, "stop_tokens[0]"),
    ("rule", {"rule": 99}, "rule"),
    ("tenant", {"tenant": "x" * 257}, "tenant"),
    ("drafter", {"speculation": Speculation(drafters=[UNKNOWN])}, "speculation.drafters"),
    (
        "no drafter",
        {"speculation": Speculation(drafters=[model_pb2.DRAFTER_UNSPECIFIED])},
        "speculation.drafters",
    ),
    (
        "drafter twice",
        {"speculation": Speculation(drafters=[REMOTE] * 2)},
        "speculation.drafters",
    ),
    (
        "drafters and off",
        {"speculation": Speculation(drafters=[REMOTE], off=True)},
        "speculation.drafters",
    ),
    ("forced and off", {"speculation": Speculation(forced=True, off=True)}, "speculation.forced"),
    ("window", {"speculation": window(1, 3, 3)}, "speculation.lookahead.window"),
    ("ngram", {"speculation": window(3, 1, 3)}, "speculation.lookahead.ngram"),
    ("guesses", {"speculation": window(3, 3, 65)}, "speculation.lookahead.guesses"),
    ("too large a window", {"speculation": window(40, 5, 3)}, "speculation.lookahead"),
    (
        "a window for nobody",
        {"speculation": window(4, 3, 3, drafters=[REMOTE])},
        "speculation.lookahead",
    ),
    ("resume without seed", {"generated_tokens": [4]}, "sampling.seed"),
    ("resume of several", {"generated_tokens": [4], "n": 2, "sampling": {"seed": 1}}, "n"),
    ("nothing left", {"generated_tokens": [4] * 4, "sampling": {"seed": 1}}, "generated_tokens"),
]


async def test_bad_input_names_the_field(services: Stack) -> None:
    from google.rpc import error_details_pb2, status_pb2

    for what, fields, field in BAD:
        merged: dict[str, object] = GOOD | fields
        prompt = merged.pop("prompt", PROMPT)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await services.generate(prompt, **merged)  # type: ignore[arg-type]
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, what
        status = status_pb2.Status()
        details = dict(refused.value.trailing_metadata() or ())["grpc-status-details-bin"]
        status.ParseFromString(details)
        bad = error_details_pb2.BadRequest()
        assert any(detail.Unpack(bad) for detail in status.details), what
        assert field in [violation.field for violation in bad.field_violations], (what, bad)
    assert services.verifier_loop.pool.held == 0


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "gpt-5"}, grpc.StatusCode.NOT_FOUND),
    ],
)
async def test_what_is_not_here_is_refused_by_name(
    services: Stack, fields: dict[str, object], code: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await services.generate(PROMPT, max_tokens=3, **fields)
    assert refused.value.code() is code
    assert str(next(iter(fields.values()))) in str(refused.value.details()) or "not built" in str(
        refused.value.details()
    )


async def test_no_prompt_at_all(services: Stack) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="set one of text, tokens, chat"):
        await services.stub.Complete(generation_pb2.CompleteRequest())
