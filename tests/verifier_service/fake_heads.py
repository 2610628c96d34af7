"""Fake heads over a fake target, whose hidden states are the numbers of texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.batch import PackedBatch
from specdec.engine.heads.block_config import Markov
from specdec.engine.heads.growth import AutoregressiveReader, BlockReader
from specdec.engine.heads.text_memory import TextMemory, TreeContext
from specdec.engine.kv.slots import Slots
from tests.verifier_service.fakes import BAD, FREE, LANGUAGE, VOCABULARY, Client, Decided, TextEngine, step_loop
from verifier_service.backend.result import Mode
from verifier_service.proposers.feature_heads import FeatureHeadsProposer
from verifier_service.proposers.heads import HeadsProposer
from verifier_service.proposers.medusa import MedusaProposer
from verifier_service.step_loop import StepLoop

COUNT = 4
"""Number of Medusa heads."""

Logits = NDArray[np.float32]


class StatesEngine(TextEngine):
    """A text engine whose hidden states and features are the numbers of texts."""

    hidden_size = 1

    def forward_hidden(self, batch: PackedBatch) -> tuple[Logits, NDArray[np.float32]]:
        logits = self.forward(batch)
        return logits, self.memory[batch.slots[batch.wanted]].astype(np.float32)[:, None]

    def forward_features(self, batch: PackedBatch, layers: Sequence[int]) -> tuple[Logits, NDArray[np.float32]]:
        logits = self.forward(batch)
        numbers = self.memory[batch.slots].astype(np.float32)
        return logits, np.repeat(numbers[:, None, None], len(layers), axis=1)

    def output_head(self, hidden: Any) -> Any:
        raise NotImplementedError

    def layer_count(self) -> int:
        return 3

    def token_embeddings(self) -> Any:
        raise NotImplementedError


class FakeHeads:
    """Heads that return the target's own logits after every text, reversed for a fraction `wrong` of the guesses."""

    vocabulary = VOCABULARY

    def __init__(self, wrong: float = 0.0) -> None:
        self.wrong = wrong
        self.failure: Exception | None = None
        self.broken = False  # logits are NaN
        self.texts: list[int] = []  # number of texts in each pass

    def passed(self, texts: int) -> None:
        if self.failure is not None:
            raise self.failure
        self.texts.append(texts)

    def logits_of(self, number: int, depth: int = 0) -> Logits:
        """Return the logits after a text; whether they are wrong depends on the text and the depth of the guess."""
        if self.broken:
            return np.full(VOCABULARY, np.nan, dtype=np.float32)
        found = LANGUAGE.logits(number)
        wrong = np.random.default_rng([number, depth]).random() < self.wrong
        return found[::-1] if wrong else found


class FakeMedusa(FakeHeads):
    """Medusa heads: each guesses the token after a continuation by the target's likeliest tokens."""

    shape = SimpleNamespace(heads=COUNT)
    weights = torch.zeros(1)

    def __call__(self, hidden: Tensor) -> Tensor:
        self.passed(len(hidden))
        return torch.from_numpy(np.stack([self.guesses(int(number)) for number in hidden[:, 0].tolist()]))

    def guesses(self, number: int) -> Logits:
        found = []
        for depth in range(COUNT):
            allowed = LANGUAGE.logits(number).copy()
            allowed[BAD] = -np.inf
            number = LANGUAGE.number(number, int(allowed.argmax()))
            found.append(self.logits_of(number, depth))
        return np.stack(found)


