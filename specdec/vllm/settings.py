"""Settings of the remote drafter, read from the environment because vLLM's configuration has no place for them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specdec.wire.address import Address, parse_addresses
from specdec.wire.tls_files import TlsFiles

DRAFTS = "SPECDEC_DRAFTS"
WAIT = "SPECDEC_DRAFT_WAIT_MS"
TLS = ("SPECDEC_DRAFT_TLS_CERT", "SPECDEC_DRAFT_TLS_KEY", "SPECDEC_DRAFT_TLS_CA")

MAX_WAIT_MS = 1000.0


@dataclass(frozen=True)
class VllmDraftSettings:
    """Addresses of drafts, and how long a step of vLLM may wait for their candidates."""

    drafts: tuple[Address, ...]
    wait: float = 0.005  # seconds
    tls: TlsFiles | None = None  # None: no encryption

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> VllmDraftSettings:
        """Read the settings. ValueError if a variable is missing or invalid, TlsError for invalid TLS files; both name
        the variable."""
        given = environment.get(DRAFTS, "")
        if not given:
            raise ValueError(f"{DRAFTS} is not set: set it to the addresses of the draft services, comma-separated")
        try:
            drafts = tuple(parse_addresses(given))
        except ValueError as error:
            raise ValueError(f"{DRAFTS}: {error}") from None
        wait = environment.get(WAIT, "5")
        try:
            milliseconds = float(wait)
        except ValueError:
            milliseconds = math.nan
        if not 0 <= milliseconds <= MAX_WAIT_MS:
            raise ValueError(f"{WAIT} is {wait!r}, must be from 0 to {MAX_WAIT_MS:g} milliseconds")
        cert, key, authorities = (Path(environment[name]) if environment.get(name) else None for name in TLS)
        tls = TlsFiles(cert, key, authorities, options=TLS) if cert or key or authorities else None
        if tls is not None:
            tls.read()
        return cls(drafts, milliseconds / 1000, tls)
