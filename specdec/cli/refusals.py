"""Refused requests, reported by command option."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.client import InvalidRequest


def by_option(error: InvalidRequest, options: Mapping[str, Any]) -> InvalidRequest:
    """Return a refusal that names the command's `options` instead of the contract's fields."""
    message = str(error)
    for field, problem in error.violations:
        message = message.replace(f"{field}: {problem}", f"{_option_of(field, options)}: {problem}", 1)
    return InvalidRequest(message, code=error.code, reason=error.reason, violations=error.violations)


def named_by_option(problem: str, options: Mapping[str, Any]) -> str:
    """Return an error of `build_request`, NAME = VALUE: PROBLEM, in the form of a server's refusals."""
    name, sign, rest = problem.partition(" = ")
    if not sign or name not in options:
        return problem
    return f"{_option_of(name, options)}: is {rest.replace(': must be ', ', must be ', 1)}"


def _option_of(field: str, options: Mapping[str, Any]) -> str:
    """Return the option that sets a field, such as --max-depth for speculation.max_depth; the field if none does."""
    for part in reversed(field.split(".")):
        name, bracket, index = part.partition("[")
        if name == "lookahead" and options["jacobi"] is not None:
            name = "jacobi"
        if name in options:
            return f"--{name.replace('_', '-')}{bracket}{index}"
    return field
