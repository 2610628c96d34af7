"""Environments of clients: each has a folder in build/clients, filled from PyPI by uv, or from npm by npm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.clients.clients import Client

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "clients"
CHECKS = Path(__file__).parent / "checks"

UV = "uv==0.13.8"
"""Makes an environment in seconds: files needed by several environments are linked, not copied."""
INSTALL_SECONDS = 900
STAMP = ".packages"
"""File of an environment that lists its packages, written once they are installed."""

SILENT = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
    "CI": "true",
}
"""Variables that keep clients from sending telemetry, downloading and prompting."""


class InstallError(Exception):
    """A client cannot be installed; the message is the reason in one line."""


@dataclass(frozen=True)
class Environment:
    """The environment of a client."""

    client: Client
    folder: Path = FOLDER  # folder of all environments

    @property
    def home(self) -> Path:
        return self.folder / self.client.name

    @property
    def programs(self) -> Path:
        """The folder with the client's programs."""
        return self.home / ("bin" if self.client.registry == "PyPI" else "node_modules/.bin")

    @property
    def installed(self) -> bool:
        """True if the environment has exactly the client's packages."""
        stamp = self.home / STAMP
        return stamp.is_file() and stamp.read_text() == self._listed

    def install(self) -> None:
        """Make the environment from scratch; InstallError if that fails."""
        shutil.rmtree(self.home, ignore_errors=True)
        if self.client.registry == "PyPI":
            uv = self._uv()
            _run(uv, "venv", "--quiet", "--python", sys.executable, self.home)
            # The cache is in the same file system, so that files are linked.
            cache = ("--cache-dir", self.folder / "uv-cache")
            _run(uv, "pip", "install", *cache, "--python", self.home / "bin/python", *self.client.packages)
        else:
            if shutil.which("npm") is None:
                raise InstallError("there is no npm")
            self.home.mkdir(parents=True)
            _run("npm", "install", "--prefix", self.home, "--no-audit", "--no-fund", *self.client.packages)
        (self.home / STAMP).write_text(self._listed)

    def command(self) -> list[str]:
        """Return the command that runs the client's check."""
        check = Path(self.client.check)
        if check.suffix == ".py":  # an npm client with such a check is a program, which the check runs
            own = self.home / "bin/python"
            python = str(own) if self.client.registry == "PyPI" else sys.executable
            return [python, "-m", "tests.clients.checks", f"tests.clients.checks.{check.stem}"]
        for file in CHECKS.glob("*.mjs"):  # Node looks for packages beside the importing file
            shutil.copy(file, self.home)
        return ["node", str(self.home / "main.mjs"), check.stem]

    @property
    def _listed(self) -> str:
        return "\n".join(self.client.packages) + "\n"

    def _uv(self) -> Path:
        """Return the path of uv, which the first call installs."""
        home = self.folder / "uv"
        if not (home / "bin/uv").is_file():
            _run(sys.executable, "-m", "venv", home)
            _run(home / "bin/pip", "install", "--quiet", UV)
        return home / "bin/uv"


def variables(programs: Path, home: Path) -> dict[str, str]:
    """Return the environment variables of a check: `programs` comes first in PATH, `home` is its home folder."""
    others = ("PYTHON", "XDG_", "SPECDEC_", "PWD")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return kept | SILENT | {"PATH": path, "HOME": str(home), "PYTHONPATH": str(ROOT)}


def _run(*command: str | Path) -> None:
    try:
        done = subprocess.run(
            [*map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InstallError(f"not installed within {INSTALL_SECONDS} s") from None
    if done.returncode:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or "no solution" in line.lower()] or lines[-1:]
        raise InstallError(" ".join(telling[:2])[:300] or f"exit status {done.returncode}")
