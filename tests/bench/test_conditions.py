"""A report's description of the machine, versions and models."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from bench.conditions import PACKAGES, machine, model_name, version, versions
from specdec.local import DEMO
from tests.models import make

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_versions_are_those_of_this_distribution_and_of_what_it_needs() -> None:
    """Names are compared with pyproject.toml: a misspelled one would be absent in every report."""
    needed = [
        *PROJECT["dependencies"],
        *(each for extra in PROJECT["optional-dependencies"].values() for each in extra),
    ]
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in needed}
    assert PROJECT["name"] in PACKAGES
    assert set(PACKAGES) <= names | {PROJECT["name"]}
    found = versions()
    assert found.keys() == {"python", "commit", *PACKAGES}
    assert found[PROJECT["name"]] == PROJECT["version"]


def test_a_package_that_is_not_installed_is_absent() -> None:
    """onnxruntime and onnxruntime-gpu exclude each other, so one of them is always absent."""
    assert version("no-such-package-anywhere") == "absent"


def test_a_machine_has_cores_and_memory() -> None:
    assert machine()["cores"] >= 1
    assert machine()["memory_gib"] > 0


def test_a_role_is_named_with_its_pair_and_size() -> None:
    assert model_name(DEMO / "target") == "demo/target, 12M parameters"
    assert model_name(DEMO / "draft") == "demo/draft, 2.6M parameters"


def test_a_model_of_ones_own_is_named_by_its_folder(tmp_path: Path) -> None:
    assert model_name(make("llama", tmp_path / "mine")) == "mine, 0.1M parameters"


def test_without_weights_there_is_no_size(tmp_path: Path) -> None:
    assert model_name(tmp_path) == tmp_path.name
