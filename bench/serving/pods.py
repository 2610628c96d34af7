"""A deployment of several pods of each role, which benchmarks end and restart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from specdec.local import DEMO
from specdec.local.child import Child, stop
from specdec.roles import PACKAGES

START_SECONDS = 120.0
MODELS = {"verifier": DEMO / "target", "draft": DEMO / "draft", "orchestrator": DEMO / "target"}


@dataclass
class Pod:
    """A service that is ended and restarted at the same address."""

    child: Child
    address: str = ""
    ready: bool = False

    def until_ready(self) -> None:
        """Wait until it serves; LocalError if it does not."""
        if not self.ready:
            self.address, self.ready = self.child.until_ready(START_SECONDS), True

    def restart(self) -> None:
        """Start it again after its end, without waiting until it serves."""
        self.child, self.ready = self.child.again(self.address), False


@contextmanager
def running(
    verifiers: int = 2, drafts: int = 2, orchestrators: int = 2, kv_tokens: int = 32768
) -> Iterator[dict[str, list[Pod]]]:
    """Run pods of the demo pair, in float32; yield them by role. LocalError if one does not start."""
    pods: dict[str, list[Pod]] = {}

    def start(role: str, count: int, *options: str) -> None:
        usual = ("--port", "0", "--log-level", "warning", "--stop-with-stdin", "--model", str(MODELS[role]))
        pods[role] = [Pod(Child.start(role, "-m", PACKAGES[role], *usual, *options)) for _ in range(count)]
        for pod in pods[role]:
            pod.until_ready()

    try:
        computing = ("--threads", "1", "--kv-tokens", str(kv_tokens))
        start("verifier", verifiers, *computing, "--dtype", "float32")
        start("draft", drafts, *computing)
        peers = [word for role, each in pods.items() for pod in each for word in (f"--{role}", pod.address)]
        start("orchestrator", orchestrators, *peers)
        yield pods
    finally:
        stop([pod.child for each in pods.values() for pod in each])
