"""Metrics of running services agree with `GetStats` and with the generated texts."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import Metric

from specdec import Client
from specdec.roles import environment
from tests.faults.cluster import Cluster, Models
from tests.faults.pods import free_port
from tests.services.conftest import Directories
from tests.serving.test_metrics import scraped

pytestmark = pytest.mark.timeout(900)  # several processes start, slowly on a busy machine

SERVICES = ("verifier", "draft", "orchestrator")


@pytest.fixture(scope="module")
def ports() -> dict[str, int]:
    return {each: free_port() for each in SERVICES}


@pytest.fixture(scope="module")
def cluster(
    directories: Directories, ports: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    def options(service: str) -> tuple[str, ...]:
        return ("--metrics-port", str(ports[service]))

    models, few = Models(directories.target, directories.near, directories.target), ("--kv-tokens", "4096")
    with Cluster(models, tmp_path_factory.mktemp("logs")) as made:
        verifier = made.verifier(*options("verifier"), *few)
        draft = made.draft(*options("draft"), *few)
        made.orchestrator([verifier.address], [draft.address], *options("orchestrator"))
        asyncio.run(made.make_whole())
        yield made


async def test_what_was_generated_is_counted(cluster: Cluster, ports: dict[str, int]) -> None:
    with Client(cluster.address) as client:
        done = [client.complete("def main(", max_tokens=40).completions[0]]
        chosen = (await scraped(ports["verifier"]))["specdec_verifier_speculation_mode"].samples
        assert sum(mode.value for mode in chosen) == 1
        done += client.complete("def main(", max_tokens=40, speculation="always").completions
        while not any("remote_draft" in each.sources for each in done):  # on a busy machine the draft may be late
            done += client.complete("def main(", max_tokens=40, seed=len(done), speculation="always").completions
    tokens = sum(len(each.tokens) for each in done)
    told: dict[str, dict[str, Metric]] = {}

    def value(service: str, name: str, suffix: str = "") -> float:
        family = told[service][f"specdec_{service}_{name}"]
        return sum(each.value for each in family.samples if each.name.endswith(suffix))

    async with asyncio.timeout(20):
        while not told or not value("orchestrator", "verifier_reachable"):  # looked at once a second
            told = {service: await scraped(port) for service, port in ports.items()}
    assert value("orchestrator", "requests", "_total") == len(done)
    assert value("orchestrator", "generation_tokens", "_total") == tokens
    assert value("orchestrator", "time_to_first_token_seconds", "_count") == len(done)
    assert len(done) + value("orchestrator", "inter_token_latency_seconds", "_count") <= tokens
    assert value("orchestrator", "e2e_request_latency_seconds", "_count") == len(done)
    assert value("orchestrator", "pods") == 2
    assert value("orchestrator", "goodput_tokens", "_total") == tokens
    assert value("orchestrator", "request_success", "_total") == len(done)
    assert value("orchestrator", "failed_requests", "_total") == 0

    accepted = value("verifier", "spec_decode_num_accepted_tokens", "_total")
    assert 0 < accepted <= value("verifier", "spec_decode_num_draft_tokens", "_total")
    assert value("verifier", "spec_decode_num_accepted_tokens_per_pos", "_total") == accepted
    assert value("verifier", "generation_tokens", "_total") >= tokens
    assert value("verifier", "step_time_seconds", "_count") >= value("verifier", "spec_decode_num_drafts", "_total") > 0
    assert value("verifier", "kv_cache_tokens") > 0
    assert value("verifier", "request_queue_time_seconds", "_count") == len(done)
    assert value("verifier", "speculation_mode") == 0  # the last texts are exempt
    parts = {each.labels["part"]: each.value for each in told["verifier"]["specdec_verifier_step_part_seconds"].samples}
    assert parts["forward"] > 0
    assert parts["forward"] + parts["rest"] == pytest.approx(value("verifier", "step_time_seconds", "_sum"))
    assert value("verifier", "session_sent_bytes", "_total") > tokens
    assert value("verifier", "session_received_bytes", "_total") > tokens
    assert value("draft", "session_sent_bytes", "_total") > value("draft", "sent_candidates", "_total")
    assert value("draft", "sent_candidates", "_total") > 0
    for service in SERVICES:
        assert value(service, "serving") == 1


def test_a_port_that_is_taken_ends_the_start(directories: Directories, ports: dict[str, int], cluster: Cluster) -> None:
    taken = str(ports["verifier"])
    command = [sys.executable, "-m", "orchestrator", "--model", str(Path(directories.target)), "--verifier", "h:1"]
    command += ["--port", "0", "--metrics-port", taken]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 1
    assert f"--metrics-port {taken}: another program listens" in done.stderr.splitlines()[-1]
