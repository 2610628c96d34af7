"""A small deployment: pods of every role, and who is told of whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.faults.pods import Pod


@dataclass(frozen=True)
class Models:
    """Directories of what the pods serve."""

    target: Path
    draft: Path  # often agrees with the target
    revision: Path  # another target with the same tokenizer


class Cluster:
    """Pods named by role and number, such as "verifier-1"."""

    def __init__(self, pods: Sequence[Pod]) -> None:
        self.pods = {pod.name: pod for pod in pods}

    @property
    def address(self) -> str:
        """For clients: of all orchestrators."""
        return ",".join(pod.address for pod in self.of("orchestrator"))

    def of(self, role: str) -> list[Pod]:
        return [pod for name, pod in self.pods.items() if name.startswith(role)]

    @property
    def died(self) -> list[str]:
        """Names of those that ended by themselves, which none should."""
        return [name for name, pod in self.pods.items() if pod.died]

    async def make_whole(self) -> None:
        """Thaw, start again, wait until all are ready."""
        for pod in self.pods.values():
            pod.thaw()
            if not pod.running:
                pod.start()
        await asyncio.gather(*(pod.until_ready() for pod in self.pods.values()))

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{pod.log_tail()}" for name, pod in self.pods.items())


@contextmanager
def cluster(
    models: Models,
    logs: Path,
    *,
    verifiers: int = 2,
    drafts: int = 2,
    orchestrators: int = 2,
    verifier_models: Sequence[Path] = (),
    verifier_options: tuple[str, ...] = (),
    orchestrator_options: tuple[str, ...] = (),
    route: Callable[[str, str], str] = lambda _, address: address,
) -> Iterator[Cluster]:
    """Pods that are not started yet (`make_whole` does), and are gone when this is left.

    `verifier_models` says what the first verifiers serve, if not the target; `route` under which address the
    orchestrators find a pod, given its name and its own address.
    """
    served = [*verifier_models, *[models.target] * (verifiers - len(verifier_models))]
    common = ("--drain-seconds", "5", "--log-level", "info")

    def pod(role: str, number: int, module: str, *options: str) -> Pod:
        name = f"{role}-{number}"
        return Pod(name, module, (*options, *common), logs / f"{name}.log")

    pods = [
        pod("verifier", n, "verifier_service", "--model", str(model), *verifier_options)
        for n, model in enumerate(served)
    ]
    pods += [pod("draft", n, "draft_service", "--model", str(models.draft), "--engine", "torch") for n in range(drafts)]
    peers = []
    for peer in pods:
        peers += [f"--{peer.name.partition('-')[0]}", route(peer.name, peer.address)]
    pods += [
        pod("orchestrator", n, "orchestrator", "--model", str(models.target), *peers, *orchestrator_options)
        for n in range(orchestrators)
    ]
    try:
        yield Cluster(pods)
    finally:
        for each in pods:
            each.kill()
