"""OpenAI's own client against a fake orchestrator: everything it sends arrives, and it can read every response."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import openai
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc.code_pb2 import (
    INVALID_ARGUMENT,
    NOT_FOUND,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    UNAUTHENTICATED,
    UNAVAILABLE,
)
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo

from specdec.openai_api.gateway import PROMPTS_AT_ONCE
from specdec.wire.request_metadata import PROMPTS
from tests.client.fake_server import DIGEST, TEXT, TOKENS, Act, FakeServer, rich
from tests.openai_api.front import front
from tests.stack import until

CHAT: Any = [{"role": "user", "content": "hello"}]


def request_of(server: FakeServer) -> Any:
    """Return the last generation request."""
    return server.calls[-1].request


async def test_a_completion() -> None:
    async with FakeServer() as server, front(server.address) as http:
        answer = await http.client.completions.create(model="fake", prompt="def", max_tokens=40, seed=5)
    (choice,) = answer.choices
    assert choice.text == TEXT
    assert choice.finish_reason == "length"
    assert answer.model == "fake"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == len(TOKENS)
    assert answer.usage.total_tokens == 2 + len(TOKENS)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1
    assert request_of(server).text == "def"
    assert request_of(server).sampling.seed == 5


async def test_a_chat() -> None:
    async with FakeServer() as server, front(server.address) as http:
        answer = await http.client.chat.completions.create(
            model="fake",
            messages=[
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
            ],
        )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].message.role == "assistant"
    turns = [(turn.role, turn.content) for turn in request_of(server).chat.messages]
    assert turns == [("system", "be brief"), ("user", "hello")]


@pytest.mark.parametrize("chat", [False, True])
async def test_a_stream(chat: bool) -> None:
    """Pieces join to the text; the role comes first, the usage last."""
    async with FakeServer() as server, front(server.address) as http:
        told: Any = {"stream": True, "stream_options": {"include_usage": True}}
        if chat:
            stream: Any = await http.client.chat.completions.create(model="fake", messages=CHAT, **told)
        else:
            stream = await http.client.completions.create(model="fake", prompt="def", **told)
        events = [event async for event in stream]
    *pieces, last = events
    assert last.choices == []
    assert last.usage.completion_tokens == len(TOKENS)
    assert last.system_fingerprint == pieces[-1].system_fingerprint is not None
    assert all(each.usage is None for each in pieces)
    if chat:
        assert pieces[0].choices[0].delta.role == "assistant"
        text = "".join(each.choices[0].delta.content or "" for each in pieces)
    else:
        text = "".join(each.choices[0].text for each in pieces)
    assert text == TEXT
    assert [each.choices[0].finish_reason for each in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert len({each.id for each in events}) == 1
    begun = pieces[1 if chat else 0].choices[0].specdec
    assert begun["seed"] == 1000 + len(server.calls)
    assert begun["resolved"]["prompt_digest"] == DIGEST
    assert pieces[-1].choices[0].specdec["accepted"] > 0


async def test_every_parameter_arrives() -> None:
    async with FakeServer() as server, front(server.address) as http:
        await http.client.chat.completions.create(
            model="fake",
            messages=CHAT,
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.25,
            frequency_penalty=0.5,
            presence_penalty=-0.5,
            logit_bias={"5": 2, "6": -100},
            stop=["a", "b"],
            seed=-2,
            n=2,
            logprobs=True,
            top_logprobs=3,
            user="somebody",
            extra_body={
                "top_k": 4,
                "min_p": 0.125,
                "repetition_penalty": 1.5,
                "min_tokens": 2,
                "ignore_eos": True,
                "stop_token_ids": [9],
                "priority": -3,
                "chat_template_kwargs": {"enable_thinking": False},
                "specdec": {"speculation": "off", "tenant": "t", "banned_tokens": [8]},
            },
        )
    request = request_of(server)
    assert request.max_tokens == 7
    assert request.min_tokens == 2
    assert list(request.stop) == ["a", "b"]
    assert list(request.stop_tokens) == [9]
    assert request.ignore_end_token
    assert request.n == 2
    assert request.logprobs == 3
    assert request.priority == -3
    assert dict(request.chat.template_arguments.items()) == {"enable_thinking": False}
    assert request.tenant == "t"
    assert request.speculation.off
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.25, 4, 0.125)
    assert sampling.repetition_penalty == 1.5
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.5)
    assert dict(sampling.logit_bias) == {5: 2.0, 6: -100.0}
    assert list(sampling.banned_tokens) == [8]
    assert sampling.seed == 2**64 - 2


async def test_what_is_silent_is_as_openai_has_it() -> None:
    """By default, the temperature is 1; a completion has 16 tokens, a chat the rest of the context."""
    async with FakeServer() as server, front(server.address) as http:
        await http.client.completions.create(model="fake", prompt="def")
        completion = request_of(server)
        await http.client.chat.completions.create(model="fake", messages=CHAT)
        chat = request_of(server)
    assert completion.fallback_temperature == chat.fallback_temperature == 1.0
    assert not completion.sampling.HasField("temperature")
    assert completion.max_tokens == 16
    assert not chat.HasField("max_tokens")


@pytest.mark.parametrize("stream", [False, True])
async def test_many_prompts_and_samples(stream: bool) -> None:
    """Sample j of prompt i is choice i * n + j."""
    prompts = ["a", "b", "c"]
    async with FakeServer() as server, front(server.address) as http:
        asked: Any = {"model": "fake", "prompt": prompts, "n": 2}
        texts = dict.fromkeys(range(6), "")
        if stream:
            async for event in await http.client.completions.create(**asked, stream=True):
                for choice in event.choices:
                    texts[choice.index] += choice.text
        else:
            answer = await http.client.completions.create(**asked)
            texts = {choice.index: choice.text for choice in answer.choices}
            assert answer.usage.prompt_tokens == 3 * 2
            assert answer.usage.completion_tokens == 6 * len(TOKENS)
    assert texts == dict.fromkeys(range(6), TEXT)
    assert sorted(call.request.text for call in server.calls) == prompts


async def test_prompts_of_tokens() -> None:
    async with FakeServer() as server, front(server.address) as http:
        await http.client.completions.create(model="fake", prompt=[3, 4])
        assert list(request_of(server).tokens.ids) == [3, 4]
        await http.client.completions.create(model="fake", prompt=[[3, 4], [5]])
    assert sorted(list(call.request.tokens.ids) for call in server.calls[-2:]) == [[3, 4], [5]]


async def test_logprobs_of_a_chat() -> None:
    async with FakeServer() as server, front(server.address) as http:
        answer = await http.client.chat.completions.create(model="fake", messages=CHAT, logprobs=True, top_logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert [bytes(each.bytes or ()) for each in found.content] == [bytes([token]) for token in TOKENS]
    assert {each.logprob for each in found.content} == {-0.5}
    assert [len(each.top_logprobs) for each in found.content] == [2] * len(TOKENS)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_of_a_completion(stream: bool) -> None:
    """Each token has its text offset; all tokens of a character have the character's offset."""
    async with FakeServer() as server, front(server.address) as http:
        asked: Any = {"model": "fake", "prompt": "def", "logprobs": 2}
        if stream:
            events = [each async for each in await http.client.completions.create(**asked, stream=True)]
            found = [each.choices[0].logprobs for each in events if each.choices[0].logprobs is not None]
        else:
            found = [(await http.client.completions.create(**asked)).choices[0].logprobs]
    offsets = [offset for each in found for offset in each.text_offset]
    assert [lp for each in found for lp in each.token_logprobs] == [-0.5] * len(TOKENS)
    assert offsets == [len(bytes(TOKENS[:at]).decode(errors="ignore")) for at in range(len(TOKENS))]


