"""Where a text's tokens come from, and what that tells of the target's steps."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.v1.model_pb2 import (
    TOKEN_SOURCE_DRAFT,
    TOKEN_SOURCE_LOOKAHEAD,
    TOKEN_SOURCE_NGRAM,
    TOKEN_SOURCE_OWN_DRAFT,
    TokenSource,
)

ACCEPTED = (TOKEN_SOURCE_DRAFT, TOKEN_SOURCE_NGRAM, TOKEN_SOURCE_LOOKAHEAD, TOKEN_SOURCE_OWN_DRAFT)
"""Of candidates. Any other token is the target's own, and the last of its step."""


def source_name(source: TokenSource.ValueType) -> str:
    return TokenSource.Name(source).removeprefix("TOKEN_SOURCE_").lower()


def accepted_by_step(sources: Iterable[TokenSource.ValueType], steps: int) -> list[int]:
    """How many candidates each of `steps` steps has brought, by the sources of their tokens, as far as these are kept:
    a text may end with a candidate, and steps behind its end have brought none of it."""
    found, count = [], 0
    for source in sources:
        if source in ACCEPTED:
            count += 1
        else:
            found.append(count)
            count = 0
    if count:
        found.append(count)
    return found + [0] * (steps - len(found))
