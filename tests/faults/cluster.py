"""A small deployment: pods of every role, and the addresses known to each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import grpc

from specdec.wire.tls_files import channel_credentials
from tests.faults.births import Spawned
from tests.faults.pods import Pod, free_address
from tests.faults.security import Security
from tests.vllm.pod import PYTHON

DRAIN_SECONDS = 10.0
ONE_THREAD = ("--threads", "1")  # many pods share the cores
OF_VLLM = ("--engine", "vllm", "--dtype", "float32", "--kv-tokens", "32768")
FAILOVER_SECONDS = 120.0
"""Seconds for which requests wait for a vLLM verifier, which takes 15 s or more to start."""


@dataclass(frozen=True)
class Models:
    """Directories of the models to serve."""

    target: Path
    draft: Path  # often agrees with the target
    revision: Path  # another target with the same tokenizer
    on_vllm: bool = False  # whether vLLM runs the targets


class Cluster:
    """Pods named by role and number, such as "verifier-1". `make_whole` starts them; they end with the context."""

    def __init__(self, models: Models, logs: Path, security: Security | None = None) -> None:
        """Without `security`, calls are not encrypted and anyone is served."""
        self.models = models
        self.security = security
        self.pods: dict[str, Pod] = {}
        self.spares: dict[str, Pod] = {}  # started only on request
        self._logs = logs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pod in (*self.pods.values(), *self.spares.values()):
            pod.kill()

    def deploy(self, verifiers: int, drafts: int, orchestrators: int) -> Self:
        """Create these numbers of pods; each orchestrator knows all verifiers and drafts."""
        of_verifiers = [self.verifier().address for _ in range(verifiers)]
        of_drafts = [self.draft().address for _ in range(drafts)]
        for _ in range(orchestrators):
            self.orchestrator(of_verifiers, of_drafts)
        return self

    def verifier(self, *options: str, model: Path | None = None) -> Pod:
        return self._add("verifier", "verifier_service", *self._served(model or self.models.target), *options)

    def draft(self, *options: str, model: Path | None = None) -> Pod:
        served = str(model or self.models.draft)
        return self._add("draft", "draft_service", "--model", served, "--engine", "torch", *ONE_THREAD, *options)

    def orchestrator(self, verifiers: Sequence[str], drafts: Sequence[str], *options: str) -> Pod:
        peers = [word for address in verifiers for word in ("--verifier", address)]
        peers += [word for address in drafts for word in ("--draft", address)]
        served = ("--model", str(self.models.target), "--trust-drafts")
        return self._add("orchestrator", "orchestrator", *served, *self._waits, *peers, *options)

    def orchestrator_of(self, models: Path, *options: str) -> Pod:
        """Create an orchestrator with a file of models and pods."""
        served = ("--models", str(models), "--trust-drafts")
        return self._add("orchestrator", "orchestrator", *served, *self._waits, *options)

    def stand_in(self, name: str, for_verifier: str, model: Path) -> None:
        """Create a spare verifier with another model, at the address of a verifier that must have ended before the
        spare starts."""
        address = self.pods[for_verifier].address
        self.spares[name] = self._pod(name, "verifier_service", address, *self._served(model))

    def _served(self, target: Path) -> tuple[str, ...]:
        return ("--model", str(target), *ONE_THREAD, *(OF_VLLM if self.models.on_vllm else ()))

    @property
    def _waits(self) -> tuple[str, ...]:
        return ("--failover-seconds", str(FAILOVER_SECONDS)) if self.models.on_vllm else ()

    def _add(self, role: str, module: str, *options: str) -> Pod:
        name = f"{role}-{len(self.of(role))}"
        self.pods[name] = self._pod(name, module, free_address(), *options)
        return self.pods[name]

    def _pod(self, name: str, module: str, address: str, *options: str) -> Pod:
        if self.security is not None:
            options += self.security.options(name)
        options += ("--drain-seconds", str(DRAIN_SECONDS), "--log-level", "info")
        log = self._logs / f"{name}.log"
        if self.models.on_vllm and module == "verifier_service":
            return Pod(name, module, address, options, log, partial(Spawned, PYTHON))
        return Pod(name, module, address, options, log)

    def of(self, role: str) -> list[Pod]:
        return [pod for name, pod in self.pods.items() if name.startswith(role)]

    @property
    def address(self) -> str:
        """The address list of all orchestrators, for clients."""
        return ",".join(pod.address for pod in self.of("orchestrator"))

    def channel(self, pod: Pod) -> grpc.aio.Channel:
        """Return a channel to a pod, with an orchestrator's credentials."""
        if self.security is None:
            return grpc.aio.insecure_channel(pod.address)
        return grpc.aio.secure_channel(pod.address, channel_credentials(self.security.contents("orchestrator")))

    @property
    def died(self) -> list[str]:
        """Return the names of pods that ended unexpectedly."""
        return [name for name, pod in (self.pods | self.spares).items() if pod.died]

    async def make_whole(self) -> None:
        """Thaw, restart, and wait until all pods are ready."""
        for pod in self.pods.values():
            pod.thaw()
            if not pod.running:
                pod.start()
        await asyncio.gather(*(pod.until_ready() for pod in self.pods.values()))
