"""How long a call is retried, on a fake clock: a server that answered before may be restarting."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from specdec.client import Cancelled, Overloaded, Unavailable
from specdec.client.errors import InvalidRequest
from specdec.client.retries import Retries, Rotation
from tests.client.fake_server import rich

RETRIES = 5


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Gone(grpc.RpcError):
    """gRPC's error for an unreachable server."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "connection refused"

    def trailing_metadata(self) -> tuple[Any, ...]:
        return ()


class Settled(Gone):
    """The error of a server that serves another model, or refuses for another reason that stays."""

    def __init__(self, reason: str = "MODEL_CHANGED") -> None:
        self._reason = reason

    def trailing_metadata(self) -> tuple[Any, ...]:
        changed = error_details_pb2.ErrorInfo(reason=self._reason, domain="specdec")
        status = rich(code_pb2.UNAVAILABLE, changed).status
        assert status is not None
        return (("grpc-status-details-bin", status.SerializeToString()),)


class Full(Gone):
    """The error of a server at a tenant's limit."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.RESOURCE_EXHAUSTED

    def trailing_metadata(self) -> tuple[Any, ...]:
        limit = error_details_pb2.ErrorInfo(reason="TENANT_LIMIT", domain="specdec")
        status = rich(code_pb2.RESOURCE_EXHAUSTED, limit).status
        assert status is not None
        return (("grpc-status-details-bin", status.SerializeToString()),)


def tries(retries: Retries, clock: Clock) -> tuple[int, float]:
    """Fail until the call gives up; return the number of retries and the seconds taken."""
    count, begin = 0, clock.now
    while True:
        try:
            clock.now += retries.pause(Gone())
        except Unavailable:
            return count, clock.now - begin
        count += 1


def a_call(rotation: Rotation, clock: Clock, most: int = RETRIES) -> Retries:
    return Retries(rotation, most, None, lambda: False, clock)


def test_a_server_that_never_answered_is_given_up_soon() -> None:
    clock = Clock()
    count, seconds = tries(a_call(Rotation(["a"], clock), clock), clock)
    assert count == RETRIES
    assert seconds < 4


@given(addresses=st.integers(1, 3), most=st.integers(1, 20))
def test_a_server_that_has_answered_is_awaited_for_ten_seconds(addresses: int, most: int) -> None:
    clock = Clock()
    rotation = Rotation([f"a{number}" for number in range(addresses)], clock)
    a_call(rotation, clock, most).progressed()
    count, seconds = tries(a_call(rotation, clock, most), clock)
    assert count >= most * addresses
    assert seconds >= 10
    assert seconds < 12.1 or count <= (most + 1) * addresses  # longer only for the least number of tries


def test_the_wait_begins_anew_with_every_token() -> None:
    clock = Clock()
    call = a_call(Rotation(["a"], clock), clock)
    call.progressed()
    for _ in range(5):
        assert tries(call, clock)[1] >= 10
        call.progressed()


def test_a_refusal_is_an_answer() -> None:
    clock = Clock()
    rotation = Rotation(["a"], clock)
    refusal = rich(code_pb2.INVALID_ARGUMENT, error_details_pb2.ErrorInfo(reason="INVALID_REQUEST", domain="specdec"))

    class Refused(Gone):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.INVALID_ARGUMENT

        def trailing_metadata(self) -> tuple[Any, ...]:
            assert refusal.status is not None
            return (("grpc-status-details-bin", refusal.status.SerializeToString()),)

    with pytest.raises(InvalidRequest):
        a_call(rotation, clock).pause(Refused())
    assert tries(a_call(rotation, clock), clock)[1] >= 10


@pytest.mark.parametrize("most", [1, RETRIES])
def test_a_text_waits_for_room_when_its_server_is_gone(most: int) -> None:
    clock = Clock()
    rotation = Rotation(["a", "b"], clock)
    call = a_call(rotation, clock, most)
    call.progressed()
    gone, begin = call.address, clock.now

    def fail() -> None:
        while True:
            clock.now += call.pause(Gone() if call.address == gone else Full(), begun=True)

    with pytest.raises(Overloaded):
        fail()
    assert 90 <= clock.now - begin < 93


def test_who_wants_no_retries_gets_none() -> None:
    clock = Clock()
    rotation = Rotation(["a"], clock)
    a_call(rotation, clock).progressed()
    assert tries(a_call(rotation, clock, most=0), clock) == (0, 0.0)


def test_a_server_that_refuses_permanently_is_left_for_one_that_may_come_back() -> None:
    clock = Clock()
    call = a_call(Rotation(["10.0.0.1:1", "10.0.0.2:1"], clock), clock)
    broken = call.address
    assert call.pause(Gone(), begun=True) == 0.0
    assert call.address != broken
    clock.now += call.pause(Settled(), begun=True)
    assert call.address == broken
    clock.now += call.pause(Gone(), begun=True)
    assert call.address == broken


@pytest.mark.parametrize(("reason", "most"), [("MODEL_UNREADABLE", 3), ("VERIFIER_LOST", 1)])
def test_a_server_that_cannot_read_a_model_has_not_waited(reason: str, most: int) -> None:
    """The other servers of its name are tried at once."""
    clock = Clock()
    call = a_call(Rotation(["orchestrator:50050"], clock), clock)
    for _ in range(most - 1):
        clock.now += call.pause(Settled(reason))
    with pytest.raises(Unavailable):
        call.pause(Settled(reason))


@pytest.mark.parametrize(
    ("address", "most"),
    [
        ("10.0.0.1:50050", 1),
        ("[::1]:50050", 1),
        ("ipv4:10.0.0.1:50050", 1),
        ("unix:/run/a.sock", 1),
        ("localhost:50050", 1),
        ("dns:///10.0.0.1:50050", 1),
        ("ipv4:10.0.0.1:50050,10.0.0.2:50050", 3),
        ("orchestrator:50050", 3),
        ("dns:///orchestrator:50050", 3),
    ],
)
@pytest.mark.parametrize("others", [0, 1])
def test_a_call_ends_when_all_servers_refuse_permanently(address: str, most: int, others: int) -> None:
    """A name may resolve to several servers, tried in turn."""
    clock = Clock()
    call = a_call(Rotation([address, "10.0.0.9:1"][: 1 + others], clock), clock)
    asked: list[str] = []

    def ask_on() -> None:
        while True:
            asked.append(call.address)
            clock.now += call.pause(Settled(), begun=True)

    with pytest.raises(Unavailable):
        ask_on()
    assert sorted(asked) == sorted([address] * most + ["10.0.0.9:1"] * others)


def test_a_call_of_a_client_that_was_closed_asks_no_more() -> None:
    closed = False
    call = Retries(Rotation(["a:1"]), RETRIES, None, lambda: closed)
    call.check_open()
    closed = True
    with pytest.raises(Cancelled):
        call.check_open()
