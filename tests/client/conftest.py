"""Asyncio and synchronous clients."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.client import AsyncClient
from tests.client.both import ThreadedClient
from tests.client.calls import EVENTUALLY
from tests.client.fake_server import FakeServer


@pytest.fixture(params=[ThreadedClient, AsyncClient], ids=["sync", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Any:
    """Return a factory of clients of either kind, with a default timeout."""

    def make(*servers: FakeServer, address: Any = None, **settings: Any) -> Any:
        address = ",".join(server.address for server in servers) if address is None else address
        return request.param(address, **{"timeout": EVENTUALLY, **settings})

    return make
