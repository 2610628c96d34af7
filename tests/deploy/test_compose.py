"""The Compose file runs all services on one machine, with health checks by a program in the images."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from deploy.images import probe
from orchestrator.workers import END_SECONDS
from specdec import ports
from specdec.serving.process.health import NOT_SERVING, SERVING
from specdec.wire.address import Address
from tests.deploy.dockerfiles import (
    COMPOSE,
    PORTS,
    PROBE,
    PROJECT,
    ROLES,
    parameters,
)

# The probe.


@contextmanager
def answering(status: int) -> Iterator[str]:
    """Yield the address of an HTTP server with this response status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_probe_tells_whether_a_service_serves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # the proxy must not be used
    checks = health.HealthServicer()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    checks.set("", SERVING)
    probe.main(address)
    checks.set("", NOT_SERVING)
    with pytest.raises(SystemExit, match=f"{address}: NOT_SERVING"):
        probe.main(address)
    server.stop(None).wait()
    with pytest.raises(SystemExit, match=f"{address}: .*StatusCode.UNAVAILABLE"):
        probe.main(address)
    with answering(200) as served:
        probe.main(f"http://{served}/health")
    with answering(503) as served, pytest.raises(SystemExit, match="503"):
        probe.main(f"http://{served}/health")
    assert capsys.readouterr().out == ""


# Compose.


def seconds(duration: str) -> int:
    return int(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_services_of_compose_can_do_nothing_but_serve(name: str) -> None:
    service = COMPOSE["services"][name]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.keys() & {"privileged", "user", "cap_add", "entrypoint", "pid", "ipc"}
    role = next(role for role, commands in ROLES.items() if service["command"][0] in commands)
    assert re.fullmatch(
        rf"\${{{role.upper()}_IMAGE:-specdec-{role}:{re.escape(PROJECT['version'])}}}", service["image"]
    )
    mounts = [each.rpartition("}")[2] for each in service.get("volumes", ()) if each.startswith("${MODELS:?")]
    assert mounts == ([] if name == "openai" else [":/models" if name == "export" else ":/models:ro"])
    for port in service.get("ports", ()):
        assert port == f"127.0.0.1:{PORTS[name]}:{PORTS[name]}"


@pytest.mark.parametrize("name", PORTS)
def test_services_of_compose_are_told_what_they_know(name: str) -> None:
    service = COMPOSE["services"][name]
    command, *words = service["command"]
    assert command == name
    options = parameters(name)
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert {each.removeprefix("--").replace("-", "_") for each in given} <= options.keys()
    assert all(each.startswith("--") for each in given)
    for variable in service.get("environment", ()):
        assert variable.removeprefix(f"SPECDEC_{name.upper()}_").lower() in options
    for option in ("--verifier", "--draft", "--orchestrator"):
        if option in given:
            found = Address.parse(given[option]).name
            assert found == (option[2:], PORTS[option[2:]])
            assert set(service["networks"]) & set(COMPOSE["services"][option[2:]]["networks"])
    assert seconds(service["stop_grace_period"]) > options["drain_seconds"].default + END_SECONDS


@pytest.mark.parametrize("name", PORTS)
def test_services_of_compose_are_asked_for_their_health(name: str) -> None:
    check = COMPOSE["services"][name]["healthcheck"]
    address = f"http://127.0.0.1:{ports.OPENAI}/health" if name == "openai" else f"127.0.0.1:{PORTS[name]}"
    assert check["test"] == ["CMD", "python", PROBE, address]
    assert seconds(check["timeout"]) > probe.SECONDS


def test_pods_of_compose_are_reached_by_orchestrators_alone() -> None:
    assert COMPOSE["networks"]["pods"] == {"internal": True}
    on = {name: service.get("networks", []) for name, service in COMPOSE["services"].items()}
    assert on["draft"] == on["verifier"] == ["pods"]
    assert on["openai"] == ["applications"]
    assert COMPOSE["services"]["export"]["network_mode"] == "none"
    assert [name for name, each in COMPOSE["services"].items() if "ports" in each] == ["orchestrator", "openai"]
