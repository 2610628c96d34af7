"""Traffic: the texts that draft services keep to learn from. A training holds them only in memory.

The record of the tenants that a draft has learned from is written beside its weights, and before them
(`specdec/engine/learned_from.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import grpc
import numpy as np
import torch
from torch import Tensor

from specdec.client.errors import from_rpc
from specdec.serving.target_logprobs import PackedPlaces, TargetLogprobs, places_of
from specdec.training.served_labels import ServedLabels
from specdec.training.texts import HELD_OUT, TextError
from specdec.v2 import learning_pb2, learning_pb2_grpc

MAX_TOKEN_IDS = 1 << 31
"""Limit on the ids of tokens with log-probabilities. Ids beyond the draft's vocabulary count among its other tokens."""


@dataclass(frozen=True)
class TrainingTraffic:
    """Kept texts, and for each tenant the time of the oldest."""

    texts: Sequence[learning_pb2.KeptText]
    tenants: Mapping[str, float]
    """For the digest of each tenant, the time when its oldest text was kept, in Unix seconds."""

    @classmethod
    def of(cls, messages: Iterable[learning_pb2.KeptText], read: float) -> TrainingTraffic:
        """Return the texts in messages, the oldest first. `read`: Unix time, in seconds, at which reading them began. A
        text that several draft services have drafted for, one after another, counts once."""
        texts = sorted(_joined(list(messages)), key=lambda text: -text.age_us)
        tenants: dict[str, float] = {}
        for text in texts:
            at = read - text.age_us / 1e6
            tenants[text.tenant_digest] = min(at, tenants.get(text.tenant_digest, at))
        return cls(texts, tenants)

    def tokens(self, end: int | None) -> Tensor:
        """Return the tokens of all texts, int64 [n], with the `end` token after each."""
        ends = [] if end is None else [end]
        return torch.tensor([token for text in self.texts for token in (*text.tokens, *ends)], dtype=torch.int64)

    def check(self, vocabulary: int) -> None:
        """Raise TextError unless each token is below `vocabulary`."""
        if (highest := max((max(text.tokens) for text in self.texts if text.tokens), default=0)) >= vocabulary:
            raise TextError(f"--traffic: has the token {highest}, but the draft's vocabulary has {vocabulary} ids")

    def labels(self, overruled: float = 0.0) -> ServedLabels:
        """Return the labels of `tokens` without an end token. The tokens of overruled guesses weigh 1 + `overruled`.
        TextError if a text is invalid."""
        tokens = self.tokens(None)
        chosen = torch.zeros(len(tokens), dtype=torch.bool)
        places, weights = torch.full((len(tokens),), -1), torch.ones(len(tokens))
        found: list[TargetLogprobs] = []
        for text, positions in zip(self.texts, self.positions, strict=True):
            begin, count, last = positions.start, len(positions), max(text.overruled, default=0)
            if text.prompt_tokens > count or last >= count:
                raise TextError(
                    f"--traffic: a text of {count} tokens has prompt_tokens {text.prompt_tokens} and overruled up to "
                    f"{last}, must be at most {count} and below {count}"
                )
            try:
                own = places_of(text.logprobs, 0, count, MAX_TOKEN_IDS)
            except ValueError as error:
                raise TextError(f"--traffic: a text's {error}") from None
            chosen[begin + text.prompt_tokens : positions.stop] = True
            weights[begin + torch.tensor(text.overruled, dtype=torch.int64)] = 1 + overruled
            rows = torch.arange(len(found), len(found) + len(own))
            places[begin + torch.tensor([place.position for place in own], dtype=torch.int64)] = rows
            found += own
        packed = PackedPlaces.of(found)
        return ServedLabels(
            tokens,
            chosen,
            places,
            torch.from_numpy(packed.tokens.astype(np.int64)),
            torch.from_numpy(packed.logprobs.astype(np.float32)),
            weights,
        )

    @property
    def positions(self) -> list[range]:
        """The positions of each text's tokens among the tokens of all texts, without end tokens."""
        ends = [0, *accumulate(len(text.tokens) for text in self.texts)]
        return [range(begin, end) for begin, end in pairwise(ends)]

    def parted(self, length: int) -> tuple[TrainingTraffic, TrainingTraffic]:
        """Return the texts to learn from, and the newest texts, which are held out. The held-out texts have at least
        1/HELD_OUT of all tokens, and fill at least two windows of `length` tokens. TextError if nothing is left to
        learn from."""
        needed = max(2 * length, sum(len(text.tokens) for text in self.texts) // HELD_OUT)
        held = tokens = 0
        while held < len(self.texts) and tokens < needed:
            held += 1
            tokens += len(self.texts[-held].tokens)
        if held == len(self.texts):
            problem = f"has {len(self.texts)} texts with {tokens} tokens, must have more than {needed} tokens"
            raise TextError(f"--traffic: {problem}, since the newest texts are held out")
        count = len(self.texts) - held
        return TrainingTraffic(self.texts[:count], self.tenants), TrainingTraffic(self.texts[count:], self.tenants)


def _joined(texts: Sequence[learning_pb2.KeptText]) -> list[learning_pb2.KeptText]:
    """Return the texts, except those that are the beginning of another one; their labels are added to the longer text.
    A draft session opened mid-text has no labels before its opening. So if the longer text has labels there, it is
    another request's, and both texts stay."""
    keys = [(text.tenant_digest, text.prompt_tokens, np.asarray(text.tokens, dtype=">u4").tobytes()) for text in texts]
    found, gone = [*texts], set[int]()
    for begin, whole in pairwise(sorted(range(len(texts)), key=keys.__getitem__)):  # a text follows its beginning
        is_begun = keys[whole][:2] == keys[begin][:2] and keys[whole][2].startswith(keys[begin][2])
        if is_begun and min(found[whole].overruled, default=MAX_TOKEN_IDS) >= len(found[begin].tokens):
            found[whole] = _with_labels_of(found[begin], found[whole])
            gone.add(begin)
    return [text for number, text in enumerate(found) if number not in gone]


def _with_labels_of(begin: learning_pb2.KeptText, whole: learning_pb2.KeptText) -> learning_pb2.KeptText:
    """Return a text with the labels of its beginning before its own."""
    found = learning_pb2.KeptText()
    found.CopyFrom(begin)
    del found.tokens[:]
    found.MergeFrom(whole)  # appends lists
    found.age_us = max(begin.age_us, whole.age_us)
    return found


def kept_texts(
    target: str, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...], seconds: float
) -> list[learning_pb2.KeptText]:
    """Return the texts that the draft service at `target` keeps, within `seconds`; TextError, with a one-line message,
    if they cannot be read."""
    stub = learning_pb2_grpc.LearningServiceStub(channel)
    try:
        answers = stub.GetTraffic(learning_pb2.GetTrafficRequest(), timeout=seconds, metadata=metadata)
        return [text for answer in answers for text in answer.texts]
    except grpc.RpcError as error:
        raise TextError(f"--traffic: {target}: {from_rpc(error, 'a draft service that keeps texts')}") from None
