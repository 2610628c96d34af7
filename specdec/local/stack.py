"""Starts all three services as local processes, and stops them.

The target uses all CPU cores, but leaves one to its draft while the draft works, or to other programs while they slow
it down. With a thread on every core, all threads would wait at every layer for the one that shares its core
(docs/decisions/2026-11-21-cores-and-messages.md).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specdec.engine.cpu_count import cores_given
from specdec.engine.gguf_file import open_model
from specdec.engine.heads.kinds import memory_of_draft_heads
from specdec.engine.memory import free_bytes
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.placement import Placement, WantedDtype
from specdec.engine.preflight.check import Wanted
from specdec.engine.preflight.memory_needed import in_gigabytes
from specdec.engine.start_phases import EXPORT, is_progress
from specdec.engine.unsupported import UnsupportedModelError
from specdec.local.child import DRAIN_SECONDS, Child, LocalError, stop
from specdec.local.models import ModelPaths
from specdec.roles import PACKAGES
from specdec.serving.process.listening import from_here

START_SECONDS = 1800.0
"""Start-up timeout of all services in seconds, long enough for large weights on slow disks."""

MIN_FAILOVER_SECONDS = 30.0
"""Minimum seconds that requests wait for a verifier. They wait twice as long as verifier and draft took to start, if
that is longer: a stack has one verifier, which must load its model again after a crash."""

PROGRAMS = {role: (package,) for role, package in PACKAGES.items()}
"""Arguments of `python -m` for each role."""


@dataclass
class Stack:
    """A running stack: verifier, orchestrator and, if wanted, draft service and OpenAI's HTTP API."""

    address: str  # of the orchestrator, for programs on this machine
    children: dict[str, Child]
    addresses: dict[str, str]  # where all services listen, by role

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        target: Path | None = None,
        draft: str | None = None,
        *,
        local_draft: Path | None = None,
        draft_heads: Path | None = None,
        dtype: WantedDtype = "auto",
        device: str = "cpu",
        port: int = 0,
        log_level: str = "warning",
        stopped: Callable[[], bool] = lambda: False,
        say: Callable[[str], None] = lambda line: None,
        verifier_options: tuple[str, ...] = (),
        draft_options: tuple[str, ...] = (),
        orchestrator_options: tuple[str, ...] = (),
        openai_options: tuple[str, ...] | None = None,
        drain_seconds: float = DRAIN_SECONDS,
        forced: Callable[[], bool] = lambda: False,
        programs: Mapping[str, tuple[str, ...]] = PROGRAMS,
        route: Callable[[str], str] = lambda address: address,
    ) -> Iterator[Stack]:
        """Start the services, wait until they are ready, and stop them on exit of the context. LocalError if one does
        not start; a draft that cannot be exported is left out instead. `ModelPaths.chosen` selects the models; `dtype`
        and `device` are the target's. With `draft_heads`, the draft service runs these, and `draft` is their target.

        With `openai_options`, OpenAI's HTTP API is served as well. All services except the orchestrator use free ports
        unless their options set one. `drain_seconds` bounds the drain; `forced` ends it as soon as it returns True.
        `say` receives a line for the user when a service starts and when it is ready. `programs` are the modules to run
        by role; `route` maps a service's address to the one given to the orchestrator. Benchmarks use these two to run
        variants of a service, or to insert a proxy.
        """
        models = ModelPaths.chosen(target, draft, local_draft)
        children: dict[str, Child] = {}
        addresses: dict[str, str] = {}
        begin = time.monotonic()
        phases: dict[str, str] = {}  # latest phase by role

        def spawn(role: str, model: Path | None, *options: str) -> None:
            say(f"{role} starts" if model is None else f"{role} starts: {model}")
            # If an option is given twice, the last one wins.
            common = ("--port", "0", "--log-level", log_level, "--stop-with-stdin")
            draining = ("--drain-seconds", f"{drain_seconds:g}")
            served = () if model is None else ("--model", str(model))
            children[role] = Child.start(role, "-m", *programs[role], *common, *draining, *served, *options)

        def starts(role: str, phase: str) -> None:
            if not is_progress(phase):
                phases[role] = phase
            say(f"{role} starts: {phase.replace('_', ' ')}")

        def why(role: str, how: str) -> str:
            if children[role].gave_reason:
                return f" ({how}; its own message is above)"
            wanted = {"verifier": Wanted(models.target, Placement("torch", dtype, device))}
            if models.draft is not None:
                placement = Placement("torch" if draft_heads else "onnx", is_draft=True)
                heads = partial(memory_of_draft_heads, draft_heads) if draft_heads else None
                wanted["draft"] = Wanted(models.draft, placement, heads=heads)
            return f": {how}{_memory_of(wanted[role])}" if role in wanted else f": {how}"

        def await_ready(*roles: str) -> None:
            while waiting := [role for role in roles if role in children and role not in addresses]:
                for role in waiting:
                    if address := children[role].ready_at(partial(starts, role)):
                        addresses[role] = address
                        say(f"{role} is ready at {address} after {time.monotonic() - begin:.1f} s")
                    elif (how := children[role].ending()) is not None:
                        if phases.get(role) == EXPORT:  # only a draft is exported: serve without it
                            say(f"draft was not exported{why(role, how)}: continuing without it")
                            stop([children.pop(role)])
                            continue
                        raise LocalError(f"{role} did not start{why(role, how)}")
                if stopped():
                    raise LocalError("interrupted")
                if time.monotonic() - begin > START_SECONDS:
                    raise LocalError(f"{waiting[0]} is not ready after {START_SECONDS:.0f} s")
                time.sleep(0.05)

        try:
            local = () if models.local_draft is None else ("--draft-model", str(models.local_draft))
            placed = ("--dtype", dtype, "--device", device)
            of_target, of_draft = _threads(device, fixed=models.draft is None and "vllm" in verifier_options)
            if draft_heads is not None:
                of_draft += "--engine", "torch", "--heads", str(draft_heads)
            spawn("verifier", models.target, *placed, *of_target, *local, *verifier_options)
            if models.draft is not None:
                spawn("draft", models.draft, *of_draft, *_target_tokenizer(models.draft, models.target), *draft_options)
            await_ready(*list(children))
            patience = max(MIN_FAILOVER_SECONDS, 2 * (time.monotonic() - begin))
            peers = ["--failover-seconds", f"{patience:.0f}"]
            peers += (word for role, address in addresses.items() for word in (f"--{role}", route(from_here(address))))
            ours = ("--port", str(port), "--trust-drafts")
            spawn("orchestrator", models.target, *ours, *peers, *orchestrator_options)
            await_ready("orchestrator")
            if openai_options is not None:
                spawn("openai", None, "--orchestrator", from_here(addresses["orchestrator"]), *openai_options)
                await_ready("openai")
            yield cls(from_here(addresses["orchestrator"]), children, addresses)
        finally:
            stop(children.values(), drain_seconds, forced)


