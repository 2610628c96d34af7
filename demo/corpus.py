"""The training text: the source of Python's standard library, part of any installation.

One file in forty, chosen by the hash of its path, is held out from training: every figure about the pair (loss,
acceptance, speed) is measured on these files.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

HELD_OUT_ONE_IN = 40
# Tables and data in the form of Python files teach a language model nothing about code.
SKIPPED_FOLDERS = {"site-packages", "encodings", "pydoc_data", "__pycache__", "bad_coding", "data"}
MAX_FILE_BYTES = 200_000


def _paths() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.isdisjoint(relative.parts) and path.stat().st_size <= MAX_FILE_BYTES:
            yield relative


def _held_out(relative: Path) -> bool:
    digest = hashlib.sha256(relative.as_posix().encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


@cache
def files(*, held_out: bool) -> list[str]:
    """Return the texts of one side of the split, in path order, without files that are not UTF-8 or have fewer than 200
    characters."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for relative in _paths():
        if _held_out(relative) == held_out:
            try:
                texts.append((root / relative).read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                continue
    return [text for text in texts if len(text) >= 200]
