"""Print the requirements of this project with some of its extras, nested ones included.

    python3 requirements.py pyproject.toml verifier,otel

An image installs these before it copies our code, so that its largest layer depends on pyproject.toml and
constraints.txt alone, and stays cached when code changes. Needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def requirements(project: Mapping[str, Any], extras: Iterable[str]) -> list[str]:
    """Return the requirements of the table [project] and of these extras, sorted; KeyError for an unknown extra."""
    own = re.compile(rf"{re.escape(project['name'])}\[([\w,-]+)\]")
    found = set(project["dependencies"])
    seen: set[str] = set()
    ahead = list(extras)
    while ahead:
        extra = ahead.pop()
        if extra in seen:
            continue
        seen.add(extra)
        for line in project["optional-dependencies"][extra]:
            inner = own.fullmatch(line)
            if inner is None:
                found.add(line)
            else:
                ahead += inner[1].split(",")
    return sorted(found)


def main(file: str, extras: str) -> None:
    project = tomllib.loads(Path(file).read_text(encoding="utf-8"))["project"]
    try:
        print(*requirements(project, filter(None, extras.split(","))), sep="\n")
    except KeyError as error:
        sys.exit(f"{file} has no extra {error}; it has {', '.join(project['optional-dependencies'])}")


if __name__ == "__main__":
    main(*sys.argv[1:])
