"""Periodic DNS resolution, and invalid addresses at start-up."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from orchestrator.__main__ import main
from orchestrator.pods.pods import Pods
from specdec.serving.pods import discovery as discovery_module
from specdec.serving.pods.discovery import Discovery
from specdec.wire.address import Address


@pytest.mark.parametrize("option", ["--verifier", "--draft"])
@pytest.mark.parametrize("text", ["http://verifier:1", "verifier", "dns://8.8.8.8/verifiers:1"])
def test_what_is_no_address_stops_the_start(option: str, text: str) -> None:
    command = typer.Typer()
    command.command()(main)
    done = CliRunner().invoke(command, ["--model", "m", "--verifier", "v:1", option, text])
    assert done.exit_code == 2
    said = " ".join(done.output.replace("│", " ").split())
    assert f"Invalid value for '{option}': '{text}': " in said
    assert "HOST:PORT" in said


class Names:
    """A resolver with fixed records for every name."""

    def __init__(self) -> None:
        self.records: list[tuple[int, str]] = []
        self.asked = 0
        self.error = socket.EAI_NONAME

    async def __call__(self, host: str, port: int, *, type: int) -> list[Any]:
        self.asked += 1
        if not self.records:
            raise socket.gaierror(self.error, "no such name")
        return [(family, type, 6, "", (address, port)) for family, address in self.records]


async def test_a_silent_name_server_delays_no_other_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer counts when it comes."""
    monkeypatch.setattr(discovery_module, "ANSWER_SECONDS", 0.05)
    names, pods, silence = Names(), Pods(), asyncio.Event()
    names.records = [(socket.AF_INET, "10.0.0.1")]

    async def resolve(host: str, port: int, *, type: int) -> list[Any]:
        if host == "silent":
            await silence.wait()
            return [(socket.AF_INET, type, 6, "", ("10.0.0.9", port))]
        return await names(host, port, type=type)

    addresses = [Address.parse("dns:silent:1"), Address.parse("dns:green:1")]
    discovery = Discovery(addresses, pods, resolve=resolve, again_seconds=0.01)
    async with asyncio.timeout(10):
        await discovery.start()
        assert [pod.address for pod in pods] == ["10.0.0.1:1"]
        names.records = [(socket.AF_INET, "10.0.0.2")]
        while [pod.address for pod in pods] != ["10.0.0.2:1"]:
            await asyncio.sleep(0.005)
        silence.set()
        while {pod.address for pod in pods} != {"10.0.0.9:1", "10.0.0.2:1"}:
            await asyncio.sleep(0.005)
    await discovery.close()
    await pods.close()


