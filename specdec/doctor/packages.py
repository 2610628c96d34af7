"""Packages: installed versions against the tested ranges, and missing packages by extra.

Ranges and extras come from this distribution's metadata, so they equal those in pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from specdec.engine.preflight import vllm_version
from specdec.extras import DISTRIBUTION, install_command

EXTRAS = (
    "cli", "orchestrator", "draft", "draft-gpu", "verifier", "cuda", "export", "evaluate", "otel", "openai",
)  # fmt: skip
"""Extras for users. The others are parts of these, combine several of them, or are for development."""


class Package(NamedTuple):
    """A package required by some part of specdec."""

    name: str
    installed: str | None
    """Its version; None if it is not installed."""
    wanted: SpecifierSet

    @property
    def fits(self) -> bool:
        """True if its version is in the tested range, or if it is not installed."""
        return self.installed is None or self.wanted.contains(self.installed, prereleases=True)

    @property
    def range(self) -> str:
        """Its version range with redundant bounds removed, lower bound first."""
        lower = [specifier for specifier in self.wanted if specifier.operator in (">", ">=")]
        upper = [specifier for specifier in self.wanted if specifier.operator in ("<", "<=")]
        others = sorted(str(specifier) for specifier in self.wanted if specifier not in (*lower, *upper))
        greatest = max(
            lower, key=lambda specifier: (Version(specifier.version), specifier.operator == ">"), default=None
        )
        least = min(upper, key=lambda specifier: (Version(specifier.version), specifier.operator == "<="), default=None)
        return ",".join((*(str(specifier) for specifier in (greatest, least) if specifier is not None), *others))


class Extra(NamedTuple):
    """An extra of this distribution."""

    name: str
    missing: list[str]
    """Its packages that are not installed."""

    @property
    def command(self) -> str:
        return install_command(self.name)


def requirements() -> list[Requirement]:
    """Return this distribution's requirements, with and without extras; empty if no distribution is installed."""
    try:
        return [Requirement(line) for line in requires(DISTRIBUTION) or ()]
    except PackageNotFoundError:
        return []


def packages(required: list[Requirement]) -> list[Package]:
    """Return the packages that specdec or any of EXTRAS requires, once each with all ranges intersected, and vLLM if it
    is installed, since no extra installs it."""
    ranges: dict[str, SpecifierSet] = {}
    for requirement in (
        *_without_extras(required),
        *(requirement for extra in EXTRAS for requirement in _of(extra, required)),
    ):
        ranges[requirement.name] = ranges.get(requirement.name, SpecifierSet()) & requirement.specifier
    found = [Package(name, installed_version(name), wanted) for name, wanted in ranges.items()]
    installed = vllm_version.installed_vllm()
    return found if installed is None else [*found, Package("vllm", installed, vllm_version.TESTED)]


def extras(required: list[Requirement]) -> list[Extra]:
    """Return the missing packages of each of EXTRAS."""
    return [
        Extra(
            name,
            sorted(
                {requirement.name for requirement in _of(name, required) if installed_version(requirement.name) is None}
            ),
        )
        for name in EXTRAS
    ]


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _without_extras(required: list[Requirement]) -> Iterator[Requirement]:
    return (
        requirement
        for requirement in required
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    )


def _of(extra: str, required: list[Requirement]) -> Iterator[Requirement]:
    """Yield the requirements of an extra on this platform, including nested extras."""
    for requirement in required:
        if (
            requirement.marker is None
            or requirement.marker.evaluate({"extra": ""})
            or not requirement.marker.evaluate({"extra": extra})
        ):
            continue
        if requirement.name == DISTRIBUTION:
            for inner in sorted(requirement.extras):
                yield from _of(inner, required)
        else:
            yield requirement
