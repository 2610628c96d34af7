"""Builds images once for all tests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.containers import (
    BASE,
    TOOLS,
    Builder,
    pip_settings,
    run,
)
from tests.models import make, near


@pytest.fixture(scope="package")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    if os.geteuid() != 0:
        pytest.skip("building and mounting images needs root")
    if missing := [each for each in TOOLS if shutil.which(each) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("images")
    buildah = ("buildah", "--root", str(folder / "storage"), "--runroot", str(folder / "run"))
    try:
        run("debootstrap", "--variant=minbase", "--include=python3-venv,ca-certificates", "bookworm", folder / "base")
        container = run(*buildah, "from", "scratch").strip()
        mounted = run(*buildah, "mount", container).strip()
        run("cp", "-a", f"{folder / 'base'}/.", mounted)
        shutil.rmtree(folder / "base")
        run(*buildah, "commit", "--rm", container, BASE)
        yield Builder(buildah, [*pip_settings(folder), "--build-arg", f"BASE={BASE}"])
    finally:
        run(*buildah, "rm", "--all")
        run(*buildah, "rmi", "--all", "--force")
        shutil.rmtree(folder)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a folder with a target and a draft, with the smallest head size that vLLM accepts on CPUs."""
    folder = tmp_path / "models"
    target = make("llama", folder / "target", head_dim=32)
    near(target, folder / "draft", noise=0.04)
    run("chmod", "-R", "a+rX", folder)
    return folder


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder
