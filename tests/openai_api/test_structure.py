"""The JSON structure of a body is counted while the body arrives, however it is split into pieces."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from specdec.openai_api import structure as module
from specdec.openai_api.errors import ApiError
from specdec.openai_api.structure import MAX_CONTAINERS, MAX_DEPTH, MAX_NAMES, MAX_VALUES, Structure
from tests.client.fake_server import FakeServer
from tests.openai_api.front import front
from tests.openai_api.test_http_server import ASKED, answered, post, told
from tests.openai_api.ticking import Ticking

TEXTS = ("", '"', "\\", '\\"', '[{"a": 1}]', "é🦀", "\n\\\\", ",,::")


def made(generator: random.Random, depth: int = 0) -> Any:
    kind = generator.randrange(5 if depth < 4 else 3)
    if kind == 3:
        return [made(generator, depth + 1) for _ in range(generator.randrange(4))]
    if kind == 4:
        return {generator.choice(TEXTS) + str(n): made(generator, depth + 1) for n in range(generator.randrange(4))}
    return generator.choice((None, True, -1.5e3, 7, *TEXTS))


def counted(value: Any) -> tuple[int, int, int]:
    """Return the number of names, the number of lists and objects, and the depth of a value."""
    if isinstance(value, list | dict):
        inner = [counted(each) for each in (value.values() if isinstance(value, dict) else value)]
        names, containers = sum(each[0] for each in inner), sum(each[1] for each in inner)
        own = len(value) if isinstance(value, dict) else 0
        return names + own, containers + 1, 1 + max((each[2] for each in inner), default=0)
    return 0, 0, 0


@pytest.mark.parametrize("seed", range(40))
async def test_it_counts_what_the_parser_makes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body exactly at the limits is accepted, and one beyond them is refused."""
    generator = random.Random(seed)
    value = [made(generator) for _ in range(8)]
    body = json.dumps(value, ensure_ascii=generator.random() < 0.5).encode()
    limits = dict(zip(("MAX_NAMES", "MAX_CONTAINERS", "MAX_DEPTH"), counted(value), strict=True))

    async def count() -> None:
        structure, rest = Structure(), body
        while rest:
            size = generator.randrange(1, 8)
            await structure.add(rest[:size])
            rest = rest[size:]

    for name, limit in limits.items():
        monkeypatch.setattr(module, name, limit)
    await count()
    for name, limit in limits.items():
        monkeypatch.setattr(module, name, limit - 1)
        with pytest.raises(ApiError):
            await count()
        monkeypatch.setattr(module, name, limit)


LONG = {
    f"more than {MAX_VALUES} values": b"5," * (4 << 20),
    f"more than {MAX_CONTAINERS} lists and objects": b"[]," * (2 << 20),
    f"more than {MAX_NAMES} names in objects": b"{" + b'"a":1,' * 1_000_000,
    f"nested more than {MAX_DEPTH} deep": b"[" * 200,
}


@pytest.mark.parametrize("problem", LONG)
async def test_a_body_of_many_values_is_refused_before_it_has_come(problem: str) -> None:
    """The error names the limit; the rest of the body need not be sent."""
    begun = b'{"model": "fake", "prompt": [' + LONG[problem][: 4 << 20]
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        answer = await answered(http.address, post(begun, length=8 << 20))
        assert not orchestrator.calls
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert problem.encode() in answer


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "fake", "prompt": [' + b"[]," * 2_700_000 + b"[]]}",
        b'{"model": "fake", "prompt": "", "logit_bias": {' + b",".join(b'"%d":1' % n for n in range(700_000)) + b"}}",
    ],
    ids=["lists", "biases"],
)
async def test_other_requests_are_answered_beside_bodies_of_many_values(body: bytes) -> None:
    """The event loop stalls for only a small part of the time that json.loads takes, which holds the GIL."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    json.loads(body)
    seconds = loop.time() - begun
    async with FakeServer() as orchestrator, front(orchestrator.address) as http, Ticking() as ticking:
        answers = await asyncio.gather(*(told(http.address, post(body)) for _ in range(3)))
        small = await told(http.address, post(ASKED, headers=b"connection: close\r\n"))
    assert small.startswith(b"HTTP/1.1 200 ")
    assert {answer[:13] for answer in answers} == {b"HTTP/1.1 400 "}
    assert ticking.longest < seconds / 4
