"""A cluster's certificates and keys: every call uses mutual TLS, and clients need a tenant's API key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specdec import api_keys
from specdec.wire.tls_files import Contents, channel_credentials
from tests.certificates import Authority

HOST = "127.0.0.1"

TENANTS = {
    "tests": "",
    "limited": ", max_concurrent_requests: 2, requests_per_minute: 600, tokens_per_minute: 20000",
    "operating": ", operator: true, weight: 0.5",
}
"""Tenants with their settings, except keys, as YAML; clients that only generate texts use "tests"."""


class Security:
    """An authority, its certificates, and a file of tenants. `renew` may be called while pods run."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority(folder)
        self._tenants = folder / "tenants.yaml"
        self._issued: list[str] = []  # names of pods
        self.keys: dict[str, str] = {}  # current API key by tenant
        self._generations: list[dict[str, str]] = []  # valid keys, newest first
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
        return {"credentials": channel_credentials(self.contents("client")), "api_key": self.keys["tests"]}

    @property
    def authorities(self) -> Path:
        """The CA file trusted by all."""
        return self._authority.file

    def contents(self, who: str) -> Contents:
        """Return the credentials of a caller: an "orchestrator", accepted by pods; a "client", refused by them; or
        "nobody", without a certificate."""
        if who == "nobody":
            return Contents(None, None, self.authorities.read_bytes())
        certificate, key = self.files(who)
        return Contents(certificate.read_bytes(), key.read_bytes(), self.authorities.read_bytes())

    def files(self, who: str) -> tuple[Path, Path]:
        """Return the caller's certificate and key files."""
        return self._authority.issue(f"calling-{who}", HOST, f"{who}.test")

    def renew(self) -> None:
        """Replace the certificates of all pods and the API key of new clients. Keys of the last two renewals stay
        valid: running clients may still use them."""
        for name in self._issued:
            self._issue(name)
        self.renew_keys()

    def renew_keys(self) -> None:
        self.keys = {tenant: api_keys.new() for tenant in TENANTS}
        self._generations = [self.keys, *self._generations[:2]]
        lines = ["tenants:"]
        for tenant, limits in TENANTS.items():
            keys = [api_keys.hash_of(each[tenant]) for each in self._generations]
            lines.append(f"  {tenant}: {{api_keys: {keys}{limits}}}")
        new = self._tenants.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        os.replace(new, self._tenants)

    def _issue(self, name: str) -> tuple[Path, Path]:
        role = name.partition("-")[0]
        return self._authority.issue(name, HOST, f"{role}.test")