def _target_tokenizer(draft: Path, target: Path) -> tuple[str, ...]:
    """Return `--target-tokenizer` and the target for a draft whose tokenizer differs from its target's, else nothing.
    Also nothing if a directory cannot be read: its service reports why."""
    with contextlib.suppress(ModelDirectoryError, UnsupportedModelError, OSError):
        if open_model(draft).tokenizer_fingerprint != open_model(target).tokenizer_fingerprint:
            return "--target-tokenizer", str(target)
    return ()


def _memory_of(wanted: Wanted) -> str:
    """Return the end of an error message: the model's minimum memory, and the free memory."""
    device = wanted.placement.device
    with contextlib.suppress(ModelDirectoryError, UnsupportedModelError, OSError):
        needed, free = wanted.memory_needed(ModelDirectory(wanted.path)), free_bytes(device)
        return f"; {needed}, together {in_gigabytes(needed.total)} at least, and {device} has {in_gigabytes(free)} free"
    return ""


def _threads(device: str, *, fixed: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the thread options of target and draft, which divide the cores. A target on a GPU leaves all cores to its
    draft. `fixed`: the target always uses all its threads."""
    if device != "cpu":
        return (), ()
    cores = cores_given()
    fewer = () if fixed else ("--threads-while-drafting", str(max(1, cores - 1)))
    return ("--threads", str(cores), *fewer), ("--threads", "1")
