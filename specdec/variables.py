"""Environment variables whose names begin with SPECDEC_: known and unknown ones.

A service's options are variables too (`settings.py`), with the service's prefix; the service reports unknown ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from specdec.roles import PACKAGES

READ = frozenset(
    {
        "SPECDEC_ADDRESS",
        "SPECDEC_API_KEY",
        "SPECDEC_API_KEY_FILE",
        "SPECDEC_CACHE_DIR",
        "SPECDEC_PHASES_ON_STDOUT",
        "SPECDEC_TLS",
        "SPECDEC_TLS_CA",
        "SPECDEC_TLS_CERT",
        "SPECDEC_TLS_KEY",
        "SPECDEC_TLS_NAME",
        "SPECDEC_TRACEBACK",
        # in a process of vLLM
        "SPECDEC_DRAFTS",
        "SPECDEC_DRAFT_TLS_CA",
        "SPECDEC_DRAFT_TLS_CERT",
        "SPECDEC_DRAFT_TLS_KEY",
        "SPECDEC_DRAFT_WAIT_MS",
    }
)
"""The variables that are read besides the services' options; a test finds missing ones."""

SERVICE_LINK = re.compile(r"(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_\w+)")
"""Matches the end of a variable that Kubernetes sets in every container for each Service, except ..._PORT: that one is
recognised by its value, which begins with SCHEME."""

SCHEME = re.compile(r"(tcp|udp|sctp)://")


def prefix(service: str) -> str:
    """Return the prefix of the variables of a service's options."""
    return f"SPECDEC_{service.upper()}_"


PREFIXES = tuple(map(prefix, PACKAGES))
"""The prefixes of all services."""


def is_service_link(suffix: str, value: str) -> bool:
    """Return True if Kubernetes sets a variable of this kind for a Service; `suffix` is the end of its name."""
    return bool(SERVICE_LINK.fullmatch(suffix) or (suffix.endswith("PORT") and SCHEME.match(value)))


def unread(environment: Mapping[str, str]) -> list[str]:
    """Return the SPECDEC_ variables that have a value but are not read, except those with a service's prefix."""
    return sorted(
        name
        for name, value in environment.items()
        if name.startswith("SPECDEC_")
        and value
        and name not in READ
        and not name.startswith(PREFIXES)
        and not is_service_link(name.removeprefix("SPECDEC_"), value)
    )
