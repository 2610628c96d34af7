"""A step loop that waits for all drafts, as a baseline."""

from __future__ import annotations

from evaluation.workers import VirtualStepLoop


class LockstepLoop(VirtualStepLoop):
    """A step loop that steps only when all its sessions can, like an engine that drafts for a batch, then verifies
    it."""

    def turn(self) -> float | None:
        self._queue.admit()  # so that later sessions are not refused by a full queue
        if all(entry.session.computable for entry in self._queue.running):
            return super().turn()
        return None  # a draft's answer wakes the loop
