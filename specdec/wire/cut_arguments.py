"""The arguments of a call that was cut short: the beginning of a JSON object, closed where it ends."""

from __future__ import annotations

import json
import re
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"')
_SCALAR = re.compile(
    r"(?:true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(?=[ \t\n\r]*(?:[,\]}]|\Z))"
)
_CUT = r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z"
"""The end of the text, perhaps behind the beginning of an escape."""

_HALF = r"u[dD][89abAB][0-9a-fA-F]{2}"
"""The first half of a character beyond 16 bits. At the end of the text it lacks its second one."""

_OPEN_STRING = re.compile(
    rf'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|(?!{_HALF}{_CUT})u[0-9a-fA-F]{{4}}))*+(?=(?:\\{_HALF})?{_CUT})'
)


def completed(text: str) -> dict[str, Any] | None:
    """Return the object that a text begins, or is; None if it begins none. An unfinished string ends where it was cut;
    an unfinished name, word or number at the end is left out, and so is a last value that is not JSON."""
    found = _closed(text)
    if found is None:
        return None
    try:
        value = json.loads(found)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _closed(text: str) -> str | None:
    """Return the JSON of the object that a text begins; None if it begins none."""
    if not text.lstrip(" \t\n\r").startswith("{"):
        return None
    ends: list[str] = []  # of the open containers
    whole = 0  # length of the longest beginning that these ends make JSON
    at, wanted = 0, "value"  # or name, colon, end: that of the value
    while True:
        at = _behind_space(text, at)
        mark = text[at : at + 1]
        if wanted == "end" and not ends:
            return None if mark else text
        if not mark:
            break
        match wanted, mark:
            case (("end" | "name or end" | "value or end"), _) if mark == ends[-1]:
                ends.pop()
                at, wanted = at + 1, "end"
            case "end", ",":
                at, wanted = at + 1, "name" if ends[-1] == "}" else "value"
                continue
            case (("name" | "name or end"), '"'):
                if (name := _STRING.match(text, at)) is None:
                    if _OPEN_STRING.match(text, at) is None:
                        return None
                    break
                at, wanted = name.end(), "colon"
                continue
            case "colon", ":":
                at, wanted = at + 1, "value"
                continue
            case (("value" | "value or end"), ("{" | "[")):
                ends.append("}" if mark == "{" else "]")
                at, wanted = at + 1, "name or end" if mark == "{" else "value or end"
            case (("value" | "value or end"), _) if mark not in ",:]}":
                if (value := _STRING.match(text, at) or _SCALAR.match(text, at)) is None:
                    if (cut := _OPEN_STRING.match(text, at)) is not None:
                        return f'{text[: cut.end()]}"{"".join(reversed(ends))}'
                    if text.rstrip().endswith("}"):  # not cut short
                        return None
                    break
                at, wanted = value.end(), "end"
            case _:
                return None
        whole = at
    return text[:whole] + "".join(reversed(ends))


def _behind_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None  # it matches the empty text
    return space.end()
