"""The tenants whose texts a model has learned from: `learned_from.json`, next to its weights.

A tenant is recorded as a salted hash, so that the file reveals no names, and files with different salts cannot be
compared. A guessed name can still be checked against the file. A draft trained from this model keeps the salt, because
it inherits what this model has learned.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from specdec.engine.model_file import ModelDirectoryError, read_fields, shown

LEARNED_FROM = "learned_from.json"
"""File next to a model's weights; a model without it has learned from no tenant."""

SALT_BYTES = 16
_SALT = re.compile(r"[0-9a-f]{32}")
DIGEST = re.compile(r"[0-9a-f]{64}")
"""A SHA-256 digest in hex."""


def tenant_digest(tenant: str) -> str:
    """Return the digest, in hex, that identifies a tenant outside the service that knows its name."""
    return hashlib.sha256(tenant.encode()).hexdigest()


def new_salt() -> str:
    """Return a new salt, in hex."""
    return secrets.token_hex(SALT_BYTES)


@dataclass(frozen=True)
class LearnedFrom:
    """The tenants whose texts a model has learned from."""

    salt: str = field(default_factory=new_salt)  # hex
    oldest: Mapping[str, float] = field(default_factory=dict)
    """Salted hash of a tenant's digest -> time when its oldest text was kept, Unix seconds."""

    @classmethod
    def of(cls, directory: Path) -> LearnedFrom | None:
        """Return the contents of the file in a model's directory; None if there is no file. ModelDirectoryError if it
        cannot be read: a model that learned from unknown tenants must not be used."""
        fields = read_fields(directory / LEARNED_FROM)
        if fields is None:
            return None
        salt = fields.text("salt")
        if not _SALT.fullmatch(salt):
            raise fields.refusal("salt", f"{2 * SALT_BYTES} hexadecimal digits")
        tenants = fields.fields("tenants")
        for name in tenants.content:
            if not DIGEST.fullmatch(name):
                raise ModelDirectoryError(
                    f"{tenants.file}: tenants has {shown(name)}, must have SHA-256 digests in hex"
                )
        return cls(salt, {name: tenants.number(name) for name in tenants.content})

    def with_texts(self, kept: Mapping[str, float]) -> LearnedFrom:
        """Return the record after learning from more texts. `kept` maps a tenant's digest to the time when its oldest
        text was kept, in Unix seconds."""
        oldest = dict(self.oldest)
        for digest, at in kept.items():
            name = self._salted(digest)
            oldest[name] = min(at, oldest.get(name, at))
        return LearnedFrom(self.salt, oldest)

    def has(self, digest: str, until: float) -> bool:
        """Return whether the model has learned from a text of this tenant kept at or before `until`, in Unix
        seconds."""
        at = self.oldest.get(self._salted(digest))
        return at is not None and at <= until

    @property
    def content(self) -> dict[str, object]:
        """The content of the file, as JSON."""
        return {"salt": self.salt, "tenants": dict(sorted(self.oldest.items()))}

    def _salted(self, digest: str) -> str:
        return hashlib.sha256(f"{self.salt}{digest}".encode()).hexdigest()
