"""The memory of all models to be served on one machine, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from specdec.engine.memory import free_bytes
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.preflight.check import Beside, Wanted, device_of, is_counted
from specdec.engine.preflight.dtype import dtype_of
from specdec.engine.preflight.memory_needed import MemoryNeeded, in_gigabytes

COLUMNS = ("", "weights", "keys and values", "steps", "process", "export", "at most")


def memory_of(
    wanted: Mapping[str, tuple[Wanted, ModelDirectory]], *, heads: Beside | None = None
) -> dict[str, MemoryNeeded]:
    """Estimate, by role, the memory that models take once their KV caches are full, and the memory of `heads` beside
    the first model. Models whose memory vLLM decides are left out. A later model on the same device gets the memory
    that earlier ones leave."""
    free: dict[str, int] = {}
    found = {}
    for role, (model, directory) in wanted.items():
        placement = model.placement
        if not is_counted(placement):
            continue
        device = device_of(placement)
        left = free.setdefault(device, free_bytes(device))
        found[role] = model.memory_needed(directory, left)
        free[device] = max(0, left - found[role].total)
        if heads is not None and "heads" not in found:
            found["heads"] = heads(directory, dtype_of(directory, placement), found[role].tokens)
            free[device] = max(0, free[device] - found["heads"].total)
    return found


def memory_lines(needed: Mapping[str, MemoryNeeded]) -> Iterator[str]:
    """Yield a line with the column names, and one line for each model."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for role, memory in needed.items():
        kv = f"{in_gigabytes(memory.kv)}, {memory.tokens} tokens" if memory.tokens else "none"
        rest = (memory.working, memory.process, memory.export, memory.total)
        rows.append((role, f"{in_gigabytes(memory.weights)} {memory.kept_as}", kv, *map(in_gigabytes, rest)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