async def test_a_name_without_records_loses_its_pods_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their addresses may be given to pods of another model. A failing name server says nothing about them."""
    monkeypatch.setattr(discovery_module, "FORGET_SECONDS", 0.1)
    names, pods = Names(), Pods()
    names.records = [(socket.AF_INET, "10.0.0.1")]
    discovery = Discovery([Address.parse("dns:green:1")], pods, resolve=names, again_seconds=0.01)
    async with asyncio.timeout(10):
        await discovery.start()
        names.records, names.error = [], socket.EAI_AGAIN
        asked = names.asked
        while names.asked < asked + 30:
            await asyncio.sleep(0.005)
        assert [pod.address for pod in pods] == ["10.0.0.1:1"]
        names.error = socket.EAI_NONAME
        while list(pods):
            await asyncio.sleep(0.005)
        names.records = [(socket.AF_INET, "10.0.0.2")]
        while [pod.address for pod in pods] != ["10.0.0.2:1"]:
            await asyncio.sleep(0.005)
    await discovery.close()
    await pods.close()


async def test_every_record_of_a_name_is_a_pod() -> None:
    names, pods = Names(), Pods()
    names.records = [(socket.AF_INET, "10.0.0.2"), (socket.AF_INET6, "fd00::1"), (socket.AF_INET, "10.0.0.2")]
    addresses = [Address.parse("dns:///verifiers:50051"), Address.parse("10.9.9.9:1")]
    found_by: dict[str, str] = {}
    discovery = Discovery(addresses, pods, resolve=names, again_seconds=0.01, names=found_by)
    await discovery.start()
    assert found_by == {"10.0.0.2:50051": "verifiers", "[fd00::1]:50051": "verifiers"}
    assert [pod.address for pod in pods] == ["10.0.0.2:50051", "[fd00::1]:50051", "10.9.9.9:1"]
    kept = next(iter(pods))

    async def become(addresses: list[str]) -> None:
        async with asyncio.timeout(10):
            while [pod.address for pod in pods] != addresses:
                await asyncio.sleep(0.005)

    names.records = [(socket.AF_INET, "10.0.0.2"), (socket.AF_INET, "10.0.0.3")]
    await become(["10.0.0.2:50051", "10.9.9.9:1", "10.0.0.3:50051"])
    assert next(iter(pods)) is kept
    names.records = []  # a failing resolver removes no pod
    before = names.asked
    async with asyncio.timeout(10):
        while names.asked < before + 3:
            await asyncio.sleep(0.005)
    assert len(pods) == 3
    await discovery.close()
    await pods.close()


async def test_a_name_that_is_not_known_yet_will_be() -> None:
    names, pods = Names(), Pods()
    discovery = Discovery([Address.parse("dns:drafts:50052")], pods, resolve=names, again_seconds=0.01)
    await discovery.start()
    assert not len(pods)
    names.records = [(socket.AF_INET, "10.0.0.2")]
    async with asyncio.timeout(10):
        while not len(pods):
            await asyncio.sleep(0.005)
    await discovery.close()
    await pods.close()


async def test_while_a_new_name_is_not_known_the_pods_of_before_stay() -> None:
    names, pods = Names(), Pods()
    discovery = Discovery([Address.parse("10.0.0.1:1")], pods, resolve=names, again_seconds=0.01)
    await discovery.start()
    await discovery.look([Address.parse("dns:verifiers:50051")])
    assert [pod.address for pod in pods] == ["10.0.0.1:1"]
    names.records = [(socket.AF_INET, "10.0.0.2")]
    async with asyncio.timeout(10):
        while [pod.address for pod in pods] != ["10.0.0.2:50051"]:
            await asyncio.sleep(0.005)
    await discovery.close()
    await pods.close()


async def test_the_pods_of_before_stay_until_a_name_of_long_ago_is_resolved_again() -> None:
    names, pods = Names(), Pods()
    names.records = [(socket.AF_INET, "10.0.0.2")]
    blue, green = [Address.parse("dns:blue:50051")], [Address.parse("10.0.0.1:1")]
    discovery = Discovery(blue, pods, resolve=names, again_seconds=0.01)
    await discovery.start()
    await discovery.look(green)
    names.records = []
    await discovery.look(blue)
    assert [pod.address for pod in pods] == ["10.0.0.1:1"]
    await discovery.close()
    await pods.close()


async def test_pods_that_their_name_lists_no_more_go_while_another_name_is_unknown() -> None:
    """One pool of two has no pods; the other's are replaced by a rollout."""
    names, pods = Names(), Pods()
    pools = [Address.parse("dns:blue:50051"), Address.parse("dns:green:50051")]

    async def resolve(host: str, port: int, *, type: int) -> Any:
        if host == "green":
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return await names(host, port, type=type)

    names.records = [(socket.AF_INET, "10.0.0.1")]
    discovery = Discovery([pools[0]], pods, resolve=resolve, again_seconds=0.01)
    await discovery.start()
    for addresses, host in ((pools, "10.0.0.2"), (pools[::-1], "10.0.0.3")):
        names.records = [(socket.AF_INET, host)]
        await discovery.look(addresses)
        assert [pod.address for pod in pods] == [f"{host}:50051"]
    names.records = [(socket.AF_INET, "10.0.0.4")]
    async with asyncio.timeout(10):
        while [pod.address for pod in pods] != ["10.0.0.4:50051"]:
            await asyncio.sleep(0.005)
    await discovery.close()
    await pods.close()


def test_a_name_server_that_does_not_answer_delays_only_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither other threads of the event loop, nor its end."""
    answers = threading.Event()

    def silent(*_: Any, **__: Any) -> list[Any]:
        assert answers.wait(60)
        return []

    async def look() -> None:
        monkeypatch.setattr(socket, "getaddrinfo", silent)
        pods = Pods()
        discoveries = [Discovery([Address.parse(f"dns:name-{number}:1")], pods) for number in range(50)]
        starting = [asyncio.create_task(discovery.start()) for discovery in discoveries]
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            assert await asyncio.to_thread(int) == 0
        for task in starting:
            task.cancel()
        await asyncio.wait(starting)
        await pods.close()

    asyncio.run(look())
    assert not answers.is_set()
    answers.set()