async def test_models() -> None:
    async with FakeServer() as server, front(server.address) as http:
        listed = await http.client.models.list()
        assert [each.id for each in listed.data] == ["fake"]
        assert (await http.client.models.retrieve("fake")).id == "fake"
        with pytest.raises(openai.NotFoundError, match="'other' is not served here"):
            await http.client.models.retrieve("other")


async def test_a_model_with_several_names() -> None:
    async with FakeServer() as server, front(server.address) as http:
        server.aliases = ["gpt-4o", "a/b"]
        assert [model.id for model in (await http.client.models.list()).data] == ["fake", "gpt-4o", "a/b"]
        assert (await http.client.models.retrieve("a/b")).id == "a/b"
        for name, answered in (("gpt-4o", "gpt-4o"), ("", "fake")):  # the only model, whichever name is given
            answer = await http.client.completions.create(model=name, prompt="def")
            assert (answer.model, request_of(server).model) == (answered, name)


async def test_key_id_and_trace_go_on() -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with FakeServer() as server, front(server.address) as http:
        answer = await http.client.completions.with_raw_response.create(
            model="fake", prompt="def", extra_headers={"x-request-id": "mine", "traceparent": trace}
        )
    metadata = server.calls[-1].metadata
    assert metadata["authorization"] == "Bearer key"
    assert metadata["x-request-id"] == answer.headers["x-request-id"] == "mine"
    assert metadata["traceparent"] == trace
    assert answer.parse().id == "cmpl-mine"


