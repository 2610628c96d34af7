"""The methods by name, as options of a request. A name may have a value, as in `lookahead:7,4,7` or `rejection:1-10`.

A fixed method speculates in every step, whether or not it pays, as in the papers; `auto`, `draft`, `local` and
`lookahead` without a size adapt. Values have the same limits as in requests (`specdec/serving/validation.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from specdec.client import GenerateOptions
from specdec.decoding.lookahead import Lookahead
from specdec.serving.validation import MAX_BRANCHES, MAX_DEPTH, expansion_violations, lookahead_violations
from specdec.wire.speculation import DRAFTERS

PLAIN = "plain"
"""The baseline method."""

AUTO = "auto"

DRAFTED = 5
"""Default length of a drafted chain: `num_assistant_tokens` of the first transformers with assisted generation."""

JACOBI_WINDOW = 8
"""Default window of `jacobi`, in positions."""

MAX_DIGITS = 6
"""Maximum digits of a number in a name: more than any limit has."""

Part = Literal["a draft", "a local draft", "heads"]
"""A component that a method needs besides the target."""

Temperatures = Literal["any", "zero", "above zero"]


@dataclass(frozen=True)
class Method:
    """A method of the comparison, named as it was requested."""

    name: str
    options: Mapping[str, object]
    needs: Part | None = None
    temperatures: Temperatures = "any"  # at which it is measured
    adaptive: bool = False  # it adapts to its load
    exact: bool = True  # its tokens are plain decoding's
    samples: bool = True  # the request has a temperature
    drafted: int | None = None  # length of its chain
    window: Lookahead | None = None  # of a fixed size

    @property
    def window_rows(self) -> int | None:
        """Rows of a step that belong to its lookahead window; None if their number may vary."""
        varies = self.options.get("speculation") in (AUTO, "local", "lookahead")
        return self.window.rows if self.window is not None else None if varies else 0

    def fits(self, temperature: float) -> bool:
        """Return whether the method is measured at this temperature."""
        return self.temperatures == "any" or (temperature > 0) == (self.temperatures == "above zero")

    def asked(self, temperature: float) -> GenerateOptions:
        sampling = {"temperature": temperature} if self.samples else {}
        return cast("GenerateOptions", {**self.options, **sampling})


class MethodError(ValueError):
    """An invalid method name; the message gives the reason, and lists all methods if the name is unknown."""


def _chain(length: int) -> dict[str, object]:
    return {"speculation": "always", "max_candidates": length, "max_depth": length, "max_branches": 1}


def _plain(name: str, alpha: float) -> Method:
    return Method(name, {"speculation": "off"})


def _adaptive(name: str, alpha: float) -> Method:
    return Method(name, {"speculation": name}, "a draft" if name == "draft" else None, adaptive=True)


def _drafter(name: str, alpha: float) -> Method:
    """Return the method that uses one drafter alone, in every step."""
    needs: dict[str, Part] = {"remote": "a draft", "local_model": "a local draft", "heads": "heads"}
    return Method(name, {"drafters": [name], "forced": True}, needs.get(name))


def _contrastive(name: str, alpha: float) -> Method:
    return Method(name, {"rule": "contrastive", "alpha": alpha}, "a draft", exact=False, samples=False)


def _assisted(name: str, length: int) -> Method:
    return Method(name, _chain(length), "a draft", "zero", drafted=length)


def _coupled(name: str, length: int) -> Method:
    return Method(name, _chain(length), "a draft", "above zero", drafted=length)


def _rejection(name: str, length: int) -> Method:
    options = {**_chain(length), "rule": "rejection"}
    return Method(name, options, "a draft", "above zero", exact=False, drafted=length)


def _branches(name: str, branches: int) -> Method:
    return Method(name, {"speculation": "always", "max_branches": branches}, "a draft")


def _expansion(name: str, widths: Sequence[int]) -> Method:
    if wrong := expansion_violations("WIDTHS", widths):
        raise MethodError(" ".join(wrong[0]))
    return Method(name, {"speculation": "always", "expansion": list(widths)}, "a draft")


def _lookahead(name: str, numbers: Sequence[int]) -> Method:
    if not numbers:
        return Method(name, {"speculation": "lookahead"}, adaptive=True)
    if len(numbers) != 3:
        raise MethodError("W,N,G are three numbers")
    return _window(name, Lookahead(*numbers), {"speculation": "lookahead", "lookahead": tuple(numbers)})


def _jacobi(name: str, numbers: Sequence[int]) -> Method:
    if len(numbers) > 1:
        raise MethodError("W is one number")
    window = numbers[0] if numbers else JACOBI_WINDOW
    return _window(name, Lookahead(window, 2, 1), {"speculation": "jacobi", "jacobi": window})


def _window(name: str, size: Lookahead, options: Mapping[str, object]) -> Method:
    if wrong := lookahead_violations("size", size):
        raise MethodError(" ".join(wrong[0]))
    return Method(name, options, window=size)


_NAMED: Mapping[str, Callable[[str, float], Method]] = {
    PLAIN: _plain,
    **dict.fromkeys((AUTO, "draft", "local"), _adaptive),
    **{name: _drafter for name in DRAFTERS if name != "lookahead"},
    "contrastive": _contrastive,
}
"""Methods without a value."""

_COUNTED: Mapping[str, tuple[Callable[[str, int], Method], int | None, int]] = {
    "assisted": (_assisted, DRAFTED, MAX_DEPTH),
    "coupled": (_coupled, DRAFTED, MAX_DEPTH),
    "rejection": (_rejection, DRAFTED, MAX_DEPTH),
    "branches": (_branches, None, MAX_BRANCHES),
}
"""Methods with a number or a range: their constructor, default number and maximum."""

_LISTED: Mapping[str, tuple[Callable[[str, Sequence[int]], Method], bool]] = {
    "expansion": (_expansion, True),
    "lookahead": (_lookahead, False),
    "jacobi": (_jacobi, False),
}
"""Methods with a list of numbers: their constructor, and whether the list is required."""

SPELT = (
    *_NAMED,
    *(f"{name}:N" if usual is None else f"{name}[:N]" for name, (_, usual, _) in _COUNTED.items()),
    "expansion:WIDTHS",
    "lookahead[:W,N,G]",
    "jacobi[:W]",
)
"""All methods, with the syntax of their values."""

USUAL = (
    *(PLAIN, AUTO, "remote", "ngram", "lookahead:7,4,7", "jacobi", "assisted", "coupled", "rejection"),
    *("branches:1", "branches:2", "branches:4", "branches:8", "contrastive"),
)
"""Names of the methods measured by default, if the deployment has the parts they need."""


def methods_named(names: Iterable[str], alpha: float) -> list[Method]:
    """Return the methods of these names, plain decoding first and each once; MethodError names a wrong one.

    `alpha` is the parameter of contrastive decoding.
    """
    found = {PLAIN: _plain(PLAIN, alpha)}
    for name in names:
        try:
            found |= {method.name: method for method in _methods(name, alpha)}
        except MethodError as error:
            raise MethodError(f"{name}: {error}") from None
    return list(found.values())


def _methods(name: str, alpha: float) -> Iterator[Method]:
    kind, separator, value = name.partition(":")
    if kind in _NAMED:
        if separator:
            raise MethodError(f"{kind} has no value")
        yield _NAMED[kind](kind, alpha)
    elif kind in _COUNTED:
        made, usual, most = _COUNTED[kind]
        if not separator and usual is not None:
            yield made(kind, usual)
            return
        first, last = _range(value)
        for number in range(first, last + 1):
            if not 1 <= number <= most:
                raise MethodError(f"N is {number}, must be 1 to {most}")
            yield made(f"{kind}:{number}", number)
    elif kind in _LISTED:
        listed, required = _LISTED[kind]
        if separator or required:
            yield listed(name, [_whole(number) for number in value.split(",")])
        else:
            yield listed(name, [])
    else:
        raise MethodError(f"is none of {', '.join(SPELT)}")


def _range(value: str) -> tuple[int, int]:
    """Return the ends of a range such as "1-10"; a single number is both ends."""
    first, separator, last = value.partition("-")
    begin = _whole(first)
    end = _whole(last) if separator else begin
    if end < begin:
        raise MethodError(f"the range {value} is empty")
    return begin, end


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise MethodError(f"{text!r} is not a whole number of at most {MAX_DIGITS} digits")
    return int(text)
