"""How many cores a step has, and what it costs with them.

A draft on the verifier's own machine wants a core while it is at work. While none is, that core is the verifier's:
speculation that does not pay must not leave it slower than if nobody had speculated.
"""

from __future__ import annotations

from specdec.engine.engine import Engine
from verifier_service.cost import StepCost


class Cores:
    """Of an engine that can compute with all of its threads, or with fewer beside drafts at work."""

    def __init__(self, engine: Engine, slots: int, cost: StepCost | None = None) -> None:
        """Steps are measured over the engine's first `slots` slots, unless what they `cost` is known."""
        self._engine = engine
        self._costs: dict[int, StepCost] = {}
        for threads in reversed(engine.threads):
            engine.use_threads(threads)
            self._costs[threads] = cost or StepCost.measure(engine, slots)
        self._used = engine.threads[0]

    @property
    def cost(self) -> StepCost:
        """Of a step with the threads that it has now."""
        return self._costs[self._used]

    @property
    def undrafted_cost(self) -> StepCost:
        """Of a step with all of them."""
        return self._costs[self._engine.threads[0]]

    @property
    def shared(self) -> bool:
        """Whether drafts have taken some of them, even if they bring nothing."""
        return self._used != self._engine.threads[0]

    def share(self, with_drafts: bool) -> None:
        """Have the next steps leave room for drafts at work, or not."""
        threads = self._engine.threads[-1 if with_drafts else 0]
        if threads != self._used:
            self._used = threads
            self._engine.use_threads(threads)