BAD = BadRequest(field_violations=[{"field": "sampling.temperature", "description": "is -1, must be at least 0"}])
REFUSALS: list[tuple[Any, type[openai.APIStatusError], int, str]] = [
    (rich(INVALID_ARGUMENT, BAD), openai.BadRequestError, 400, "temperature: is -1, must be at least 0"),
    (rich(NOT_FOUND, ErrorInfo(reason="UNKNOWN_MODEL")), openai.NotFoundError, 404, "refused"),
    (rich(UNAUTHENTICATED, ErrorInfo(reason="UNAUTHENTICATED")), openai.AuthenticationError, 401, "refused"),
    (rich(PERMISSION_DENIED, ErrorInfo(reason="WRONG_TENANT")), openai.PermissionDeniedError, 403, "refused"),
    (
        rich(RESOURCE_EXHAUSTED, ErrorInfo(reason="TENANT_LIMIT"), RetryInfo(retry_delay=Duration(seconds=7))),
        openai.RateLimitError,
        429,
        "refused",
    ),
    (rich(RESOURCE_EXHAUSTED, ErrorInfo(reason="OVERLOADED")), openai.InternalServerError, 503, "refused"),
    (rich(UNAVAILABLE, ErrorInfo(reason="VERIFIER_LOST")), openai.InternalServerError, 503, "refused"),
]


@pytest.mark.parametrize("prompt", ["def", ["a", "b"]], ids=["one prompt", "two"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("act", "kind", "status", "message"), REFUSALS)
async def test_refusals_of_the_orchestrator(
    act: Act, kind: type[openai.APIStatusError], status: int, message: str, stream: bool, prompt: Any
) -> None:
    """Before the first token, refusals are HTTP statuses, even for streams."""

    async with FakeServer(script=itertools.repeat(act)) as server, front(server.address) as http:
        with pytest.raises(kind, match=message) as caught:
            await http.client.completions.create(model="fake", prompt=prompt, stream=stream)
    assert caught.value.status_code == status
    assert caught.value.request_id
    if status == 400:
        assert caught.value.param == "temperature"
    if status == 429:
        assert caught.value.response.headers["retry-after"] == "7"


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    breaking = Act(tokens=6, then="abort", status=rich(INVALID_ARGUMENT, BAD).status)
    async with FakeServer(breaking) as server, front(server.address) as http:
        stream = await http.client.completions.create(model="fake", prompt="def", stream=True)
        with pytest.raises(openai.APIError, match="temperature: is -1"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 6])
async def test_a_caller_who_leaves_ends_the_request(stream: bool, tokens: int) -> None:
    async with FakeServer(Act(tokens=tokens, then="hold")) as server, front(server.address) as http:

        async def ask() -> None:
            answer: Any = await http.client.completions.create(model="fake", prompt="def", stream=stream)
            async for _ in answer:
                pass

        asking = asyncio.create_task(ask())
        await asyncio.wait_for(server.held.wait(), 10)
        asking.cancel()
        await asyncio.wait_for(server.freed.wait(), 10)
        await until(lambda: http.app.running == 0)


@pytest.mark.parametrize("api", ["completions", "messages", "responses"])
async def test_a_caller_who_leaves_ends_the_lookup_of_the_model(api: str) -> None:
    listing = [Act(), Act(then="hold")]  # one to admit the caller, one for the request's model
    fields: dict[str, Any] = {"prompt": "hi", "input": "hi", "messages": CHAT, "max_tokens": 9}
    names = {"completions": ["prompt"], "messages": ["messages", "max_tokens"], "responses": ["input"]}[api]
    async with FakeServer(listing=listing) as server, front(server.address) as http:
        body = {name: fields[name] for name in names}
        asking = asyncio.create_task(http.client.post(f"/{api}", body=body, cast_to=object))
        await asyncio.wait_for(server.held.wait(), 10)
        asking.cancel()
        await until(lambda: http.app.running == 0, 10)


async def test_a_stream_goes_on_at_another_orchestrator() -> None:
    """The first orchestrator fails in the middle of a character."""
    breaking = Act(tokens=4, then="abort")
    async with FakeServer(breaking) as one, FakeServer(breaking) as other, front(one.address, other.address) as http:
        stream = await http.client.completions.create(model="fake", prompt="def", stream=True)
        text = "".join([event.choices[0].text async for event in stream])
    assert text == TEXT


