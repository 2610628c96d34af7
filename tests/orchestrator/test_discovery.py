"""Places on the command line, and names that are resolved again."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from orchestrator.discovery import Discovery, Place
from orchestrator.pods import Pods


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("127.0.0.1:50051", Place("127.0.0.1", 50051)),
        ("[::1]:50051", Place("[::1]", 50051)),
        ("verifier.example:1", Place("verifier.example", 1)),
        ("dns:verifiers.example:50051", Place("verifiers.example", 50051, every_record=True)),
    ],
)
def test_a_place_is_read(text: str, place: Place) -> None:
    assert Place.parse(text) == place


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:0", "host:65536", "host:x", "dns::5", "dns:host"])
def test_what_is_no_place_is_said(text: str) -> None:
    with pytest.raises(ValueError, match="is neither HOST:PORT"):
        Place.parse(text)


class Names:
    """The records of every name, as a resolver finds them."""

    def __init__(self) -> None:
        self.records: list[tuple[int, str]] = []
        self.asked = 0

    async def __call__(self, host: str, port: int, *, type: int) -> list[Any]:
        self.asked += 1
        if not self.records:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(family, type, 6, "", (address, port)) for family, address in self.records]


async def test_every_record_of_a_name_is_a_pod() -> None:
    names, pods = Names(), Pods()
    names.records = [(socket.AF_INET, "10.0.0.2"), (socket.AF_INET6, "fd00::1"), (socket.AF_INET, "10.0.0.2")]
    places = [Place.parse("dns:verifiers:50051"), Place.parse("10.9.9.9:1")]
    discovery = Discovery(places, pods, resolve=names, again_seconds=0.01)
    await discovery.start()
    assert [pod.address for pod in pods] == ["10.0.0.2:50051", "[fd00::1]:50051", "10.9.9.9:1"]
    kept = next(iter(pods))

    async def become(addresses: list[str]) -> None:
        async with asyncio.timeout(10):
            while [pod.address for pod in pods] != addresses:
                await asyncio.sleep(0.005)

    names.records = [(socket.AF_INET, "10.0.0.2"), (socket.AF_INET, "10.0.0.3")]
    await become(["10.0.0.2:50051", "10.9.9.9:1", "10.0.0.3:50051"])
    assert next(iter(pods)) is kept
    names.records = []  # a resolver that is down takes no pod away
    before = names.asked
    async with asyncio.timeout(10):
        while names.asked < before + 3:
            await asyncio.sleep(0.005)
    assert len(pods) == 3
    await discovery.close()
    await pods.close()


async def test_a_name_that_is_not_known_yet_will_be() -> None:
    names, pods = Names(), Pods()
    discovery = Discovery([Place.parse("dns:drafts:50052")], pods, resolve=names, again_seconds=0.01)
    await discovery.start()
    assert not len(pods)
    names.records = [(socket.AF_INET, "10.0.0.2")]
    async with asyncio.timeout(10):
        while not len(pods):
            await asyncio.sleep(0.005)
    await discovery.close()
    await pods.close()
