"""The file of tenants: their API keys, as hashes, and their limits.

    tenants:
      acme:
        api_keys: ["sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
        max_concurrent_requests: 32
        requests_per_minute: 600
        tokens_per_minute: 100000

Keys are long and random (`specdec api-key` makes them), so that a plain hash cannot be reversed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

from specdec import strict_yaml
from specdec.serving.echo import echo
from specdec.serving.validation import MAX_TENANT_CHARACTERS, MAX_WEIGHT, MIN_WEIGHT
from specdec.wire.file_version import Version, version_of

MAX_LIMIT = 10**12
"""Maximum value of a limit. A tenant without the field has no limit."""

HASH = re.compile(r"sha256:[0-9a-f]{64}")
CLASS = re.compile(r"[a-z0-9_-]{1,32}")


class TenantsFileError(Exception):
    """A file of tenants cannot be used. The message is one line: the file, the entry and the problem."""


@dataclass(frozen=True)
class Tenant:
    """A tenant and its limits; None: no limit. Each process of an orchestrator applies the limits separately."""

    name: str
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # "sha256:" and the hash in hex
    operator: bool = False  # may read statistics and traces, which cover all tenants
    tenant_class: str = "default"  # metrics label, since a label per tenant would be too many
    weight: float = 1.0  # share of the verifiers relative to other tenants, when several compete
    max_concurrent_requests: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # prompt tokens and generated tokens
    learn: bool = False  # drafts may learn from texts whose requests also permit it


LIMITS = ("max_concurrent_requests", "requests_per_minute", "tokens_per_minute")
SPELLED = {
    attribute.name: "class" if attribute.name == "tenant_class" else attribute.name for attribute in fields(Tenant)
}
"""Names in the file by attribute of `Tenant`."""

Tenants = Mapping[str, Tenant]
"""Tenants by the hash of each of their keys, spelled as in the file."""


@dataclass(frozen=True)
class TenantsFile:
    path: Path
    what: ClassVar[str] = "tenants"
    left_out: ClassVar[str] = ""  # a bad entry makes the whole file unusable
    unusable: ClassVar[type[Exception]] = TenantsFileError

    @property
    def all(self) -> tuple[Path]:
        return (self.path,)

    def version(self) -> Version:
        """Return the file's current version; OSError if there is no file."""
        return version_of(self.path)

    def read(self) -> Tenants:
        """Read the file; TenantsFileError if it cannot be used."""
        try:
            content = strict_yaml.load(self.path)
        except strict_yaml.YamlFileError as error:
            raise TenantsFileError(f"--tenants {self.path}: {error}") from None
        entries = content.get("tenants") if isinstance(content, dict) and len(content) == 1 else None
        if not isinstance(entries, dict) or not entries:
            raise TenantsFileError(f"--tenants {self.path}: must be `tenants:` with at least one tenant by name")
        found: dict[str, Tenant] = {}
        for name, entry in entries.items():
            try:
                tenant = _tenant(name, entry)
                for key in tenant.api_keys:
                    if key in found:
                        raise ValueError(f"api_keys: {key[:15]}... already belongs to {found[key].name!r}")
                    found[key] = tenant
            except ValueError as error:
                raise TenantsFileError(f"--tenants {self.path}: tenants.{echo(str(name))}: {error}") from None
        return found


def _tenant(name: Any, entry: Any) -> Tenant:
    """Parse an entry of the file; ValueError names the problem."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_TENANT_CHARACTERS:
        raise ValueError(f"must be a name of 1 to {MAX_TENANT_CHARACTERS} characters")
    if not isinstance(entry, dict):
        raise ValueError("must have `api_keys`, and optionally limits")
    names = {spelled: attribute for attribute, spelled in SPELLED.items() if attribute != "name"}
    for key in entry:
        if key not in names:
            raise ValueError(f"{echo(str(key))} must be one of {', '.join(names)}")
    given = {names[key]: value for key, value in entry.items()}
    keys = given.get("api_keys")
    if not isinstance(keys, list) or not keys:
        raise ValueError("api_keys: must be a list of at least one hash")
    for index, key in enumerate(keys):
        if not isinstance(key, str) or not HASH.fullmatch(key):  # may be a plain key: do not repeat it in the error
            raise ValueError(f"api_keys[{index}]: must be sha256: and 64 hex digits, as `specdec api-key` prints")
        if key in keys[:index]:
            raise ValueError(f"api_keys[{index}]: is given twice")
    given["api_keys"] = tuple(keys)
    for limit in LIMITS:
        value = given.get(limit)
        if value is not None and not (type(value) is int and 1 <= value <= MAX_LIMIT):
            raise ValueError(f"{limit}: is {value!r}, must be an integer from 1 to {MAX_LIMIT}")
    weight = given.get("weight", 1.0)
    if type(weight) not in (int, float) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ValueError(f"weight: is {weight!r}, must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    for flag in ("operator", "learn"):
        if type(given.get(flag, False)) is not bool:
            raise ValueError(f"{flag}: is {given[flag]!r}, must be true or false")
    label = given.get("tenant_class", "default")
    if not isinstance(label, str) or not CLASS.fullmatch(label):
        raise ValueError(f"class: is {label!r}, must be 1 to 32 of a to z, 0 to 9, - and _")
    return Tenant(name, **given)
