"""`specdec api-key`: make a key for a tenant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec import api_keys
from specdec.cli.access import api_key_in


def api_key(
    hash_of: Annotated[
        Path | None, typer.Option(help="File with an existing key: print its hash, and make no new key.")
    ] = None,
) -> None:
    """Make an API key: print the key, for the tenant, and its hash, for the orchestrator's --tenants file."""
    if hash_of is not None:
        print(api_keys.hash_of(api_key_in(hash_of, "--hash-of")))
        return
    key = api_keys.new()
    print(f"key:  {key}\nhash: {api_keys.hash_of(key)}")
