"""A caller is authenticated before its body is read, and its requests take no capacity from other callers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from specdec.openai_api import bodies, callers
from tests.client.fake_server import Act, FakeServer
from tests.hostile.keyless_http import KeylessHttp
from tests.openai_api.front import Front, front
from tests.openai_api.test_http_server import ASKED, answered, post, told
from tests.stack import until

KEY, WRONG = b"authorization: Bearer key\r\n", b"authorization: Bearer wrong\r\n"
OTHER = b"authorization: Bearer other\r\n"
CLOSE = b"connection: close\r\n"


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


@asynccontextmanager
async def held(
    address: str, number: int, headers: bytes, *, length: int = 8 << 20, sent: int = 0
) -> AsyncIterator[None]:
    """Keep `number` requests with partial bodies open."""
    host, _, port = address.partition(":")
    writers = []
    try:
        for _ in range(number):
            _, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            writer.write(post(b" " * sent, length=length, headers=headers))
        yield
    finally:
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("key", [b"", WRONG])
@pytest.mark.parametrize("length", [1000, 9 << 20])
async def test_a_key_that_is_not_known_is_refused_before_the_body_comes(key: bytes, length: int) -> None:
    async with FakeServer(keys=["key"]) as orchestrator, front(orchestrator.address) as http:
        answer = await answered(http.address, post(b"", length=length, headers=key))
        assert b"connection: close\r\n" in answer
        assert b"unknown API key" in answer
        assert not orchestrator.calls
    assert status_of(answer) == 401


async def test_headers_that_grpc_cannot_carry_are_dropped() -> None:
    trace = b"traceparent: 00-" + b"a" * 32 + b"-" + b"b" * 16 + b"-01\r\ntracestate: a=" + b"x" * 17_000 + b"\r\n"
    long_key = b"authorization: Bearer " + b"k" * 17_000 + b"\r\n"
    async with FakeServer(keys=["key"]) as orchestrator, front(orchestrator.address) as http:
        assert status_of(await told(http.address, post(ASKED, headers=KEY + trace + CLOSE))) == 200
        assert status_of(await answered(http.address, post(b"", length=10, headers=long_key))) == 401
    (call,) = orchestrator.calls
    assert call.metadata["traceparent"].startswith("00-aaaa")
    assert "tracestate" not in call.metadata


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_caller_that_sends_on_can_read_why_it_is_refused(chunked: bool) -> None:
    """The connection is not reset while an unread body is in transit."""
    body, headers = b" " * (400 << 10), WRONG
    if chunked:
        body, headers = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body), WRONG + b"transfer-encoding: chunked\r\n"
    request = post(body, headers=headers)
    if chunked:
        request = request.replace(b"content-length: %d\r\n" % len(body), b"")
    async with FakeServer(keys=["key"]) as orchestrator, front(orchestrator.address) as http:
        answers = await asyncio.gather(*(told(http.address, request) for _ in range(5)))
    assert {status_of(answer) for answer in answers} == {401}


async def test_a_length_that_is_too_long_is_refused_before_the_body_comes() -> None:
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        answer = await answered(http.address, post(b"", length=(8 << 20) + 1))
    assert status_of(answer) == 413
    assert b"connection: close\r\n" in answer
    assert b"must have at most 8388608" in answer


async def test_bodies_of_nobody_leave_tenants_all_of_their_room() -> None:
    """Again and again, unauthenticated callers send eight bodies of 8 MiB less a byte, the whole capacity."""
    async with (
        FakeServer(keys=["key"]) as orchestrator,
        front(orchestrator.address) as http,
        KeylessHttp(http.address, held=8, idle=0, seconds=30.0) as attacker,
    ):
        await until(lambda: attacker.requests >= 8)
        for _ in range(20):
            assert status_of(await told(http.address, post(ASKED, headers=KEY + CLOSE))) == 200
    assert set(attacker.statuses) <= {401, "closed"}


async def test_idle_connections_of_nobody_leave_tenants_their_places() -> None:
    """Unauthenticated connections exceed the limit, and reconnect when closed."""
    async with (
        FakeServer(keys=["key"]) as orchestrator,
        front(orchestrator.address, most_connections=32) as http,
        KeylessHttp(http.address, held=2, idle=40, seconds=30.0, source="127.0.0.2") as attacker,
    ):
        await until(lambda: attacker.connections > 40)  # the first connections have outlived their grace period
        for _ in range(20):
            assert status_of(await told(http.address, post(ASKED, headers=KEY + CLOSE))) == 200


async def test_a_tenant_holds_what_it_leaves_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """By declared lengths, a single tenant may hold half of the room, and each of two tenants a third."""
    monkeypatch.setattr(bodies, "MAX_BODIES_BYTES", 3000)
    monkeypatch.setattr(bodies, "RATE_GRACE_SECONDS", 30.0)
    monkeypatch.setattr(bodies, "LINGER_SECONDS", 0.1)
    async with FakeServer(keys=["key", "other"]) as orchestrator, front(orchestrator.address) as http:
        for key in (KEY, OTHER):  # from now on the keys are known, and bodies count immediately
            assert status_of(await told(http.address, post(ASKED, headers=key + CLOSE))) == 200
        answer = await told(http.address, post(b"", length=1501, headers=KEY))
        assert status_of(answer) == 503
        assert b"retry-after: 1\r\n" in answer
        async with held(http.address, 1, KEY, length=1000):
            await until(lambda: http.app.running == 1)
            assert status_of(await told(http.address, post(b"", length=501, headers=KEY))) == 429
            assert status_of(await told(http.address, post(b"", length=1001, headers=OTHER))) == 503
            async with held(http.address, 1, OTHER, length=1000):
                await until(lambda: http.app.running == 2)
                assert status_of(await told(http.address, post(ASKED, headers=OTHER + CLOSE))) == 429
                assert status_of(await told(http.address, post(ASKED, headers=KEY + CLOSE))) == 429
        await until(lambda: http.app.running == 0)
        assert status_of(await told(http.address, post(ASKED, headers=KEY + CLOSE))) == 200


@asynccontextmanager
async def two_in_progress() -> AsyncIterator[tuple[FakeServer, Front]]:
    """Serve with four places; two are taken by requests of KEY until the context exits."""
    hold = Act(tokens=0, then="hold")
    async with (
        FakeServer(hold, hold, keys=["key", "other"]) as orchestrator,
        front(orchestrator.address, most_connections=4) as http,
    ):
        asking = [asyncio.create_task(told(http.address, post(ASKED, headers=KEY + CLOSE))) for _ in range(2)]
        await until(lambda: len(orchestrator.calls) == 2)
        yield orchestrator, http
        for request in asking:
            request.cancel()


async def test_a_tenant_has_half_of_the_places_at_most() -> None:
    """Requests in progress count in any state. Other tenants still find a place."""
    async with two_in_progress() as (_, http):
        answer = await told(http.address, post(ASKED, headers=KEY + CLOSE))
        assert status_of(answer) == 429
        assert b"2 of yours are in progress" in answer
        assert status_of(await told(http.address, post(ASKED, headers=OTHER + CLOSE))) == 200


async def test_too_many_bodies_of_a_caller_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_RECEIVING", 2)
    monkeypatch.setattr(bodies, "RATE_GRACE_SECONDS", 30.0)
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        assert status_of(await told(http.address, post(ASKED, headers=CLOSE))) == 200
        async with held(http.address, 2, b"", length=10):
            await until(lambda: http.app.running == 2)
            answer = await told(http.address, post(ASKED, headers=CLOSE))
    assert status_of(answer) == 429
    assert b"2 of yours are being received" in answer


async def test_a_body_that_comes_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up long before the time limit for bodies."""
    monkeypatch.setattr(bodies, "RATE_GRACE_SECONDS", 0.2)
    async with FakeServer() as orchestrator, front(orchestrator.address, body_seconds=1000.0) as http:
        answer = await answered(http.address, post(ASKED, length=1000))
    assert status_of(answer) == 408
    assert b"less than 8 KiB/s" in answer


