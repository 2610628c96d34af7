"""Configuration of all tests."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

ON_GPU = torch.cuda.is_available()
if not ON_GPU:  # run GPU kernels in an interpreter; read when triton is first imported
    os.environ["TRITON_INTERPRET"] = "1"

# Compiled loops, also of services started by tests, are cached in the checkout, not in the user's cache folder.
os.environ.setdefault("SPECDEC_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "cache"))

# The duration of an example depends only on the machine's load.
settings.register_profile(
    "specdec",
    deadline=None,
    max_examples=50,  # always the same ones: a faulty change shows in these, or in a wider search
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,  # reproducible examples; `pytest --hypothesis-profile explore` tries others
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("specdec")


def pytest_collection_finish() -> None:
    """Exempt loaded objects from garbage collection, as services do at start-up. Many tests run services in their own
    process; scanning all tests and their modules would pause the services for half a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def heeding_interrupts() -> Iterator[None]:
    """Let SIGINT reach the processes that tests start. A test run in the background ignores SIGINT, and its children
    would inherit that; with a handler in this process, they get the default action. Resetting SIGINT between fork and
    exec is not safe beside gRPC's threads: occasionally the child aborts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def unused_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set `http_proxy` to a listening socket, which nothing may connect to."""
    for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):  # gRPC prefers them
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        yield
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` without a GPU."""
    if not ON_GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="there is no GPU"))
