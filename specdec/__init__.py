"""specdec: speculative decoding as three gRPC services.

    from specdec import AsyncClient, Client

imports the client; the package itself loads nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.client import AsyncClient as AsyncClient
    from specdec.client import Client as Client

__version__ = "0.1.0"

_CLIENTS = ("AsyncClient", "Client")


def __getattr__(name: str) -> Any:
    """Import a client on first access (PEP 562)."""
    if name in _CLIENTS:
        from specdec import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_CLIENTS]
