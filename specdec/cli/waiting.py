"""Reports on stderr what a command waits for, after a second without a response from the servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.cli.access import OPEN, Access
from specdec.cli.failure import say
from specdec.client.errors import mismatch
from specdec.v2 import verifier_pb2
from specdec.wire.address import parse_addresses

SILENT_SECONDS = 1.0
"""Seconds of silence before the first report."""

LOOK_SECONDS = 0.5
"""Seconds between two health checks of the servers, and the timeout of each."""

VERIFIER = verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"].full_name
"""The name under which an orchestrator answers health checks for its verifiers."""


class WaitReporter:
    """A context manager around a call that waits for tokens from orchestrators. `heard` is called for every response.
    In each silence the reason for waiting is reported once, and again when it changes."""

    def __init__(self, address: str, say: Callable[[str], None] = say, *, access: Access = OPEN) -> None:
        """`address` is one address or several, comma-separated; `say` receives a line for a person, in another
        thread."""
        self._access = access
        self._targets = [parsed.target for parsed in parse_addresses(address)]
        self._say = say
        self._heard_at = time.monotonic()
        self._said = ""
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look_again, name="waiting", daemon=True)

    def heard(self) -> None:
        """Note that a server has sent something."""
        self._heard_at = time.monotonic()
        self._said = ""

    def __enter__(self) -> Self:
        self._heard_at = time.monotonic()
        self._looking.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._looking.join()

    def _look_again(self) -> None:
        pause = SILENT_SECONDS
        while not self._over.wait(pause):
            silent_since = self._heard_at
            pause = SILENT_SECONDS - (time.monotonic() - silent_since)
            if pause > 0:
                continue
            pause = LOOK_SECONDS
            line = waited_for(self._targets, self._access)
            if line and line != self._said and silent_since == self._heard_at and not self._over.is_set():
                self._said = line
                self._say(line)


def waited_for(targets: list[str], access: Access = OPEN) -> str:
    """Return a line for a person: why a request to these servers waits, according to their health checks. Empty if no
    server can ever answer the request."""
    channels = [access.channel(target) for target in targets]
    asked = health_pb2.HealthCheckRequest(service=VERIFIER)
    calls = [health_pb2_grpc.HealthStub(channel).Check.future(asked, timeout=LOOK_SECONDS) for channel in channels]
    absent, slow, without, unfit = [], [], [], 0
    for target, call in zip(targets, calls, strict=True):
        code = call.code()  # waits for the answer
        if code is grpc.StatusCode.UNAVAILABLE:
            absent.append(target)
            unfit += mismatch(call.details() or "") is not None
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED:
            slow.append(target)
        elif code is grpc.StatusCode.OK and call.result().status != health_pb2.HealthCheckResponse.SERVING:
            without.append(target)
    for channel in channels:
        channel.close()
    if unfit == len(targets):
        return ""  # the command itself soon fails with the reason
    if len(absent) == len(targets):
        return f"waiting for an orchestrator: nothing answers at {', '.join(absent)} yet; retrying for some seconds"
    if len(absent) + len(slow) == len(targets):
        return f"waiting for an orchestrator: {', '.join(slow)} answers slowly, if at all"
    if len(absent) + len(slow) + len(without) == len(targets):
        return f"waiting for a verifier: the orchestrator at {', '.join(without)} reaches none"
    serving = [target for target in targets if target not in (*absent, *slow, *without)]
    causes = "a long prompt, many requests, or a pod that is being replaced"
    return f"waiting for tokens from {', '.join(serving)} ({causes})"
