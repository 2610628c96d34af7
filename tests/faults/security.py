"""A cluster's certificates and keys: every call is by mutual TLS, and clients need a tenant's API key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specdec import api_keys
from specdec.client.tls_files import channel_credentials
from tests.certificates import Authority

HOST = "127.0.0.1"


class Security:
    """An authority, what it has issued, and a file of tenants. `renew` is for while all is running."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority(folder)
        self._tenants = folder / "tenants.yaml"
        self._issued: list[str] = []  # names of pods
        self._key = ""
        self.renew_keys()

    def options(self, name: str) -> tuple[str, ...]:
        """Return the options of a pod, such as "verifier-1"."""
        self._issued.append(name)
        certificate, key = self._issue(name)
        authorities = str(self._authority.file)
        files = ("--tls-cert", str(certificate), "--tls-key", str(key), "--tls-client-ca", authorities)
        if not name.startswith("orchestrator"):
            return (*files, "--tls-client-name", "orchestrator.test")
        peers = ("--peer-tls-cert", str(certificate), "--peer-tls-key", str(key), "--peer-tls-ca", authorities)
        return (*files, *peers, "--tenants", str(self._tenants))

    @property
    def client_options(self) -> dict[str, Any]:
        """What a client needs now."""
        return {"credentials": channel_credentials(self._authority.contents("client")), "api_key": self._key}

    def renew(self) -> None:
        """Replace the certificates of all pods, and have new clients use another key, beside that of those before."""
        for name in self._issued:
            self._issue(name)
        self.renew_keys()

    def renew_keys(self) -> None:
        self._key, before = api_keys.new(), self._key
        keys = [api_keys.hash_of(each) for each in (self._key, before) if each]
        new = self._tenants.with_suffix(".new")
        new.write_text(f"tenants:\n  tests: {{api_keys: {keys}}}\n")
        os.replace(new, self._tenants)

    def _issue(self, name: str) -> tuple[Path, Path]:
        role = name.partition("-")[0]
        return self._authority.issue(name, HOST, f"{role}.test")
