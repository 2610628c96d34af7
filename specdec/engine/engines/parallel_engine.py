"""Tensor parallelism: one engine in several processes, with a part of every layer and the KV cache of some heads each.

Rank 0 sends every call to the others before it runs its own part, and decides alone: the row counts, the exactness of
rows, and everything above the engine. (Each rank measures its own fastest tiles; that changes no bit.) The other ranks
run the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import structlog
from torch import Tensor

from specdec.engine.batch import PackedBatch
from specdec.engine.distributed.ranks import Ranks
from specdec.engine.engine import Engine, UnsupportedModelError, touch_memory
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.engines.torch_engine import TorchEngine
from specdec.engine.hf.batch_invariance import make_exact
from specdec.engine.hf.reference_check import ReferenceCheck
from specdec.engine.hf.shards import sum_in_order
from specdec.engine.kv.slots import Slots
from specdec.engine.model_directory import ModelDirectory, ModelDirectoryError
from specdec.engine.row_counts import ShapeRowCounts
from specdec.engine.start_phases import phase

log = structlog.get_logger()


class PartEngine(TorchEngine):
    """One rank's part of a parallel engine. A failing call ends the process: the other ranks have run it, or are
    waiting in it."""

    def __init__(self, directory: ModelDirectory, *, ranks: Ranks, **options: Any) -> None:
        self._ranks = ranks
        super().__init__(directory, ranks=ranks, **options)

    def _settle(self, reference: ReferenceCheck, *, exact: bool) -> None:
        """Check as in one process, but at each start: results are not cached, since ranks may be on any machine."""
        with phase("compiled_loops"):
            reference.check(self)
        with phase("exactness"):
            self.exact = exact and make_exact(self)

    def tile(self, classes: ShapeRowCounts | None) -> None:
        super().tile(classes)
        sum_in_order(self.model, classes is not None)


class LeadingEngine(PartEngine):
    """Rank 0's part, used like any other engine."""

    def logits(self, batch: PackedBatch) -> Tensor:
        found: Tensor = self._with_all("logits", batch)
        return found

    def copy(self, source: Slots, target: Slots) -> None:
        self._with_all("copy", source, target)

    def tile(self, classes: ShapeRowCounts | None) -> None:
        self._with_all("tile", classes)

    def _with_all(self, name: str, *arguments: Any) -> Any:
        self._ranks.tell(name, *arguments)
        try:
            return getattr(super(), name)(*arguments)
        except Exception as error:
            self._ranks.fail(error)


class FollowingEngine(PartEngine):
    """The part of a rank other than 0."""

    def _settle(self, reference: ReferenceCheck, *, exact: bool) -> None:
        """Do nothing: rank 0 checks and decides."""

    def follow(self) -> NoReturn:
        """Run the calls sent by rank 0, until the process ends with it."""
        for name, *arguments in self._ranks.commands():
            try:
                getattr(self, name)(*arguments)
            except Exception as error:
                self._ranks.fail(error)
        raise AssertionError("commands never end")


class LeadingCpuEngine(LeadingEngine, CpuEngine):
    """Rank 0's part on a CPU: all ranks change their thread counts together."""

    def use_threads(self, count: int) -> None:
        self._with_all("use_threads", count)


class FollowingCpuEngine(FollowingEngine, CpuEngine):
    """The part of a rank other than 0 on a CPU."""


def follow(ranks: Ranks, load: Callable[[], Engine]) -> NoReturn:
    """Load this rank's part of a model and run the calls sent by rank 0, until the process ends with it. If the model
    is refused, rank 0 reports why."""
    try:
        engine = load()
    except (UnsupportedModelError, ModelDirectoryError):
        ranks.await_end()
    except Exception as error:
        ranks.fail(error)
    assert isinstance(engine, FollowingEngine)
    touch_memory([engine])
    log.info("following", rank=ranks.rank, of=ranks.degree)
    engine.follow()
