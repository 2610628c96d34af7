"""The foreseen step: the next step, packed while the device computes the current one.

A text continuing without candidates gets exactly one token. Its next row is therefore known in advance: position, slot
and keys. Only the token is filled in later. On a GPU this hides most of the planning behind the current pass; vLLM
calls it async scheduling. The packed batch is dropped, and the step planned when due, if a text joins or gets
candidates. A text that ends drops it only if the step is not launched early.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.kv.blocks import BlockTable
from verifier_service.backend.result import VerifyResult
from verifier_service.scheduling.run_queue import RunQueue
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.step_rows import ScheduledRows


class _Row(NamedTuple):
    row: int  # index among the batch's results
    base: int  # length of the text when the foreseen step begins
    table: BlockTable


Entries = list[tuple[RunningSession, ScheduledRows]]
"""The rows of each text in a batch."""


class ForeseenStep:
    """The next step, on the assumption that every text continues by one token."""

    def __init__(self, queue: RunQueue) -> None:
        self._queue = queue
        self._batch: PackedBatch | None = None
        self._rows: dict[RunningSession, _Row] = {}

    def forget(self) -> None:
        """Drop the foreseen batch."""
        self._batch, self._rows = None, {}

    def prepare(self, packer: Packer, entries: Sequence[tuple[RunningSession, ScheduledRows]]) -> None:
        """Pack a row for every text that continues after the current step. Pack nothing if any text has candidates or a
        window in this step, has a prompt that this step does not finish, or has no memory for another token."""
        self.forget()
        for entry, rows in entries:
            session = entry.session
            position = session.tree.base
            if rows.root_row is None or rows.tree is not None:
                return
            if position + 1 >= session.end:  # the token ends the text
                continue
            if not self._queue.reserve_ahead(session, position + 1):
                return
            assert session.table is not None
            keys = session.table.slots[: position + 1]
            row = packer.add_row(0, position, int(keys[position]))
            packer.add_path(keys, (row,))
            self._rows[entry] = _Row(packer.want(row), position + 1, session.table)
        if self._rows:
            self._batch = packer.pack()

    def take(self, entries: Sequence[RunningSession]) -> tuple[PackedBatch, Entries] | None:
        """Return the batch with the roots of these texts filled in, and each text's row; None unless exactly these
        texts were foreseen. The foreseen batch is forgotten in any case."""
        batch, rows = self._batch, self._rows
        self.forget()
        if batch is None or len(entries) != len(rows):
            return None
        for entry in entries:
            session, foreseen = entry.session, rows.get(entry)
            if foreseen is None or foreseen.base != session.tree.base or foreseen.table is not session.table:
                return None
        _fill(batch, [(rows[entry].row, entry.session.tree.root.token) for entry in entries])
        return batch, _entries(entries, rows)

    def take_early(
        self, results: Sequence[tuple[RunningSession, VerifyResult]]
    ) -> tuple[PackedBatch, Entries, int] | None:
        """Return the batch with the tokens of the current step filled in, before they are committed; the row of each
        text that continues; and the batch's number of rows. None if no text continues. The foreseen batch is forgotten
        in any case.

        The row of a text that gets an end token stays in the batch, harmlessly: its slot is freed with the text, and
        this pass writes the slot before its next owner does.
        """
        batch, rows = self._batch, self._rows
        self.forget()
        continuing = [entry for entry, result in results if not result.finish]
        if batch is None or not continuing:
            return None
        _fill(batch, [(rows[entry].row, result.tokens[-1]) for entry, result in results if entry in rows])
        return batch, _entries(continuing, rows), len(rows)


def _fill(batch: PackedBatch, chosen: Sequence[tuple[int, int]]) -> None:
    """Fill in the tokens of some rows; `chosen`: each row's (index among the results, token)."""
    rows, tokens = zip(*chosen, strict=True)
    batch.tokens[batch.wanted[list(rows)]] = tokens  # some packers reorder rows


def _entries(entries: Sequence[RunningSession], rows: dict[RunningSession, _Row]) -> Entries:
    return [(entry, ScheduledRows(1, root_row=rows[entry].row)) for entry in entries]
