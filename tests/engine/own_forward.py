"""Compares engines with a model's own forward pass: every wanted row of sessions, trees and steps must have the logits
of transformers over that text alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.engine.batch import PackedBatch
from specdec.engine.engine import Engine
from specdec.engine.kv.slots import KVPool, Slots
from tests.models import END, VOCABULARY

CAPACITY = 512
TOLERANCE = 1e-4
"""Error relative to the largest logit. Float32 rounding is about 1e-6 of it; a wrong key changes more than 1e-2."""

StepLogits = NDArray[np.float32]
Text = list[int]


class Oracle:
    """A model's own forward pass over one text."""

    def __init__(self, directory: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        self.model: PreTrainedModel = model.eval()

    @torch.inference_mode()
    def logits(self, text: Text) -> StepLogits:
        """Return the logits [len(text), vocabulary]."""
        return np.asarray(self.model(input_ids=torch.tensor([text]), use_cache=False).logits[0].numpy())


@dataclass
class Subject:
    """An engine under test, the slots of its memory, and its oracle."""

    engine: Engine
    oracle: Oracle
    pool: KVPool = field(default_factory=lambda: KVPool(CAPACITY))


class Step:
    """One forward pass, with each wanted row compared with the oracle."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.packer = subject.engine.packer()
        self.texts: list[Text] = []

    def want(self, row: int, text: Text) -> None:
        """Request the logits of `row`, expected to be those after `text`."""
        self.packer.want(row)
        self.texts.append(list(text))

    def run(self, batch: PackedBatch | None = None) -> None:
        """Run the pass; `batch`: if it is packed already."""
        got = self.subject.engine.forward(self.packer.pack() if batch is None else batch)
        assert got.dtype == np.float32
        assert got.shape == (len(self.texts), VOCABULARY)
        for row, text in zip(got, self.texts, strict=True):
            want = self.subject.oracle.logits(text)[-1]
            difference = float(np.abs(row - want).max() / np.abs(want).max())
            assert difference < TOLERANCE, f"off by {difference:.2g} of the largest logit after {len(text)} tokens"


class Session:
    """A text with its first `done` tokens computed, on its own slots."""

    def __init__(self, subject: Subject, text: Text) -> None:
        self.subject = subject
        self.text = list(text)
        self.slots: Slots = np.array([], dtype=np.int64)

    @property
    def done(self) -> int:
        return len(self.slots)

    def compute(self, step: Step, most: int | None = None) -> None:
        """Put the next tokens into the step and request the logits of the first and the last of them."""
        new = self.text[self.done :][:most]
        if not new:
            return
        first = self.done
        self.slots = np.concatenate([self.slots, self.subject.pool.take(len(new))])
        rows = step.packer.add_rows(new, first, self.slots[first:])
        step.packer.add_path(self.slots, rows)
        for row in {rows[0], rows[-1]}:
            step.want(row, self.text[: first + 1 + row - rows[0]])

    def roll_back(self, length: int) -> None:
        """Drop everything beyond `length`; the slots' next owner overwrites them."""
        self.subject.pool.give(self.slots[length:])
        self.slots = self.slots[:length]
        del self.text[length:]


class Tree:
    """Eight guessed tokens below the text of a session, on tree slots, as rows of one step.

    . -> 0 -> 2 -> 4 -> 5
           |         `> 7
           `> 3
      `> 1 -> 6
    """

    PARENTS = (None, None, 0, 0, 2, 4, 1, 4)
    LEAVES = (3, 5, 6, 7)

    def __init__(self, session: Session, step: Step) -> None:
        self.session = session
        self.tokens = words(7, len(self.PARENTS))
        self.slots = session.subject.pool.take(len(self.PARENTS))[::-1].copy()
        self.rows = []
        for node, token in enumerate(self.tokens):
            path = self.path(node)
            self.rows.append(step.packer.add_row(token, session.done + len(path) - 1, int(self.slots[node])))
            step.want(self.rows[node], session.text + [self.tokens[i] for i in path])

    def path(self, node: int) -> list[int]:
        """Return the nodes from below the text down to this one."""
        parent = self.PARENTS[node]
        return [node] if parent is None else [*self.path(parent), node]

    def as_paths(self, step: Step) -> None:
        """Pack a lane for each leaf: inner nodes are in several lanes."""
        for leaf in self.LEAVES:
            path = self.path(leaf)
            keys = np.concatenate([self.session.slots, self.slots[path]])
            step.packer.add_path(keys, [self.rows[node] for node in path])

    def as_leaves(self, step: Step) -> None:
        """Pack every node as a leaf of its own."""
        branches = [self.slots[self.path(node)].tolist() for node in range(len(self.PARENTS))]
        step.packer.add_leaves(self.session.slots, branches, self.rows)


def words(seed: int, count: int) -> Text:
    """Return random tokens, none of them special."""
    return [int(token) for token in np.random.default_rng(seed).integers(END + 1, VOCABULARY, count)]


def last_logits(engine: Engine, text: Text) -> StepLogits:
    """Return the logits of a text as one prompt, on the first slots."""
    packer = engine.packer()
    slots = np.arange(1, len(text) + 1)
    rows = packer.add_rows(text, 0, slots)
    packer.add_path(slots, rows)
    packer.want(rows[-1])
    got = engine.forward(packer.pack())[0]  # padding repeats this row
    return np.asarray(got)


def prefilled(subject: Subject, text: Text) -> Session:
    session = Session(subject, text)
    step = Step(subject)
    session.compute(step)
    step.run()
    return session
