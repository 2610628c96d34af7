"""Routes beside those of the APIs: tokens, probes, descriptions and metrics; and the answer to an unknown path."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import httpx2
import pytest
from google.rpc.code_pb2 import INVALID_ARGUMENT
from google.rpc.error_details_pb2 import BadRequest
from starlette.routing import Route

from specdec import __version__
from specdec.openai_api.app import make_app
from specdec.openai_api.errors import ApiError
from specdec.openai_api.gateway import Gateway
from specdec.openai_api.routes import ALIASES, DESCRIBED, PROBES, ROUTES, advice, openapi, page
from specdec.openai_api.tokens import parse_detokenize, parse_tokenize
from tests.client.fake_server import FakeServer, rich
from tests.openai_api.front import front

HI = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(server: FakeServer, **options: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with (
        front(server.address, **options) as http,
        httpx2.AsyncClient(base_url=f"http://{http.address}") as client,
    ):
        yield client


async def test_tokens_in_the_formats_of_vllm_and_llama_cpp() -> None:
    async with FakeServer() as server, client_of(server) as client:

        async def asked(path: str, **fields: Any) -> Any:
            answer = await client.post(path, json=fields)
            assert answer.status_code == 200, answer.text
            return answer.json()

        vllm = await asked("/tokenize", prompt="aé", model="fake")
        assert vllm == {"count": 4, "max_model_len": 1024, "tokens": [0, 97, 195, 169], "token_strs": None}
        bare = await asked("/tokenize", prompt="aé", add_special_tokens=False, return_token_strs=True, unknown=1)
        assert (bare["tokens"], bare["token_strs"]) == ([97, 195, 169], ["a", "\ufffd", "\ufffd"])
        assert bare["specdec"] == {"ignored": ["unknown"]}
        assert await asked("/tokenize", content="a") == {"tokens": [97]}
        pieces = await asked("/tokenize", content="aé", add_special=True, with_pieces=True)
        assert pieces["tokens"][1:3] == [{"id": 97, "piece": "a"}, {"id": 195, "piece": [195]}]
        assert await asked("/detokenize", tokens=[97, 195, 169]) == {"prompt": "aé", "content": "aé"}
        long = await client.post("/tokenize", json={"content": "a" * 40_000, "with_pieces": True})
    assert (long.status_code, long.json()["error"]["param"]) == (400, "with_pieces")


@pytest.mark.parametrize(
    ("body", "field", "named"),
    [
        ({"messages": HI}, "chat.template_arguments", "chat_template_kwargs"),
        ({"messages": HI}, "chat.messages[0].content", "messages[0].content"),
        ({"prompt": "hi"}, "text", "prompt"),
        ({"content": "hi"}, "text", "content"),
    ],
)
async def test_what_the_orchestrator_refuses_is_named_as_the_caller_names_it(
    body: dict[str, Any], field: str, named: str
) -> None:
    violation = BadRequest.FieldViolation(field=field, description="is wrong")
    refusal = rich(INVALID_ARGUMENT, BadRequest(field_violations=[violation]))
    async with FakeServer(refusal) as server, client_of(server) as client:
        answer = await client.post("/tokenize", json={"model": "fake", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, named)


def test_a_conversation_is_tokenized_as_a_chat_is() -> None:
    asked = parse_tokenize(
        {"model": "m", "messages": HI, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    )
    chat = asked.message.chat
    assert (asked.message.model, chat.no_generation_prompt, chat.continue_final_message) == ("m", True, False)
    assert dict(chat.template_arguments) == {"a": 1}
    assert parse_tokenize({"messages": HI, "continue_final_message": True, "add_generation_prompt": False})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "content": "a"}, "content"),
        ({"prompt": [1]}, "prompt"),
        ({"prompt": "a\ud800"}, "prompt"),
        ({"prompt": "a", "model": 5}, "model"),
        ({"prompt": "a", "with_pieces": True}, "with_pieces"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ({"content": "a", "parse_special": False}, "parse_special"),
        ({"messages": HI, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": HI, "chat_template": "x"}, "chat_template"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_cannot_be_tokenized_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_tokenize(fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("tokens", [None, "a", [True], [-1], [1 << 32], ["1"]])
def test_what_cannot_be_detokenized_is_named(tokens: Any) -> None:
    with pytest.raises(ApiError, match="tokens: must be a list of token ids"):
        parse_detokenize({"tokens": tokens})


async def test_probes_and_descriptions() -> None:
    async with FakeServer(keys=["key"]) as server, client_of(server) as client:
        for path in PROBES:
            assert (await client.get(path)).status_code == 200
        assert (await client.post("/ping")).status_code == 200
        keyed = [("GET", path) for path in ("/version", "/openapi.json", "/docs", "/metrics")]
        keyed += [("POST", path) for path in ("/tokenize", "/detokenize", "/completions", "/chat/completions")]
        for method, path in keyed:
            assert (await client.request(method, path)).status_code == 401, path
        client.headers["authorization"] = "Bearer key"
        assert (await client.get("/version")).json() == {"version": __version__}
        assert (await client.get("/openapi.json")).json() == openapi()
        shown = await client.get("/docs")
        assert "/v1/chat/completions" in shown.text
        assert shown.headers["content-security-policy"].startswith("default-src 'none'")
        for alias, path in ALIASES.items():
            prompt = {"messages": HI} if "chat" in path else {"prompt": "def"}
            assert (await client.post(alias, json={"model": "fake", **prompt})).status_code == 200
        assert (await client.get("/metrics")).status_code == 404


async def test_metrics_are_for_callers_with_a_key() -> None:
    async with FakeServer(keys=["key"]) as server, client_of(server, metrics=lambda: b"up 1\n") as client:
        assert (await client.get("/metrics")).status_code == 401
        answer = await client.get("/metrics", headers={"authorization": "Bearer key"})
    assert (answer.status_code, answer.content) == (200, b"up 1\n")
    assert answer.headers["content-type"].startswith("text/plain")


async def test_an_unknown_path_is_told_what_to_use() -> None:
    async with FakeServer() as server, client_of(server) as client:
        answer = await client.post("/v1/embeddings", json={})
        wrong = await client.get("/v1/completions")
    assert answer.status_code == 404
    assert "no vectors" in answer.json()["error"]["message"]
    assert wrong.json()["error"]["message"].endswith("use POST")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/v1/chat/completion", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "use /v1/chat/completions; check the base URL: it may contain /v1 twice"),
        ("/openai/v1/models", "use /v1/models; check the base URL: it may contain /openai"),
        ("/v1/tokenize", "use /tokenize"),
        ("/chat/completions/v1/chat/completions", "GET /docs lists them"),
        ("/" + "v1/" * 5000, "GET /docs lists them"),
        ("", "GET /docs lists them"),
    ],
)
def test_advice(path: str, told: str) -> None:
    assert advice(path).startswith(told)


def test_every_route_is_described() -> None:
    async def serves() -> bool:
        return True

    unused: Any = nullcontext
    made: Any = make_app(Gateway(unused, unused, unused), serves, most_requests=1, with_page=True, with_stats=True)
    routes = {(re.sub(":path", "", route.path), method) for route in _routes(made) for method in route.methods or ()}
    files = {(path, method) for path, method in routes if path.startswith("/page/")}
    served = {(path, method) for path, method in routes - files if method != "HEAD"} - {("/ping", "POST")}
    assert served == {(route.path, route.method.upper()) for route in DESCRIBED}
    assert set(ROUTES) <= {path for path, _ in served}


def _routes(made: Any) -> list[Route]:
    return [route for route in made._app.routes if isinstance(route, Route)]


def test_the_descriptions_load_nothing() -> None:
    assert "://" not in page()
    assert "src=" not in page()
    assert json.loads(json.dumps(openapi()))["paths"]["/v1/completions"]["post"]["requestBody"]
