"""The Dockerfiles, parsed for tests."""

from __future__ import annotations

import importlib
import re
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import typer
import yaml

from specdec import ports
from specdec.settings import configurable

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "images"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())

ROLES = {"orchestrator": ("orchestrator", "openai"), "draft": ("draft",), "verifier": ("verifier", "warm-up", "export")}
"""Each image's commands."""

MAINS = {"openai": "specdec.openai_api", "draft": "draft_service", "verifier": "verifier_service"}
MAINS["orchestrator"] = "orchestrator"
PORTS = {"draft": ports.DRAFT, "verifier": ports.VERIFIER, "orchestrator": ports.ORCHESTRATOR, "openai": ports.OPENAI}
NOBODY = 10001
PROBE = "/usr/share/specdec/probe.py"


class Instruction(NamedTuple):
    name: str
    value: str  # its joined lines, including flags

    @property
    def words(self) -> list[str]:
        """The words of the instruction without flags."""
        return [each for each in shlex.split(self.value) if not each.startswith("--")]

    @property
    def pairs(self) -> dict[str, str]:
        """Names and values in an ENV, LABEL or ARG."""
        return {name: value for name, _, value in (each.partition("=") for each in self.words)}


@dataclass
class Stage:
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def values(self, name: str) -> list[Instruction]:
        return [each for each in self.instructions if each.name == name]

    def pairs(self, name: str) -> dict[str, str]:
        return {key: value for each in self.values(name) for key, value in each.pairs.items()}


@dataclass
class Dockerfile:
    arguments: dict[str, str]  # before the first stage
    stages: list[Stage]

    @classmethod
    def parsed(cls, text: str) -> Dockerfile:
        """Parse the syntax that our files use: no heredocs, and no escape except the backslash."""
        found, pending = cls({}, []), ""
        for line in map(str.strip, text.splitlines()):
            if not line or line.startswith("#"):
                continue
            pending += line
            if pending.endswith("\\"):
                pending = pending[:-1]
                continue
            each = Instruction(*pending.split(None, 1))
            pending = ""
            if each.name == "FROM":
                base, _, stage = each.value.partition(" AS ")
                found.stages.append(Stage(base, stage))
            elif found.stages:
                found.stages[-1].instructions.append(each)
            else:
                assert each.name == "ARG"
                found.arguments |= each.pairs
        assert not pending
        return found

    @property
    def last(self) -> Stage:
        return self.stages[-1]

    def stage(self, name: str) -> Stage:
        (found,) = (each for each in self.stages if each.name == name)
        return found


SERVICES = Dockerfile.parsed((FOLDER / "services.Dockerfile").read_text())
WARMED = Dockerfile.parsed((FOLDER / "warmed.Dockerfile").read_text())
VLLM = Dockerfile.parsed((FOLDER / "vllm.Dockerfile").read_text())


def image(role: str) -> Stage:
    """Return the instructions that make a service's image, from its base on."""
    stages = SERVICES.stage("runtime"), SERVICES.stage(role), SERVICES.last
    return Stage(stages[0].base, role, [each for stage in stages for each in stage.instructions])


def extras_of(role: str) -> dict[str, list[str]]:
    """Return the extras installed in an image, by device."""
    (run,) = SERVICES.stage("dependencies").values("RUN")
    cases = re.findall(r"([\w-]+(?: \| [\w-]+)*)\) extras=(\S+)", run.value)
    chosen = ((case, extras) for names, extras in cases for case in names.split(" | "))
    return {case.removeprefix(f"{role}-"): extras.split(",") for case, extras in chosen if role in case}


def parameters(service: str) -> dict[str, Any]:
    """Return the options of a service by name."""
    app = typer.Typer()
    app.command()(configurable(service, importlib.import_module(f"{MAINS[service]}.__main__").main))
    return {each.name: each for each in typer.main.get_command(app).params if each.name}
