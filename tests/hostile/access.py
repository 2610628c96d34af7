"""An attacker's credentials: certificate and API key, if the cluster requires them."""

from __future__ import annotations

import random
import ssl
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec.wire.tls_files import channel_credentials
from tests.faults.security import Security
from tests.hostile.conduct import Metadata
from tests.hostile.conversations import ENCRYPTED_ROLES

OPTIONS = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1))

WRONG_KEYS: tuple[str, ...] = ("", "Bearer", "Bearer ", "Bearer x", "Basic dTpw", "bearer " + "k" * 4000, "Bearer a b")


@dataclass(frozen=True)
class Access:
    """Access to a cluster open to anyone."""

    def channel(self, role: str, address: str, generator: random.Random) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=OPTIONS)

    def metadata(self, role: str, generator: random.Random) -> Metadata:
        """Return the caller's credentials as metadata."""
        return ()

    def tls(self, role: str, generator: random.Random) -> ssl.SSLContext | None:
        """Return the TLS context for raw bytes, or None."""
        return None


@dataclass(frozen=True)
class SecuredAccess(Access):
    """Access to a cluster with mutual TLS and API keys.

    Most attackers are legitimate callers: a compromised pod, or a tenant. Others have a certificate for another
    purpose, none, or a wrong key.
    """

    security: Security
    _credentials: dict[str, grpc.ChannelCredentials] = field(default_factory=dict)

    def channel(self, role: str, address: str, generator: random.Random) -> grpc.aio.Channel:
        if role not in ENCRYPTED_ROLES or generator.random() < 0.02:
            return super().channel(role, address, generator)
        who = generator.choices(("orchestrator", "client", "nobody"), (8, 2, 1))[0]
        if who not in self._credentials:
            self._credentials[who] = channel_credentials(self.security.contents(who))
        return grpc.aio.secure_channel(address, self._credentials[who], options=OPTIONS)

    def metadata(self, role: str, generator: random.Random) -> Metadata:
        if role != "orchestrator":
            return ()
        kind = generator.choices(("tenant", "wrong", "none"), (8, 1, 1))[0]
        if kind == "none":
            return ()
        keys = [f"Bearer {key}" for key in self.security.keys.values()] if kind == "tenant" else WRONG_KEYS
        return (("authorization", generator.choice(keys)),)

    def tls(self, role: str, generator: random.Random) -> ssl.SSLContext | None:
        if role not in ENCRYPTED_ROLES or generator.random() < 0.3:
            return None
        context: Any = ssl.create_default_context(cafile=str(self.security.authorities))
        context.set_alpn_protocols(["h2"])
        if generator.random() < 0.8:
            context.load_cert_chain(*map(str, self.security.files("orchestrator")))
        found: ssl.SSLContext = context
        return found
