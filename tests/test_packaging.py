"""What a wheel holds: every package of the services and of specdec, and one top-level name."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import specdec
from specdec import roles

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SERVICES = ("draft_service", "orchestrator", "verifier_service")


def packages(folder: str) -> set[str]:
    return {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / folder).rglob("__init__.py")}


def test_every_package_is_in_the_wheel() -> None:
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == packages("specdec") | {f"specdec.roles.{name}" for each in SERVICES for name in packages(each)}


def test_a_wheel_has_one_top_level_package() -> None:
    assert {name.partition(".")[0] for name in PROJECT["tool"]["setuptools"]["packages"]} == {"specdec"}


def test_the_clients_are_imported_from_the_package() -> None:
    from specdec.client import AsyncClient, Client

    assert (specdec.Client, specdec.AsyncClient) == (Client, AsyncClient)
    assert {"Client", "AsyncClient"} <= set(dir(specdec))
    with pytest.raises(AttributeError, match="has no attribute 'Clients'"):
        specdec.Clients  # noqa: B018


def test_a_service_is_found_from_any_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import orchestrator; print(orchestrator.__file__)"]
    found = subprocess.run(
        command, cwd=tmp_path, env=roles.environment(), capture_output=True, text=True, check=True, timeout=60
    )
    assert Path(found.stdout.strip()) == roles.FOLDER / "orchestrator" / "__init__.py"


def test_what_was_on_the_path_of_a_service_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert roles.environment()["PYTHONPATH"] == os.pathsep.join((str(roles.FOLDER), "/somewhere"))


def test_hints_name_this_distribution_and_extras_that_exist() -> None:
    """Whoever follows a hint installs this project, not another author's."""
    extras = PROJECT["project"]["optional-dependencies"]
    hints = [
        (file, name, extra)
        for folder in ("specdec", *SERVICES, "docs", "demo")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in (".py", ".md") and "decisions" not in file.parts
        for name, extra in re.findall(r"\b(specdec[a-z-]*)\[([a-z, -]+)\]", file.read_text())
    ]
    assert len(hints) > 3
    for file, name, names in hints:
        assert name == PROJECT["project"]["name"], file
        assert {each.strip() for each in names.split(",")} <= extras.keys(), file


def test_the_version_is_that_of_the_distribution() -> None:
    assert specdec.__version__ == PROJECT["project"]["version"]
    assert importlib.import_module("specdec") is specdec