async def test_a_key_is_asked_about_once() -> None:
    """Whether the key is valid or not, and for any number of concurrent requests."""
    async with FakeServer(keys=["key"]) as orchestrator, front(orchestrator.address) as http:
        for _ in range(2):
            requests = [post(ASKED, headers=key + CLOSE) for key in [KEY, WRONG] * 5]
            answers = await asyncio.gather(*(told(http.address, request) for request in requests))
        assert Counter(map(status_of, answers)) == {200: 5, 401: 5}
        assert len(orchestrator.listings) == 1
        assert orchestrator.refusals == 2  # without a key, and with a wrong one


async def test_many_unknown_keys_cost_few_calls() -> None:
    """Meanwhile, tenants with a known key proceed."""
    async with FakeServer(keys=["key"]) as orchestrator, front(orchestrator.address) as http:
        assert status_of(await told(http.address, post(ASKED, headers=KEY + CLOSE))) == 200
        keys = [b"authorization: Bearer %d\r\n" % number for number in range(100)]
        answers = await asyncio.gather(*(told(http.address, post(ASKED, headers=key + CLOSE)) for key in keys))
        found = Counter(map(status_of, answers))
        assert found.keys() == {401, 429}
        assert found[401] + 1 == orchestrator.refusals
        assert found[401] < 100
        assert status_of(await told(http.address, post(ASKED, headers=KEY + CLOSE))) == 200


