"""torch.distributed's store: values kept by rank 0, accessed by the others over a connection."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

POLL_SECONDS = 0.01
"""Poll interval for an awaited value. Calls never block at rank 0: that would also block the rank's other threads."""


class Values:
    """The values, at rank 0. Thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def do(self, action: str, *given: Any) -> Any:
        """Execute a rank's request."""
        actions: dict[str, Callable[..., Any]] = {
            "set": self._set,
            "get": self._values.get,
            "add": self._add,
            "compare_set": self._compare_set,
            "check": lambda keys: all(key in self._values for key in keys),
            "delete": lambda key: self._values.pop(key, None) is not None,
            "count": lambda: len(self._values),
        }
        with self._lock:
            return actions[action](*given)

    def serve(self, connection: Connection) -> None:
        """Serve another rank's requests until its connection ends."""
        try:
            while True:
                connection.send(self.do(*connection.recv()))
        except (EOFError, OSError):
            return

    def _set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def _compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Replace the value if it equals `expected`, or is absent and nothing is expected; return the value
        afterwards."""
        found = self._values.get(key)
        if (expected if found is None else found) != expected or (found is None and expected):
            return expected if found is None else found
        self._values[key] = desired
        return desired


class RemoteValues:
    """The values of rank 0, accessed from another rank."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def do(self, action: str, *given: Any) -> Any:
        with self._lock:
            self._connection.send((action, *given))
            return self._connection.recv()


class RankStore(Store):
    """torch.distributed's store, over the values of rank 0."""

    def __init__(self, values: Values | RemoteValues, patience: timedelta) -> None:
        super().__init__()
        self._values = values
        self._patience = patience

    def set(self, key: str, value: str | bytes) -> None:
        self._values.do("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        found: bytes = self._values.do("get", key)
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self._values.do("add", key, amount))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        found: bytes = self._values.do("compare_set", key, _bytes(expected_value), _bytes(desired_value))
        return found

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._values.do("check", list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        patience = self._patience if timeout is None else timeout
        deadline = time.monotonic() + patience.total_seconds()
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"no rank has set {', '.join(keys)}")
            time.sleep(POLL_SECONDS)

    def delete_key(self, key: str) -> bool:
        return bool(self._values.do("delete", key))

    def num_keys(self) -> int:
        return int(self._values.do("count"))

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout

    @property
    def timeout(self) -> timedelta:
        return self._patience


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
