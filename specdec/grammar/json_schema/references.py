"""References between the schemas of one document: by JSON pointer, `$anchor` and `$id`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from specdec.grammar.grammar import GrammarError

MAX_REFERENCE_CHARACTERS = 1000
"""Maximum characters of a reference, since every occurrence is resolved again."""


MAX_REFERENCES = 50
"""Maximum length of a chain of references."""


class Document:
    """A document whose schemas refer to one another."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._resources: dict[str, Any] | None = None  # schemas by their address
        self._bases: dict[int, str] = {}  # base addresses of references, by the identity of the schema

    def resolved(self, schema: Mapping[str, Any], place: str) -> Any:
        """Return the target of a schema's reference; GrammarError if it is not in this document."""
        reference = schema["$ref"]
        if not isinstance(reference, str) or len(reference) > MAX_REFERENCE_CHARACTERS:
            raise GrammarError(f"{place}: must be a text of at most {MAX_REFERENCE_CHARACTERS} characters")
        resources = self._addresses()
        try:
            address, fragment = urldefrag(urljoin(self._bases.get(id(schema), ""), reference))
        except ValueError:  # not a URI
            address, fragment = reference, ""
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = resources.get(f"{address}#{fragment}")
        else:
            found = resources.get(address)
            for token in fragment.split("/")[1:]:
                token = token.replace("~1", "/").replace("~0", "~")
                if isinstance(found, list):
                    number = int(token) if token.isascii() and token.isdecimal() and len(token) < 7 else len(found)
                    found = found[number] if number < len(found) else None
                else:
                    found = found.get(token) if isinstance(found, dict) else None
        if not isinstance(found, dict | bool):
            raise GrammarError(f"{place}: {reference[:80]} is not in the schema: put the referenced schema under $defs")
        return found

    def chain(self, schema: Any, place: str) -> Iterator[Any]:
        """Yield a schema, then at most `MAX_REFERENCES` schemas along its chain of references."""
        yield schema
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, dict) or "$ref" not in schema:
                return
            schema = self.resolved(schema, place)
            yield schema

    def _addresses(self) -> Mapping[str, Any]:
        """Return the schemas with an address: the document, and every schema with an `$id` or `$anchor`."""
        if self._resources is None:
            self._resources = {"": self._root}
            ahead: list[tuple[Any, str]] = [(self._root, "")]
            while ahead:
                found, base = ahead.pop()
                if isinstance(found, dict):
                    if isinstance(own := found.get("$id"), str):
                        with suppress(ValueError):
                            base = urldefrag(urljoin(base, own))[0]
                        self._resources[base] = found
                    if isinstance(anchor := found.get("$anchor"), str):
                        self._resources[f"{base}#{anchor}"] = found
                    if base:
                        self._bases[id(found)] = base
                parts = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
                ahead += [(part, base) for part in parts]
        return self._resources
