"""Contents of a wheel: every package of the services and of specdec, under one top-level name."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import specdec
from specdec import roles
from specdec.engine.fast_paths import TESTED_TORCH

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SERVICES = ("draft_service", "evaluation", "orchestrator", "verifier_service")


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


def hints() -> list[tuple[Path, str, str]]:
    """Return (file, distribution, extras) of every install hint in code, README and docs; the distribution of a
    checkout is `.`."""
    folders = ("specdec", *SERVICES, "docs", "demo", "bench", "examples")
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*"))]
    files += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    command = re.compile(r"(?<!helm )\binstall (?:[^\n`;]* )?['\"]?(specdec[\w-]*|\.)(?:\[([\w, -]+)\])?")
    alone = re.compile(r"(?<![\w/])(specdec[a-z-]*)\[([a-z, -]+)\]")
    return [
        (file, name, names)
        for file in files
        if file.suffix in (".py", ".md") and "decisions" not in file.parts
        for name, names in command.findall(file.read_text()) + alone.findall(file.read_text())
    ]


def test_hints_name_this_distribution_and_extras_that_exist() -> None:
    """A wrong name could install another author's package."""
    found = hints()
    assert {"README.md", "serving-your-models.md", "client-guide.md", "providers.py"} <= {
        each[0].name for each in found
    }
    for file, name, names in found:
        assert name in (PROJECT["project"]["name"], "."), file
        extras = {each.strip() for each in names.split(",")} - {"", "EXTRA"}
        assert extras <= PROJECT["project"]["optional-dependencies"].keys(), file


def test_ranges_of_engines_end_where_tests_end() -> None:
    """The tested version is allowed, and the next minor one is not."""
    tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    lines = [line for each in PROJECT["project"]["optional-dependencies"].values() for line in each]
    for name in ("torch", "transformers", "numba", "triton", "onnxruntime", "onnxruntime-gpu"):
        requirements = [Requirement(line) for line in lines if re.match(rf"{name}\b[^-]", line)]
        version = Version(tested[name])
        later = f"{version.major}.{version.minor + 1}.0"
        assert requirements
        assert all(requirement.specifier.contains(version) for requirement in requirements), name
        assert any(not requirement.specifier.contains(later) for requirement in requirements), name
    assert tested["torch"].startswith(TESTED_TORCH)


def test_the_readme_installs_the_torch_that_the_verifier_wants() -> None:
    """Torch is installed first, from another index: later installs must not replace it."""
    (line,) = re.findall(r"^pip install '(torch\S+)' --index-url \S+/whl/cpu$", (ROOT / "README.md").read_text(), re.M)
    wanted = [Requirement(each) for each in PROJECT["project"]["optional-dependencies"]["verifier"]]
    assert Requirement(line) in wanted


def test_the_version_is_that_of_the_distribution() -> None:
    assert specdec.__version__ == PROJECT["project"]["version"]
    assert importlib.import_module("specdec") is specdec


def python_of(version: str, file: Path) -> Path:
    """Write an interpreter that reports this version, prints its other calls, and fails them."""
    number = tuple(map(int, version.split(".")))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = -c ] && exec {sys.executable} -c "import sys; sys.version_info = {number}; $2"\n'
        'echo "called: $@"; exit 9\n'
    )
    file.chmod(0o755)
    return file


def set_up(folder: Path, version: str) -> subprocess.CompletedProcess[str]:
    """Run `make setup` in a folder with an interpreter of this version, as far as its first call."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return make(folder, "setup", f"PYTHON={python_of(version, folder / 'stub')}")


def make(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `make` in a folder, as if the tests were not run by `make` themselves."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", *words], cwd=folder, env=outer | variables, capture_output=True, text=True, check=False, timeout=60
    )


def test_an_old_python_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    done = set_up(tmp_path, "3.10.0")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[0] == (
        f"{tmp_path / 'stub'} is Python 3.10, specdec needs 3.11 or newer: name one, as in "
        "`make setup PYTHON=python3.12`"
    )
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    ("before", "call"),
    [(None, "-m venv --clear .venv"), ("3.10.1", "-m venv --clear .venv"), ("3.12.5", "-m venv .venv")],
)
def test_an_environment_of_another_python_is_cleared(before: str | None, call: str, tmp_path: Path) -> None:
    if before is not None:
        python_of(before, tmp_path / ".venv" / "bin" / "python")
    done = set_up(tmp_path, "3.12.1")
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1] == f"called: {call}"


NPM = '#!/bin/sh\necho "$@" >> calls\nmkdir -p node_modules build/node_modules\n'
"""Stands for npm: records its calls in the working directory."""


def programs(folder: Path, *names: str) -> str:
    """Return a PATH with these programs and nothing else."""
    folder.mkdir()
    for name in names:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return str(folder)


def test_packages_of_node_are_installed_once_there_is_npm(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (node := tmp_path / "examples" / "node").mkdir(parents=True)
    (node / "package-lock.json").touch()
    stamp = node / "node_modules" / ".done"
    path = programs(tmp_path / "bin", "make", "sh", "mkdir", "touch", "sed")
    stamp_name = str(stamp.relative_to(tmp_path))
    assert make(tmp_path, stamp_name, PATH=path).returncode == 0
    assert not stamp.exists()
    (tmp_path / "bin" / "npm").write_text(NPM)
    (tmp_path / "bin" / "npm").chmod(0o755)
    for _ in range(2):
        assert make(tmp_path, stamp_name, PATH=path).returncode == 0
    assert stamp.exists()
    assert (node / "calls").read_text().split()[0] == "ci"
    assert len((node / "calls").read_text().splitlines()) == 1


def test_buf_is_installed_into_the_build_folder(tmp_path: Path) -> None:
    """npm otherwise chooses the nearest folder upwards that has packages or a package.json."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    path = programs(tmp_path / "bin", "make", "sh", "mkdir", "touch", "rm", "sed")
    (tmp_path / "bin" / "npm").write_text(NPM)
    (tmp_path / "bin" / "npm").chmod(0o755)
    (version,) = re.findall(r"^BUF_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    assert make(tmp_path, f"build/.buf-{version}", PATH=path).returncode == 0
    words = (tmp_path / "calls").read_text().split()
    assert words[0] == "install"
    assert words[words.index("--prefix") + 1] == "build"
    assert words[-1] == f"@bufbuild/buf@{version}"