class FakeEagle3(FakeHeads):
    """EAGLE-3 heads. A row's state is the number of the text that ends with the row's token, computed from the number
    of the text before that token. A row's keys must be the rows of its text, without a gap."""

    outputs = VOCABULARY
    dtype = torch.float32
    device = torch.device("cpu")
    ids: NDArray[np.int64] | None = None  # vocabulary of the heads; None: all tokens

    def __init__(self, wrong: float = 0.0) -> None:
        super().__init__(wrong)
        self.faults: list[str] = []
        self.seen: list[int] = []  # rows seen by each row of a tree
        self.read_rows = 0

    def fused(self, features: Tensor) -> Tensor:
        return features[:, 0]

    def read(self, tokens: Tensor, fused: Tensor, positions: Tensor, slots: Slots, memory: TextMemory) -> None:
        if self.failure is not None:
            raise self.failure
        self.read_rows += len(tokens)
        if len({*slots.tolist(), 0}) <= len(slots):
            self.faults.append("two rows are written to one slot")
        numbers = self._numbers(tokens[:, None], fused[:, None])[:, 0]
        for number, position in zip(numbers.tolist(), positions.tolist(), strict=True):
            if len(LANGUAGE.prefixes[int(number)]) != position + 2:
                self.faults.append(f"a row at position {position} has a token of another one")
        memory.write(slots, numbers[:, None, None], numbers[:, None, None])

    def grow(self, tokens: Tensor, fused: Tensor, positions: Tensor, trees: TreeContext, origins: Tensor) -> Tensor:
        self.passed(len(tokens))
        numbers = self._numbers(tokens, fused)
        visible = trees.visible(origins)
        keys, _ = trees.add(numbers[..., None, None], numbers[..., None, None])
        for own, seen, rows, places in zip(
            keys[:, :, 0, 0].tolist(), visible.tolist(), numbers.tolist(), positions.tolist(), strict=True
        ):
            for number, mask, position in zip(rows, seen, places, strict=True):
                read = sorted(int(key) for key, sees in zip(own, mask, strict=True) if sees)
                prefixes = LANGUAGE.prefixes[int(number)]
                if read != sorted(prefixes[-len(read) :].tolist()) or len(prefixes) != position + 2:
                    self.faults.append(f"a row at position {position} does not see its text")
                self.seen.append(len(read))
        return numbers[..., None]

    def outcome(self, states: Tensor) -> tuple[Tensor, Tensor]:
        numbers = states[..., 0].flatten().tolist()
        logits = np.stack([self.logits_of(int(number)) for number in numbers])
        if self.ids is not None:
            logits = logits[:, self.ids]
        return torch.from_numpy(logits).reshape(*states.shape[:-1], -1), states

    def _numbers(self, tokens: Tensor, fused: Tensor) -> Tensor:
        """Return the numbers [n, f] of the texts that end with these tokens."""
        numbers = [
            [LANGUAGE.number(int(before), token) for before, token in zip(*own, strict=True)]
            for own in zip(fused[..., 0].tolist(), tokens.tolist(), strict=True)
        ]
        return torch.tensor(numbers, dtype=torch.float32)


