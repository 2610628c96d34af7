"""The rewriter that the keyword rules share: the state of one rewriting, and the method that rewrites whole schemas.

Rules and the rewriting of whole schemas call each other, so the rules know only `Rewriter`. Errors name the place of
their schema, a JSON pointer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.references import Document
from specdec.grammar.json_schema.schemas import Schema
from specdec.grammar.json_schema.values import floors, object_of, pointer_part
from specdec.grammar.languages import Languages

Made = TypeVar("Made")

MAX_SCHEMAS = 20_000
"""Maximum schemas visited for one request: some 100 ms."""

MAX_NESTING = 50
"""Maximum nesting of negations, and of references whose targets are expanded in place."""


def refused(place: str, key: str, why: str) -> GrammarError:
    return GrammarError(f"{place}/{pointer_part(key)}: cannot be enforced: {why}")


def place_of_target(schema: Mapping[str, Any]) -> str:
    """Return the place of the target of a schema's reference."""
    reference = str(schema["$ref"])[:80]
    return reference[1:] if reference.startswith("#/") else reference


class Work:
    """The budget of work for the schemas of one request."""

    def __init__(self) -> None:
        self._left = MAX_SCHEMAS
        self.languages = Languages()

    def count(self, place: str, size: int = 0) -> None:
        """Charge for one schema, plus a list or text of this size in it."""
        self._left -= 1 + size // 8
        if self._left < 0:
            raise GrammarError(f"{place or '/'}: expands to more than {MAX_SCHEMAS} schemas")


@dataclass(frozen=True)
class Rewrite:
    """One schema, and the rules' result so far."""

    source: Mapping[str, Any]
    place: str  # a JSON pointer
    keywords: dict[str, Any]  # of the result
    conditions: list[Schema] = field(default_factory=list)  # rewritten schemas that must hold, too


class Rewriter(ABC):
    """The state of rewriting one document."""

    def __init__(self, root: Mapping[str, Any], work: Work, *, checks: bool) -> None:
        """`checks`: parts that no grammar enforces may be left to a check of the finished text."""
        self.document = Document(root)
        self.guidance = object_of(root.get("x-guidance"))  # options of llguidance
        self.floors, size = floors(root)  # of the numbers in the document
        work.count("", size)
        self.languages = work.languages
        self.count = work.count
        self.checks = checks
        self.unenforced: dict[tuple[int, str], str] = {}  # places of keywords left to a check, by (schema id, keyword)
        self.pending: list[tuple[str, Schema, str]] = []  # definitions still to be rewritten: name, schema, place
        self._names: dict[int, str] = {}  # names of the result's definitions, by the identity of their schema
        self._levels = 0

    @abstractmethod
    def schema(self, schema: Schema, place: str) -> Schema:
        """Return an equivalent schema."""

    def reference(self, schema: Mapping[str, Any], place: str) -> str:
        """Return a reference to the rewritten definition of a schema's target."""
        target = self.document.resolved(schema, place)
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"d{len(self._names)}"
            self.pending.append((name, target, place_of_target(schema)))
        return f"#/$defs/{name}"

    def entered(self, made: Callable[[Schema, str], Made], schema: Mapping[str, Any], place: str) -> Made:
        """Return the result of `made` for the target of a schema's reference."""
        with self.level(place):
            return made(self.document.resolved(schema, place), place)

    @contextmanager
    def level(self, place: str) -> Iterator[None]:
        """Limit the nesting of negations, and of references whose targets are expanded in place (`entered`)."""
        self._levels += 1
        if self._levels > MAX_NESTING:
            problem = f"has more than {MAX_NESTING} nested negations and references, or one refers to itself"
            raise GrammarError(f"{place}: cannot be enforced: {problem}")
        yield
        self._levels -= 1
