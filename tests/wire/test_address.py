"""Addresses: accepted forms, their gRPC targets, and errors for all others."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specdec.client import AsyncClient, Client
from specdec.v2.generation_pb2_grpc import add_GenerationServiceServicer_to_server
from specdec.wire.address import FORMS, Address, parse_addresses
from tests.client.fake_server import TEXT, FakeServer

PORTS = st.integers(1, 65535)
LABELS = st.from_regex(r"[A-Za-z]([A-Za-z0-9_-]{0,20}[A-Za-z0-9])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join).filter(lambda name: name not in ("dns", "unix"))
IPV4 = st.ip_addresses(v=4).map(str)
IPV6 = st.ip_addresses(v=6).map(lambda found: f"[{found}]")


@given(NAMES | IPV4 | IPV6, PORTS)
def test_a_host_and_a_port_are_one_server(host: str, port: int) -> None:
    text = f"{host}:{port}"
    assert Address.parse(text) == Address(text, (text,))


@given(NAMES | IPV4 | IPV6, PORTS, st.sampled_from(["dns:", "dns:///"]))
def test_a_name_is_spelled_in_two_ways(host: str, port: int, scheme: str) -> None:
    found = Address.parse(f"{scheme}{host}:{port}")
    assert found == Address(f"dns:///{host}:{port}", name=(host.strip("[]"), port))


@given(st.lists(st.tuples(IPV4, PORTS), min_size=1, max_size=3))
def test_numbers_may_be_several_servers(servers: list[tuple[str, int]]) -> None:
    each = tuple(f"{host}:{port}" for host, port in servers)
    assert Address.parse(f"ipv4:{','.join(each)}") == Address(f"ipv4:{','.join(each)}", each)


def test_a_socket_has_a_path() -> None:
    assert Address.parse("unix:///run/a.sock") == Address.parse("unix:/run/a.sock")
    assert Address.parse("unix:a.sock") == Address("unix:a.sock", ("unix:a.sock",))


@given(
    st.text(max_size=40)
    | st.text(alphabet="dnsipvux46:/[]., 015a-", max_size=30)
    | st.tuples(
        st.sampled_from(["", "dns:", "dns:///", "ipv4:", "ipv6:", "unix:", "unix:///"]),
        NAMES | IPV4 | IPV6,
        st.sampled_from([":", ",", ""]),
        PORTS.map(str) | st.text(max_size=3),
    ).map("".join)
)
@example("dns:a:1")
@example("ipv4:1.2.3.4:5,6.7.8.9:10")
def test_whatever_is_accepted_is_spelled_so_that_it_stays_the_same(text: str) -> None:
    found, said = None, ""
    try:
        found = Address.parse(text)
    except ValueError as error:
        said = str(error)
    if found is None:
        assert said.startswith(f"{text!r}: ")
        assert said.endswith(FORMS)
        return
    assert Address.parse(found.target) == found
    assert bool(found.servers) is (found.name is None)


@given(st.ip_addresses(v=6), PORTS)
def test_ipv6_stands_in_brackets(found: ipaddress.IPv6Address, port: int) -> None:
    with pytest.raises(ValueError, match=r"brackets|port"):
        Address.parse(f"{found}:{port}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the port is missing|the host is empty"),
        ("http://x:1", "the scheme http: is not supported"),
        ("xds:///x", "the scheme xds: is not supported"),
        ("vsock:1:2", "the scheme vsock: is not supported"),
        ("dns://10.0.0.1/x:1", "the name server '10.0.0.1' cannot be chosen"),
        ("x", "the port is missing"),
        ("x:", "the port is missing"),
        ("[::1]", "the port is missing"),
        ("dns:x", "the port is missing"),
        ("x:0", "the port is '0', must be from 1 to 65535"),
        ("x:65536", "the port is '65536'"),
        ("x:http", "the port is 'http'"),
        ("x:\N{ARABIC-INDIC DIGIT FIVE}", "the port is"),
        (":1", "the host is empty"),
        ("dns::1", "the host is empty"),
        ("a b:1", "'a b' is not a host name"),
        ("-a:1", "'-a' is not a host name"),
        ("a..b:1", "'a..b' is not a host name"),
        ("a:b:1", "'a:b' is not a host name"),
        (f"{'a' * 64}:1", "is not a host name"),
        ("300.0.0.1:1", "'300.0.0.1' is not an IPv4 address"),
        ("127.1:1", "'127.1' is not an IPv4 address"),
        ("[1.2.3.4]:1", "'1.2.3.4' is not an IPv6 address"),
        ("[fe80::1%eth0]:1", "is not an IPv6 address"),
        ("[::1]50", r"\[::1\] must be followed by a port"),
        ("ipv4:x:1", "'x' is not an IPv4 address"),
        ("ipv6:1.2.3.4:1", "'1.2.3.4' is not an IPv6 address"),
        ("unix:", "is not the path of a socket"),
        ("unix://host/a", "is not the path of a socket"),
        ("unix:/a%20b", "is not the path of a socket"),
        (f"unix:/{'a' * 107}", "the path has 108 bytes, must have at most 107"),
    ],
)
def test_what_is_no_address_is_said(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Address.parse(text)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("given", ["http://x:1", "a:1,http://x:1", "a:1,", [], ["a:1", " "]])
def test_a_client_refuses_what_is_no_address(kind: type, given: str | list[str]) -> None:
    with pytest.raises(ValueError, match="address = "):
        kind(given)


def test_each_is_there_once() -> None:
    assert [each.target for each in parse_addresses(" a:1, b:2,a:1")] == ["a:1", "b:2"]
    assert [each.target for each in parse_addresses(["ipv4:1.1.1.1:1,1.1.1.2:1"])] == ["ipv4:1.1.1.1:1,1.1.1.2:1"]


@pytest.mark.parametrize(
    "form", ["127.0.0.1:{}", "localhost:{}", "dns:127.0.0.1:{}", "dns:///localhost:{}", "ipv4:127.0.0.1:{}"]
)
async def test_grpc_reaches_a_server_by_every_form(form: str) -> None:
    async with FakeServer() as server, AsyncClient(form.format(server.port), timeout=10) as client:
        assert (await client.complete("hi")).text == TEXT


async def test_grpc_reaches_a_server_at_a_socket(tmp_path: Path) -> None:
    server, path = grpc.aio.server(), f"unix:{tmp_path}/s"
    add_GenerationServiceServicer_to_server(FakeServer(), server)
    server.add_insecure_port(path)
    await server.start()
    try:
        async with AsyncClient(path, timeout=10) as client:
            assert (await client.complete("hi")).text == TEXT
    finally:
        await server.stop(None)
