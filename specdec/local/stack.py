"""Starts all three services as processes on this machine, and ends them.

The target uses all CPU cores, and leaves one to its draft while that works: with a thread on every core, all threads
would wait at every layer for the one whose core the draft uses (docs/decisions/2026-11-21-cores-and-messages.md).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from specdec.engine.cpu_count import cores_given
from specdec.engine.placement import Placement, WantedDtype
from specdec.local.child import Child, LocalError, stop

DEMO = Path(__file__).parents[2] / "demo"

LEAST_FAILOVER_SECONDS = 30.0
"""Seconds that requests wait for a verifier at least. Here they wait for twice the time that its first start took, if
that is longer: only one can come back, and it must load first."""

PROGRAMS = {"verifier": ("verifier_service",), "draft": ("draft_service",), "orchestrator": ("orchestrator",)}
"""Arguments of `python -m` for each role."""


@dataclass
class Stack:
    """A verifier, an orchestrator and, if there is one, a draft service, all running."""

    address: str  # of the orchestrator
    children: dict[str, Child]
    addresses: dict[str, str]  # of all services, by role

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        target: Path | None = None,
        draft: str | None = None,
        *,
        local_draft: Path | None = None,
        dtype: WantedDtype = "auto",
        port: int = 0,
        log_level: str = "warning",
        stopped: Callable[[], bool] = lambda: False,
        verifier_options: tuple[str, ...] = (),
        draft_options: tuple[str, ...] = (),
        orchestrator_options: tuple[str, ...] = (),
        programs: Mapping[str, tuple[str, ...]] = PROGRAMS,
        route: Callable[[str], str] = lambda address: address,
    ) -> Iterator[Stack]:
        """Start the services, wait until they are ready, and end them on leaving. `draft` may be "none"; that is the
        default if `target` or `local_draft` is given.

        Verifier and draft take free ports unless their options name one. `programs` holds what to run in each role;
        `route` turns the address of a service into the one that the orchestrator is given. With these, benchmarks run
        variants of a service, and put a proxy between two.
        """
        target_path, draft_path = _models(target, draft, local_draft, dtype)
        local = () if local_draft is None else ("--draft-model", str(local_draft))
        children: dict[str, Child] = {}
        begin = time.monotonic()
        try:
            verifier = children["verifier"] = _spawn(
                "verifier",
                programs["verifier"],
                (
                    "--model",
                    str(target_path),
                    "--dtype",
                    dtype,
                    *_threads(draft_path is not None),
                    *local,
                    *verifier_options,
                ),
                log_level,
            )
            if draft_path is not None:
                children["draft"] = _spawn(
                    "draft",
                    programs["draft"],
                    ("--model", str(draft_path), "--threads", "1", *draft_options),
                    log_level,
                )
            options = ["--model", str(target_path), "--port", str(port)]
            addresses = {"verifier": verifier.await_address(stopped)}
            patience = max(LEAST_FAILOVER_SECONDS, 2 * (time.monotonic() - begin))
            options += ["--failover-seconds", f"{patience:.0f}", "--verifier", route(addresses["verifier"])]
            if draft_path is not None:
                addresses["draft"] = children["draft"].await_address(stopped)
                options += ["--draft", route(addresses["draft"])]
            children["orchestrator"] = _spawn(
                "orchestrator", programs["orchestrator"], (*options, *orchestrator_options), log_level
            )
            addresses["orchestrator"] = children["orchestrator"].await_address(stopped)
            yield cls(addresses["orchestrator"], children, addresses)
        finally:
            stop(children.values())


def _models(
    target: Path | None, draft: str | None, local_draft: Path | None, dtype: WantedDtype
) -> tuple[Path, Path | None]:
    """Return the directories of target and draft to serve, checked before anything starts."""
    from specdec.engine.engine import UnsupportedModelError
    from specdec.engine.model_directory import ModelDirectoryError
    from specdec.engine.preflight.check import Wanted, check

    if target is None and not (DEMO / "target" / "config.json").is_file():
        raise LocalError("this installation has no demo pair: give --target")
    target_path = target or DEMO / "target"
    # The demo's draft fits no other target than the demo's.
    default = None if target or local_draft else DEMO / "draft"
    draft_path = None if draft == "none" else Path(draft) if draft else default
    try:
        placement = Placement(dtype=dtype)
        drafts = [] if draft_path is None else [Wanted(draft_path, Placement("onnx"))]
        drafts += [] if local_draft is None else [Wanted(local_draft, placement)]
        check(Wanted(target_path, placement), *drafts)
    except (ModelDirectoryError, UnsupportedModelError) as error:
        raise LocalError(str(error)) from error
    return target_path, draft_path


def _threads(drafted: bool) -> tuple[str, ...]:
    cores = cores_given()
    return "--threads", str(cores), *(("--threads-while-drafting", str(max(1, cores - 1))) if drafted else ())


def _spawn(name: str, program: tuple[str, ...], options: tuple[str, ...], log_level: str) -> Child:
    common = ("--port", "0", "--log-level", log_level, "--stop-with-stdin", "--drain-seconds", "2")
    return Child.start(name, "-m", *program, *common, *options)  # of an option given twice the last one counts
