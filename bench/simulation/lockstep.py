"""A step loop that waits for all drafts, to compare with."""

from __future__ import annotations

from evaluation.workers import VirtualStepLoop


class LockstepLoop(VirtualStepLoop):
    """A step loop that steps when all its sessions can, like an engine that drafts for a batch, then verifies it."""

    def turn(self) -> float | None:
        self._queue.admit()  # sessions that come meanwhile are not refused because the queue is full
        if all(entry.session.computable for entry in self._queue.running):
            return super().turn()
        return None  # a draft's answer wakes the loop
