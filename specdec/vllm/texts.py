"""The texts in vLLM's batch: what a proposer sees of them are rows of tokens, without names.

A row may hold another text at the next step: vLLM closes gaps in its batch. A text is known again by its tokens.
"""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.tree import Paths, TokenTree

Tokens = NDArray[np.int32]

COMPARED = 64
"""Tokens at the end of a text by which it is known again where it was at the last step."""

LEAST_PATH_PROBABILITY = 0.1
"""Path probability from which on a candidate is proposed: each costs the target a row."""

IN_VAIN = 3
"""Steps in a row that waited for a text's draft in vain, after which they wait no more until it sends something."""


class Text:
    """A text that vLLM generates, and the candidates below it. Its owner locks it."""

    def __init__(self, tokens: Tokens, vocabulary: int, context: int, end_tokens: frozenset[int]) -> None:
        self.tree = TokenTree(
            tokens.tolist(), vocabulary=vocabulary, last_position=context - 1, end_tokens=end_tokens, max_nodes=1024
        )
        self.seen = 0  # step in which the text was last in the batch
        self._ends = end_tokens
        self._tokens = np.empty(max(context, len(tokens)), dtype=np.int32)
        self._tokens[: len(tokens)] = tokens
        self._in_vain = IN_VAIN  # nothing has come yet

    def __len__(self) -> int:
        return self.tree.base

    def continues_in(self, row: Tokens, compared: int | None = None) -> bool:
        """Return whether a row of tokens is this text, or the text and what has been generated since; by so many of the
        text's last tokens, or by all."""
        end = len(self)
        first = 0 if compared is None else max(0, end - compared)
        return len(row) >= end and bool(np.array_equal(row[first:end], self._tokens[first:end]))

    def extend_to(self, row: Tokens) -> list[int]:
        """Add what a row has beyond the text; return it."""
        new = row[len(self) :]
        self._tokens[len(self) : len(row)] = new
        tokens: list[int] = new.tolist()
        self.tree.commit(tokens)
        return tokens

    def insert(self, base: int, paths: Paths) -> None:
        """Take candidates of a draft; ValueError if they are invalid."""
        self.tree.insert(base, paths)
        self._in_vain = 0

    def chain(self, length: int) -> list[int]:
        """Return the likeliest candidates, one after the other, at most so many."""
        least = math.log(LEAST_PATH_PROBABILITY)
        return [node.token for path_logprob, node in islice(self.tree.best_chain(), length) if path_logprob >= least]

    @property
    def worth_a_wait(self) -> bool:
        """True if nothing is there to propose, the text goes on, and its draft is not late time after time: it has sent
        something, and not long ago."""
        return not self.tree.root.children and self._in_vain < IN_VAIN and self.tree.root.token not in self._ends

    def lost(self) -> None:
        """Note that the text has no draft any more."""
        self._in_vain = IN_VAIN

    def waited_in_vain(self) -> None:
        """Note that a step has waited, and nothing came."""
        self._in_vain += 1


class TextTable:
    """Which text each row of the batch holds."""

    def __init__(self, vocabulary: int, context: int, end_tokens: frozenset[int]) -> None:
        self._made_with = vocabulary, context, end_tokens
        self._of_row: dict[int, Text] = {}

    def find(self, rows: dict[int, Tokens], step: int) -> dict[int, Text]:
        """Return the text that each of these rows holds in this step, which is a new one if none continues there. Texts
        are not extended yet."""
        found: dict[int, Text] = {}
        homeless: list[int] = []
        before = dict(self._of_row)
        for number, row in rows.items():
            text = before.get(number)
            if text is not None and text.continues_in(row, COMPARED):
                found[number] = before.pop(number)
            else:
                homeless.append(number)
        for number in homeless:
            row = rows[number]
            # Ends are compared first: texts are long, and mostly others.
            alike = (place for place, text in before.items() if text.continues_in(row, COMPARED))
            where = next((place for place in alike if before[place].continues_in(row)), None)
            found[number] = Text(row, *self._made_with) if where is None else before.pop(where)
        for text in found.values():
            text.seen = step
        # Those that are in no row now may come back: a text that was preempted, or is not due in this step.
        spare = iter(range(-1, -len(before) - 1, -1))
        self._of_row = found | {next(spare): text for text in before.values()}
        return found

    def forget(self, before: int) -> list[Text]:
        """Forget the texts that were last seen before this step; return them."""
        gone = {number: text for number, text in self._of_row.items() if text.seen < before}
        for number in gone:
            del self._of_row[number]
        return list(gone.values())
