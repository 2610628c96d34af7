"""The report of `specdec doctor`, as JSON and as text; every part is computed on first access."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from specdec import __version__
from specdec.doctor import packages, places
from specdec.doctor.machine import Machine
from specdec.doctor.models import Found, ModelCheck, models
from specdec.doctor.packages import Extra, Package
from specdec.doctor.places import Cache
from specdec.engine import fast_paths
from specdec.engine.fast_paths import FastPathOff
from specdec.engine.placement import Kind, Placement, WantedDtype
from specdec.engine.preflight.device import cuda_number
from specdec.engine.preflight.memory_table import memory_lines
from specdec.engine.unsupported import UnsupportedModelError
from specdec.extras import check_installed, hint, install_command

UP = ("cli", "orchestrator", "draft", "verifier")
"""Extras whose packages `specdec up` needs."""

WIDTH = 24
"""Width of the name column in characters."""

BESIDE = 16
"""Width of the next column in characters."""

INSTEAD = {"draft-gpu": "draft"}
"""For each of these extras, the extra that it excludes."""


@dataclass(frozen=True)
class DoctorOptions:
    """The models to check: a target and heads as accepted by `specdec verifier`, and a draft as by `specdec draft`."""

    model: Path | None = None
    draft: Path | None = None
    device: str = "cpu"
    dtype: WantedDtype = "auto"
    kv_tokens: int | None = None
    engine: Kind = "torch"
    heads: Path | None = None


@dataclass(frozen=True)
class DoctorReport:
    """The findings on this machine."""

    options: DoctorOptions

    @cached_property
    def packages(self) -> list[Package]:
        return packages.packages(packages.requirements())

    @cached_property
    def extras(self) -> list[Extra]:
        return packages.extras(packages.requirements())

    @cached_property
    def machine(self) -> Machine:
        return Machine.here()

    @cached_property
    def ports(self) -> dict[str, str]:
        """Reasons why services cannot listen at their default ports, by role; "" if they can."""
        return places.taken_ports()

    @cached_property
    def cache(self) -> Cache:
        try:
            return places.cache()
        except ModuleNotFoundError:
            return Cache(None, "no installed service has one")

    @cached_property
    def models(self) -> ModelCheck | None:
        """The requested models; None if there were none."""
        options = self.options
        if options.model is None and options.draft is None:
            return None
        target = Placement(options.engine, options.dtype, options.device, options.kv_tokens)
        return models(options.model, options.draft, target, options.heads)

    @cached_property
    def fast_paths(self) -> dict[str, FastPathOff | None] | str:
        """The fast paths of the CPU engine by name, None for those in use; or the reason why they are unknown. With a
        model this imports torch, which takes seconds."""
        try:
            if self.models is None:
                check_installed("torch")
                return "give --model to see them: that loads the engine, which takes seconds"
            return fast_paths.of_this_machine()
        except ModuleNotFoundError as error:
            return hint(error, "verifier") or str(error)
        except Exception as error:  # a broken installation may raise anything
            return f"the engine cannot be loaded: {type(error).__name__}: {error}".partition("\n")[0]

    @property
    def problem(self) -> str:
        """Why the requested models, or models on the requested device, cannot run here; "" if they can."""
        of_models = "" if self.models is None else self.models.problem
        # A target's check includes its device; a draft alone is checked for its own.
        return of_models or (self._device_problem if self.options.model is None else "")

    @property
    def _device_problem(self) -> str:
        """Why the requested device cannot be used; "" if it can."""
        try:
            number = cuda_number(self.options.device)
        except UnsupportedModelError as error:
            return str(error)
        if number is None:
            return ""
        cuda = self.machine.cuda
        if isinstance(cuda, int):
            why = self.machine.advice if number < cuda else f"the number of CUDA devices is {cuda}"
        else:
            why = cuda
        return f"--device is {self.options.device}, and {why}" if why else ""

    @property
    def lacking(self) -> str:
        """Why `specdec up` cannot start here; "" if it can. With models or a missing device: `problem`."""
        if self.models is not None or self.problem:
            return self.problem
        if not self.packages:
            return ""  # not an installed distribution: its requirements are unknown
        complete = {extra.name for extra in self.extras if not extra.missing}
        needed = set(UP) - ({"draft"} if "draft-gpu" in complete else set())  # either suffices
        missing = {name for extra in self.extras if extra.name in needed for name in extra.missing}
        return f"{', '.join(sorted(missing))} not installed: {install_command('all')}" if missing else ""

    @property
    def verdict(self) -> str:
        """The verdict in one sentence: what can run here, or the first problem."""
        if self.lacking:
            what = "only part of specdec can run here"
            if self.problem:
                what = "these models cannot be served here" if self.models else "no model can be served there"
            return f"Not ready: {what}, because {self.lacking.removesuffix('.')}"
        parts = ["`specdec up` can start here"]
        if self.models is not None:
            found = self.models.found
            parts = [" and ".join(f"the {model.role}" for model in found) + " can be served here"]
            if unchecked := [f"the {model.role}" for model in found if not model.tensors_checked]:
                parts.append(f"if the files of {' and '.join(unchecked)} have all tensors, which is checked at start")
        if taken := [f"{places.LISTENING[role]} ({role})" for role, why in self.ports.items() if why]:
            parts.append(f"on other ports than {', '.join(taken)}, which {'is' if len(taken) == 1 else 'are'} taken")
        if self.machine.advice:
            parts.append(f"but without the GPU: {self.machine.advice}")
        return f"Ready: {', '.join(parts)}"

    def as_json(self) -> dict[str, Any]:
        paths, found = self.fast_paths, self.models
        return {
            "specdec": __version__,
            "python": platform.python_version(),
            "packages": {
                package.name: {"version": package.installed, "wanted": package.range, "fits": package.fits}
                for package in self.packages
            },
            "extras": {extra.name: {"missing": extra.missing, "install": extra.command} for extra in self.extras},
            "machine": self.machine._asdict(),
            "fast_paths": {
                name: None if off is None else {"why": off.why, "cost": off.cost}
                for name, off in (paths if isinstance(paths, dict) else {}).items()
            },
            "fast_paths_unknown": paths if isinstance(paths, str) else "",
            "ports": {role: {"port": places.LISTENING[role], "taken": why} for role, why in self.ports.items()},
            "cache": {**self.cache._asdict(), "folder": self.cache.folder and str(self.cache.folder)},
            "models": [model.as_json() for model in (found.found if found else [])],
            "problem": self.problem,
            "ready": not self.lacking,
            "verdict": self.verdict,
        }


def lines(report: DoctorReport) -> Iterator[str]:
    """Yield the lines of the report. `!` marks items that need attention."""
    machine = report.machine
    yield f"specdec {__version__}, Python {platform.python_version()}, {machine.system}"
    yield from _packages(report)
    yield from _machine(report)
    yield "ports"
    for role, why in report.ports.items():
        yield _line(f"{places.LISTENING[role]} ({role})", f"taken: {why}" if why else "free", marked=bool(why))
    yield "cache folder"
    cache = report.cache
    kept = f"{cache.entries} entries, {cache.size / 1e6:.1f} MB"
    yield _line(str(cache.folder or "none"), f"not used: {cache.unusable}" if cache.unusable else kept)
    if report.models is not None:
        yield "models"
        for model in report.models.found:
            yield _line(
                f"{model.role} ({model.architecture})",
                f"{model.dtype} on {model.device}, {model.context} tokens of context, {_memory(model)}: can be served",
            )
            if model.common_tokens is not None:
                yield _line("", f"another tokenizer: {model.common_tokens} tokens in common with the target's")
        if report.models.found:
            needed = {found.role: found.memory_parts for found in report.models.found if found.memory_parts is not None}
            if needed:
                yield "memory"
                yield from (f"  {line}" for line in memory_lines(needed))
        if report.problem:
            yield _line("cannot be served", report.problem, marked=True)
    yield "fast paths of the CPU engine"
    if isinstance(report.fast_paths, str):
        yield _line("unknown", report.fast_paths)
    else:
        for name, off in report.fast_paths.items():
            yield _line(name, "on" if off is None else f"off, {off.why}; {off.cost}", marked=off is not None)
    yield ""
    yield report.verdict


def _memory(model: Found) -> str:
    if model.memory is None or model.memory_at_least is None:
        return "memory decided by vLLM"
    return f"at least {model.memory_at_least / 1e9:.3g} GB, at most {model.memory / 1e9:.3g} GB"


def _packages(report: DoctorReport) -> Iterator[str]:
    yield "packages"
    if not report.packages:
        yield _line("unknown", "this is not an installed distribution: required versions are unknown")
    for package in report.packages:
        wanted = f"wants {package.range}" if package.fits else f"outside the tested range {package.range}"
        yield _line(package.name, f"{package.installed or 'not installed':{BESIDE}} {wanted}", marked=not package.fits)
    yield "extras"
    for extra in report.extras:
        instead = f", instead of {INSTEAD[extra.name]}" if extra.name in INSTEAD else ""
        missing = f"missing {', '.join(extra.missing)}{instead}: {extra.command}"
        but = ", but torch is built for CPUs" if extra.name == "cuda" and report.machine.torch == "CPUs" else ""
        yield _line(extra.name, missing if extra.missing else f"complete{but}")


def _machine(report: DoctorReport) -> Iterator[str]:
    machine = report.machine
    yield "machine"
    yield _line("cores", f"{machine.cores_given} of {machine.cores} available")
    if machine.memory_free is not None and machine.memory is not None:
        yield _line("memory", f"{machine.memory_free / 1e9:.1f} GB free, of {machine.memory / 1e9:.1f}")
    yield _line("bfloat16", "hardware support" if machine.bfloat16 else "no hardware support: float32 is much faster")
    yield _line("torch", f"built for {machine.torch}" if machine.torch else "not installed")
    devices = f"{machine.cuda} device{'s' * (machine.cuda != 1)}" if isinstance(machine.cuda, int) else machine.cuda
    yield _line("CUDA", "; ".join(filter(None, (devices, machine.advice))), marked=bool(machine.advice))


def _line(name: str, text: str, *, marked: bool = False) -> str:
    return f"{'!' if marked else ' '} {name:{WIDTH}} {text}"