async def test_a_key_that_is_withdrawn_is_refused_at_once() -> None:
    async with FakeServer(keys=["key"]) as orchestrator, front(orchestrator.address) as http:
        assert status_of(await told(http.address, post(ASKED, headers=KEY + CLOSE))) == 200
        orchestrator.keys = []
        assert status_of(await told(http.address, post(ASKED, headers=KEY + CLOSE))) == 401


async def test_a_key_that_a_call_refused_is_checked_again() -> None:
    asked = b"GET /v1/responses/resp_0 HTTP/1.1\r\nhost: a\r\n" + KEY + CLOSE + b"\r\n"
    async with FakeServer(keys=["key"]) as orchestrator, front(orchestrator.address) as http:
        assert status_of(await told(http.address, asked)) == 404
        orchestrator.keys = []
        assert status_of(await told(http.address, post(ASKED, headers=KEY + CLOSE))) == 401
        assert status_of(await told(http.address, asked)) == 401


async def test_a_withdrawn_key_reads_no_stored_response(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a stored response calls no orchestrator, so the key is checked again once its verdict has expired."""
    monkeypatch.setattr(callers, "ACCEPTED_SECONDS", 0.0)
    asked = b"GET /v1/responses/resp_0 HTTP/1.1\r\nhost: a\r\n" + KEY + CLOSE + b"\r\n"
    async with FakeServer(keys=["key"]) as orchestrator, front(orchestrator.address) as http:
        assert status_of(await told(http.address, asked)) == 404
        orchestrator.keys = []
        assert status_of(await told(http.address, asked)) == 401


async def test_a_key_is_one_caller_however_it_is_spelled() -> None:
    async with two_in_progress() as (orchestrator, http):
        for spelled in (b"bearer  key", b"BEARER key "):
            answer = await told(http.address, post(ASKED, headers=b"authorization: " + spelled + b"\r\n" + CLOSE))
            assert status_of(answer) == 429
        assert len(orchestrator.listings) == 1


async def test_a_new_key_is_taken_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "REFUSED_SECONDS", 0.1)
    async with FakeServer(keys=["key"]) as orchestrator, front(orchestrator.address) as http:
        assert status_of(await told(http.address, post(ASKED, headers=OTHER + CLOSE))) == 401
        orchestrator.keys = ["other"]
        async with asyncio.timeout(20):
            while status_of(await told(http.address, post(ASKED, headers=OTHER + CLOSE))) != 200:
                await asyncio.sleep(0.02)


async def test_accepted_keys_are_checked_again_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An orchestrator that does not answer the check delays no request."""
    monkeypatch.setattr(callers, "ACCEPTED_SECONDS", 0.0)
    hold = Act(then="hold")
    async with FakeServer(listing=[Act(), hold], keys=["key"]) as orchestrator, front(orchestrator.address) as http:
        for _ in range(3):
            assert status_of(await told(http.address, post(ASKED, headers=KEY + CLOSE))) == 200
        await asyncio.wait_for(orchestrator.held.wait(), 30)
        assert len(orchestrator.listings) == 2


async def test_a_check_that_fails_is_no_refusal() -> None:
    """The next request retries the check."""
    full = Act(then="abort", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
    async with FakeServer(listing=[full]) as orchestrator, front(orchestrator.address) as http:
        assert status_of(await answered(http.address, post(b"", length=1000, headers=KEY))) == 503
        assert status_of(await told(http.address, post(ASKED, headers=KEY + CLOSE))) == 200


async def test_without_an_orchestrator_nothing_is_read() -> None:
    async with front("127.0.0.1:1") as http:
        assert status_of(await answered(http.address, post(b"", length=1000, headers=KEY))) == 503


async def test_refusals_of_one_network_are_slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meanwhile, their connections are the first to be closed."""
    monkeypatch.setattr(callers, "REFUSAL_BURST", 1.0)
    monkeypatch.setattr(callers, "REFUSAL_RATE", 0.001)
    async with FakeServer(keys=["key"]) as orchestrator, front(orchestrator.address, most_connections=2) as http:
        assert status_of(await told(http.address, post(ASKED, headers=CLOSE))) == 401
        slowed = [asyncio.create_task(told(http.address, post(ASKED, headers=CLOSE))) for _ in range(2)]
        await until(lambda: http.app.running == 2)
        assert status_of(await told(http.address, post(ASKED, headers=KEY + CLOSE))) == 200
        ended, waiting = await asyncio.wait(slowed, return_when=asyncio.FIRST_COMPLETED)
        assert b"" in [request.result() for request in ended]  # its connection was closed
        for request in waiting:
            request.cancel()
