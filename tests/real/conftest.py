"""The real pair, served by three services, for the tests of this folder (`make real`, then `make verify-real`)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from demo.real import DRAFT, REAL, TARGET
from specdec.client import Client
from specdec.local import Stack
from specdec.local.upkeep import Upkeep

MODELS = {model.name: REAL / model.name for model in (TARGET, DRAFT)}


@dataclass(frozen=True)
class Services:
    """A running stack whose dead services are restarted."""

    stack: Stack
    said: list[str]

    def kill(self, role: str) -> None:
        self.stack.children[role].process.kill()


@pytest.fixture(scope="session")
def services() -> Iterator[Services]:
    said: list[str] = []
    target, draft = MODELS[TARGET.name], MODELS[DRAFT.name]
    with Stack.start(target, str(draft), say=said.append) as stack:
        upkeep, stop = Upkeep(stack, said.append), threading.Event()

        def look() -> None:
            while not stop.wait(0.2):
                upkeep.look()

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        yield Services(stack, said)
        stop.set()
        thread.join()


@pytest.fixture(scope="session")
def client(services: Services) -> Iterator[Client]:
    with Client(services.stack.address, timeout=1200, max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def code() -> list[str]:
    """HumanEval's prompts."""
    lines = (REAL / "prompts" / "humaneval.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]


@pytest.fixture(scope="session")
def questions() -> list[list[str]]:
    """MT-Bench's questions: the turns of each."""
    lines = (REAL / "prompts" / "mtbench.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"] for line in lines]