async def test_names_in_refusals_are_the_callers() -> None:
    wrong = [("stop_tokens[0]", "is 999"), ("max_tokens", "is 0"), ("logprobs", "is 25"), ("tokens.ids[3]", "is 999")]
    violations = [{"field": field, "description": problem} for field, problem in wrong]
    act = rich(INVALID_ARGUMENT, BadRequest(field_violations=violations))
    async with FakeServer(act) as server, front(server.address) as http:
        with pytest.raises(openai.BadRequestError) as caught:
            await http.client.chat.completions.create(
                model="fake", messages=CHAT, max_completion_tokens=0, extra_body={"stop_token_ids": [999]}
            )
    problems = "stop_token_ids[0]: is 999; max_completion_tokens: is 0; top_logprobs: is 25; prompt[3]: is 999"
    assert problems in caught.value.message


async def test_an_error_among_many_prompts_is_told_in_the_stream() -> None:
    """The error also ends the other prompts."""
    acts = [Act(), Act(tokens=6, then="abort", status=rich(INVALID_ARGUMENT, BAD).status), Act(tokens=6, then="hold")]
    async with FakeServer(*acts) as server, front(server.address) as http:
        stream = await http.client.completions.create(model="fake", prompt=["a", "b", "c"], stream=True)
        with pytest.raises(openai.APIError, match="temperature: is -1"):
            async for _ in stream:
                pass
        await until(lambda: http.app.running == 0)
        (requests,) = [each for each in http.app.metrics() if each.name == "specdec_openai_requests"]
    assert [(each.labels["status"], each.value) for each in requests.samples] == [("400", 1.0)]


async def test_few_of_many_prompts_are_asked_at_once() -> None:
    """Each prompt counts against the tenant's limits."""
    held = [Act(tokens=0, then="hold")] * PROMPTS_AT_ONCE
    async with FakeServer(*held) as server, front(server.address) as http:
        asked = asyncio.create_task(http.client.completions.create(model="fake", prompt=["a"] * 20))
        await until(lambda: len(server.calls) == PROMPTS_AT_ONCE)
        await http.client.models.list()  # sent later on the same connection, and answered
        assert len(server.calls) == PROMPTS_AT_ONCE
        asked.cancel()
        await until(lambda: http.app.running == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tenants_limit_makes_prompts_wait_for_each_other(stream: bool) -> None:
    limited = rich(RESOURCE_EXHAUSTED, ErrorInfo(reason="TENANT_LIMIT"))
    acts = [Act(), *[limited] * (PROMPTS_AT_ONCE - 1), *[Act()] * 19]
    async with FakeServer(*acts) as server, front(server.address) as http:
        create: Any = http.client.completions.create
        answer = await create(model="fake", prompt=["a"] * 20, stream=stream)
        pieces = [piece async for piece in answer] if stream else [answer]
        finished = [choice for piece in pieces for choice in piece.choices if choice.finish_reason]
    assert sorted(choice.index for choice in finished) == list(range(20))
    assert len(server.calls) == 20 + PROMPTS_AT_ONCE - 1


async def test_the_last_prompts_wait_for_a_limit_per_minute() -> None:
    """What the others have cost would be lost otherwise."""
    limited = rich(RESOURCE_EXHAUSTED, ErrorInfo(reason="TENANT_LIMIT"))
    async with FakeServer(Act(), limited, limited, Act(), Act()) as server, front(server.address) as http:
        answer = await http.client.completions.create(model="fake", prompt=["a"] * 3)
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * 3
    assert len(server.calls) == 5
    assert {call.metadata[PROMPTS] for call in server.calls} == {"3"}


async def test_a_prompt_that_waits_for_a_limit_is_decoded_once() -> None:
    """Decoding counts against the limit too."""
    limited = rich(RESOURCE_EXHAUSTED, ErrorInfo(reason="TENANT_LIMIT"))
    async with FakeServer(*3 * [Act()], limited, Act()) as server, front(server.address) as http:
        answer = await http.client.completions.create(model="fake", prompt=[[104], [105]], extra_body={"echo": True})
    assert [choice.text[0] for choice in answer.choices] == ["h", "i"]
    assert sorted(request.tokens.ids[0] for request in server.tokenized) == [104, 105]
    assert len(server.calls) == 5


async def test_each_prompt_tells_its_seed() -> None:
    async with FakeServer() as server, front(server.address) as http:
        answer = await http.client.completions.create(model="fake", prompt=["a", "b"])
    own: Any = [choice.specdec for choice in answer.choices]  # type: ignore[attr-defined]
    assert sorted(each["seed"] for each in own) == [1001, 1002]