class FakeBlock(FakeHeads):
    """A block draft whose states are the numbers of texts: of the text continued by the likeliest tokens or, with a
    Markov head (`markov`), by the guesses before. A block's keys must be the rows of its text, without a gap."""

    shape = SimpleNamespace(outputs=VOCABULARY)
    dtype = torch.float32
    device = torch.device("cpu")
    ids: NDArray[np.int64] | None = None
    guesses = 6

    def __init__(self, wrong: float = 0.0, *, markov: bool = False) -> None:
        super().__init__(wrong)
        self.variant = SimpleNamespace(markov=Markov.RNN if markov else None, confidence=markov)
        self.faults: list[str] = []
        self.seen: list[int] = []  # rows seen by each block
        self.read_rows = 0

    def fused(self, features: Tensor) -> Tensor:
        return features[:, 0]

    def read(self, fused: Tensor, positions: Tensor, slots: Slots, memory: TextMemory) -> None:
        if self.failure is not None:
            raise self.failure
        self.read_rows += len(fused)
        if len({*slots.tolist(), 0}) <= len(slots):
            self.faults.append("two rows are written to one slot")
        for number, position in zip(fused[:, 0].tolist(), positions.tolist(), strict=True):
            if len(LANGUAGE.prefixes[int(number)]) != position + 1:
                self.faults.append(f"a row at position {position} has features of another one")
        memory.write(slots, fused[:, None], fused[:, None])

    def states(self, anchors: Tensor, positions: Tensor, texts: list[Slots], memory: TextMemory) -> Tensor:
        self.passed(len(anchors))
        keys, _ = memory.gathered(texts, max(map(len, texts)))
        found = []
        for own, slots, token, position in zip(
            keys[:, :, 0, 0], texts, anchors.tolist(), positions.tolist(), strict=True
        ):
            read = [int(number) for number in own[: len(slots)].tolist()]
            number = LANGUAGE.number(read[-1], token)
            if (
                read != LANGUAGE.prefixes[read[-1]][-len(read) :].tolist()
                or len(LANGUAGE.prefixes[number]) != position + 1
            ):
                self.faults.append(f"a block at position {position} does not see its text")
            self.seen.append(len(read))
            numbers = [number] * self.guesses if self.variant.markov else self._going_on(number)
            found.append([[number, depth] for depth, number in enumerate(numbers)])
        return torch.tensor(found, dtype=torch.float32)

    def logits(self, states: Tensor) -> Tensor:
        if self.variant.markov:
            return torch.zeros(*states.shape[:-1], VOCABULARY)
        found = [[self.logits_of(int(number), int(depth)) for number, depth in own] for own in states.tolist()]
        return torch.from_numpy(np.array(found))

    def markov(self, tokens: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        numbers = states[..., 0].tolist()
        if memory is not None:
            numbers = [
                [LANGUAGE.number(int(before), token) for before, token in zip(*own, strict=True)]
                for own in zip(memory[..., 0].tolist(), tokens.tolist(), strict=True)
            ]
        self._check(tokens, states, numbers)
        found = np.array([[self.logits_of(int(number)) for number in own] for own in numbers])
        return torch.from_numpy(found), torch.tensor(numbers, dtype=torch.float32)[..., None]

    def confidence(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Return the log-odds of 0.9."""
        return torch.full(tokens.shape, math.log(9.0))

    def _check(self, tokens: Tensor, states: Tensor, numbers: list[list[float]]) -> None:
        """Record a fault if a token is not the last one of its numbered text, or if a state's depth does not match."""
        for token, number, (begun, depth) in zip(
            tokens.flatten().tolist(), np.ravel(numbers).tolist(), states.flatten(0, 1).tolist(), strict=True
        ):
            before = LANGUAGE.prefixes[int(number)]
            if LANGUAGE.number(int(before[-2]), token) != int(number):
                self.faults.append(f"{token} is not the token before the guess")
            if len(before) != len(LANGUAGE.prefixes[int(begun)]) + depth:
                self.faults.append(f"a guess at depth {depth} does not follow {depth} others")

    def _going_on(self, number: int) -> list[int]:
        """Return the numbers of a text and of its continuations by the likeliest tokens."""
        found = [number]
        while len(found) < self.guesses:
            allowed = LANGUAGE.logits(found[-1]).copy()
            allowed[BAD] = -np.inf
            found.append(LANGUAGE.number(found[-1], int(allowed.argmax())))
        return found


@dataclass(frozen=True)
class Kind:
    """A kind of heads: the fake, and its proposer."""

    make: Callable[[float], Any]
    propose: Callable[[Any], HeadsProposer[Any]]

    def heads(self, wrong: float = 0.0) -> Any:
        return self.make(wrong)

    def loop(self, heads: Any, **options: Any) -> StepLoop:
        return loop_of(self.propose(heads), **options)


def loop_of(proposer: HeadsProposer[Any], **options: Any) -> StepLoop:
    """Return a step loop that lets heads propose even where they do not pay."""
    usual: dict[str, Any] = {"controller": Decided(Mode.HEADS), "latency": FREE}
    return step_loop(options.pop("target", None) or StatesEngine(60), heads=proposer, **usual | options)


def memory_of(positions: int = 4096) -> TextMemory:
    return TextMemory(positions, 1, 1, torch.float32, torch.device("cpu"))


def _block_proposer(heads: Any) -> FeatureHeadsProposer:
    return FeatureHeadsProposer(BlockReader(heads, memory_of()), (0, 2))


KINDS = {
    "medusa": Kind(FakeMedusa, lambda heads: MedusaProposer(heads)),
    "eagle3": Kind(FakeEagle3, lambda heads: FeatureHeadsProposer(AutoregressiveReader(heads, memory_of()), (0, 2))),
    "block": Kind(FakeBlock, _block_proposer),
    "markov": Kind(partial(FakeBlock, markov=True), _block_proposer),
}


def proposer_of(loop: StepLoop) -> Any:
    (found,) = (proposer for proposer in loop._speculation.proposers if isinstance(proposer, HeadsProposer))
    return found


def check_over(loop: StepLoop, *clients: Client) -> None:
    """Check that texts have the tokens of plain decoding, no faults, and no memory left."""
    for each in clients:
        assert each.mail.error is None
        assert each.tokens == each.want
    assert loop.pool.held == 0
    proposer = proposer_of(loop)
    heads = proposer._reader.heads if isinstance(proposer, FeatureHeadsProposer) else proposer._heads
    assert getattr(heads, "faults", []) == []
    check_empty(loop)


def check_empty(loop: StepLoop) -> None:
    """Check that the heads hold no texts and no memory."""
    proposer = proposer_of(loop)
    assert not proposer._texts
    if isinstance(proposer, FeatureHeadsProposer):
        assert proposer._reader.memory.pool.used == 0


def sources(*clients: Client) -> list[int]:
    return [source for client in clients for result in client.mail.results for source in result.sources]
