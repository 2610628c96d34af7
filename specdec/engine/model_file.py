"""Reads one file of a model directory into checked values.

Every error is one line with the file, the field, its value and the limit. This module contains no names of particular
files or fields.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

MAX_BYTES = 1 << 28
"""Maximum bytes of a text file: eight times the largest tokenizer.json of known models."""

MAX_LEVELS = 64
"""Maximum nesting of lists and objects. No configuration needs more, and more would break recursive code: json, copy,
transformers."""

MAX_NUMBER = 3.4e38
"""Largest number accepted: messages carry numbers as 32-bit floats."""

SAMPLED_BYTES = 1 << 20
"""Bytes of a weight file in a model's fingerprint, in 64 evenly spaced pieces: enough to distinguish two training runs,
and fast even for 140 GB."""

SHOWN_CHARACTERS = 60
REASON_CHARACTERS = 300


class ModelDirectoryError(Exception):
    """Raised, with a one-line message, if a model directory is missing, incomplete, or cannot be served."""


def shown(value: object) -> str:
    """Format a value as JSON for a message, truncated if long."""
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def in_one_line(error: BaseException) -> str:
    """Return the message of another library's error in one line, truncated if long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= REASON_CHARACTERS else f"{text[:REASON_CHARACTERS]}..."


def with_class(error: BaseException) -> str:
    """Return the class and message of another library's error in one line: the message alone may say little."""
    return f"{type(error).__name__}: {in_one_line(error)}"


def unreadable(path: Path, error: OSError) -> ModelDirectoryError:
    """Return the error for an unreadable file or directory, with the reason and the target of a link."""
    link = f" (a link to {shown(os.readlink(path))})" if os.path.islink(path) else ""
    return ModelDirectoryError(f"{path}{link}: cannot be read: {error.strerror or error}")


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """Open a regular file; ModelDirectoryError if it is missing, or opening or reading it fails."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # opening a named pipe would block
            raise ModelDirectoryError(f"{file}: is not a regular file")
        with file.open("rb") as stream:
            yield stream
    except OSError as error:
        raise unreadable(file, error) from error


def add_sample(digest: hashlib._Hash, file: Path) -> None:
    """Add a weight file's name, size and SAMPLED_BYTES of its contents to a digest."""
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        digest.update(os.fsencode(file.name) + f" {size}".encode())
        pieces = 64
        for i in range(pieces):
            stream.seek(i * max(0, size - SAMPLED_BYTES // pieces) // (pieces - 1))
            digest.update(stream.read(SAMPLED_BYTES // pieces))


def read_text(file: Path) -> str | None:
    """Return the contents of a UTF-8 file; None if no file has this name. A dangling link is an error."""
    try:
        file.lstat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable(file, error) from error
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_BYTES:
            raise ModelDirectoryError(f"{file}: has {size} bytes, must have at most {MAX_BYTES}")
        try:
            with io.TextIOWrapper(stream, encoding="utf-8") as text:
                return text.read()
        except UnicodeDecodeError as error:
            raise ModelDirectoryError(f"{file}: is not UTF-8: {in_one_line(error)}") from error


def read_fields(file: Path) -> Fields | None:
    """Return the JSON object in a file; None if no file has this name."""
    text = read_text(file)
    if text is None:
        return None
    too_deep = ModelDirectoryError(f"{file}: is nested too deeply, must have at most {MAX_LEVELS} levels")
    try:
        content = json.loads(text)
    except RecursionError as error:
        raise too_deep from error
    except ValueError as error:
        raise ModelDirectoryError(f"{file}: not JSON: {in_one_line(error)}") from error
    if _is_deeper(content, MAX_LEVELS):
        raise too_deep
    if not isinstance(content, dict):
        raise ModelDirectoryError(f"{file}: not a JSON object but {shown(content)}")
    return Fields(file, content)


def _is_deeper(content: object, levels: int) -> bool:
    """Return whether lists and objects are nested more than `levels` deep, without recursion."""
    level: list[Any] = [content] if isinstance(content, (dict, list)) else []
    for _ in range(levels):
        insides = (container.values() if isinstance(container, dict) else container for container in level)
        level = [value for inside in insides for value in inside if isinstance(value, (dict, list))]
    return bool(level)


def is_integer(value: object, least: int, most: int) -> TypeGuard[int]:
    """Return whether a JSON value is an integer in this range; true and 1.0 do not count."""
    return type(value) is int and least <= value <= most


@dataclass(frozen=True)
class Fields:
    """A JSON object with checked access to its fields: reading a field raises ModelDirectoryError unless it has the
    requested type and range, or is missing and has a default."""

    file: Path
    content: dict[str, Any]
    place: str = ""
    """The object's place in the file, as a prefix of its fields' names, such as `text_config.`"""

    def has(self, key: str) -> bool:
        """Return whether the field exists; null counts as missing."""
        return self.content.get(key) is not None

    def refusal(self, key: str, limit: str) -> ModelDirectoryError:
        """Return the error that names the field, its value and the requirement."""
        found = f"is {shown(self.content[key])}" if key in self.content else "is missing"
        return ModelDirectoryError(f"{self.file}: {self.place}{key} {found}, must be {limit}")

    def integer(self, key: str, least: int, most: int, *, default: int | None = None) -> int:
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if not is_integer(value, least, most):
            raise self.refusal(key, f"an integer from {least} to {most}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """Read a finite number."""
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
            raise self.refusal(key, "a finite number")
        return float(value)

    def flag(self, key: str, *, default: bool | None = None) -> bool:
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.refusal(key, "true or false")
        return value

    def integers(self, key: str, least: int, most: int, *, count: int) -> list[int]:
        """Read a list of at most `count` integers; an integer counts as a list of one."""
        value = self.content.get(key)
        if not isinstance(value, list):
            return [self.integer(key, least, most)]
        if len(value) > count:
            raise ModelDirectoryError(
                f"{self.file}: {self.place}{key} has {len(value)} entries, must have at most {count}"
            )
        entries = Fields(self.file, {f"{key}[{index}]": entry for index, entry in enumerate(value)}, self.place)
        return [entries.integer(name, least, most) for name in entries.content]

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self.content.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str) or any("\ud800" <= character <= "\udfff" for character in value):
            raise self.refusal(key, "a string of Unicode characters")  # half a surrogate pair is not a valid character
        return value

    def fields(self, key: str) -> Fields:
        value = self.content.get(key)
        if not isinstance(value, dict):
            raise self.refusal(key, "an object")
        return Fields(self.file, value, f"{self.place}{key}.")

    def objects(self, key: str) -> list[Fields]:
        """Read a list of objects."""
        value = self.content.get(key)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.refusal(key, "a list of objects")
        return [Fields(self.file, item, f"{self.place}{key}[{index}].") for index, item in enumerate(value)]
