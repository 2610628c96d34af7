"""The report of `specdec doctor` as text: one named line per item."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from specdec import __version__
from specdec.doctor.models import Found
from specdec.doctor.places import LISTENING
from specdec.doctor.report import DoctorReport
from specdec.engine.preflight.memory_table import memory_lines

WIDTH = 24
"""Width of the name column in characters."""

BESIDE = 16
"""Width of the next column in characters."""


INSTEAD = {"draft-gpu": "draft"}
"""For each of these extras, the extra that it excludes."""


def lines(report: DoctorReport) -> Iterator[str]:
    """Yield the lines of the report. `!` marks items that need attention."""
    machine = report.machine
    yield f"specdec {__version__}, Python {platform.python_version()}, {machine.system}"
    yield from _packages(report)
    yield from _machine(report)
    yield "ports"
    for role, why in report.ports.items():
        yield _line(f"{LISTENING[role]} ({role})", f"taken: {why}" if why else "free", marked=bool(why))
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
