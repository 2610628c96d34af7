"""Version ranges and extras equal the package metadata, and missing packages are reported with an install command."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from specdec.doctor.packages import EXTRAS, Package, extras, packages
from specdec.extras import DISTRIBUTION, install_command

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

REQUIRED = [
    Requirement(line)
    for line in (
        "grpcio>=1",
        'typer>=0.1; extra == "cli"',
        f'{DISTRIBUTION}[cli]; extra == "verifier"',
        'torch<2.14,>=2.13; extra == "verifier"',
        'no-such-package<2,>=1; extra == "verifier"',
        'torch>=2.13.5; extra == "export"',
        'nor-this; platform_system == "Nowhere" and extra == "cuda"',
        f'{DISTRIBUTION}[verifier]; extra == "cuda"',
        'never>=1; extra == "dev"',
    )
]


def test_each_package_is_told_once_with_all_its_ranges() -> None:
    found = {each.name: each for each in packages(REQUIRED)}
    assert list(found) == ["grpcio", "typer", "torch", "no-such-package"]
    assert found["torch"].range == ">=2.13.5,<2.14"
    assert found["no-such-package"].installed is None
    assert found["grpcio"].installed is not None


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (">=5.23,>=5.20,<5.24", ">=5.23,<5.24"),
        (">=5.9,>=5.10,<6,<=5.20", ">=5.10,<=5.20"),
        (">=1,>1,<2,<=2", ">1,<2"),
        ("<2,!=1.5", "<2,!=1.5"),
        ("==1.*", "==1.*"),
        ("", ""),
    ],
)
def test_of_several_bounds_those_are_told_that_decide(wanted: str, told: str) -> None:
    assert Package("torch", None, SpecifierSet(wanted)).range == told


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.13.0", True), ("2.13.0+cpu", True), ("2.13.1rc1", True), ("2.14.0", False), ("2.12.9", False), (None, True)],
)
def test_a_version_is_in_the_range_or_not(version: str | None, fits: bool) -> None:
    assert Package("torch", version, SpecifierSet(">=2.13,<2.14")).fits is fits


def test_what_an_extra_lacks_is_named_with_the_command() -> None:
    found = {each.name: each for each in extras(REQUIRED)}
    assert (found["cli"].missing, found["draft"].missing) == ([], [])
    for name in ("verifier", "cuda"):
        assert found[name].missing == ["no-such-package"]
        assert found[name].command == install_command(name)


def test_without_metadata_nothing_is_claimed() -> None:
    assert packages([]) == []


def test_every_extra_of_the_project_is_told_or_made_of_those() -> None:
    assert set(EXTRAS) | {"service", "grammar", "all", "bench", "dev"} == set(PROJECT["optional-dependencies"])


def test_the_range_of_torch_is_the_one_that_is_tested() -> None:
    lines = [*PROJECT["dependencies"], *(f'{line}; extra == "verifier"' for line in verifier_lines())]
    (torch,) = (each for each in packages([Requirement(line) for line in lines]) if each.name == "torch")
    assert torch.wanted.contains(Version("2.13.0"))
    assert not torch.wanted.contains(Version("2.14.0"))


def verifier_lines() -> list[str]:
    return [line for line in PROJECT["optional-dependencies"]["verifier"] if not line.startswith(DISTRIBUTION)]
