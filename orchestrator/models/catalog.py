"""The catalog: the models and revisions served now, and the choice of a revision for each request.

Requests that name no revision are split by shares: at random, unless they have a seed. A seeded request gets the same
revision while the shares stay the same and that revision is ready, since another revision would give it other tokens.
The choice ignores speculation options.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from orchestrator.models.file import SEPARATOR
from orchestrator.models.grammar_check import GrammarCheck
from orchestrator.models.revision import Revision
from orchestrator.models.stats import OrchestratorStats
from orchestrator.pods.peers import Peers
from orchestrator.requests.model import ServedModel
from specdec.serving.echo import echo
from specdec.serving.errors import InvalidRequestError, PeerLostError, UnknownModelError
from specdec.v2 import generation_pb2

NAMED = 8
"""Maximum names of models or revisions listed in an error message."""

NOWHERE = ("", "")
"""Key for the counts of requests for unknown models."""

PART = 4096
TURNS = 16
"""Limits on the hashed parts of a seeded request: PART characters or tokens at each end of a prompt or chat turn, and
TURNS turns at each end of a conversation."""

BELOW_ONE = math.nextafter(1.0, 0.0)


class Catalog:
    """The served revisions. The catalog owns them, and the counts of all revisions ever served."""

    def __init__(self, revisions: Iterable[Revision] = ()) -> None:
        self._models: dict[str, list[Revision]] = {}
        self._aliases: dict[str, str] = {}  # alias -> name of the model
        self.missing: Collection[tuple[str, str]] = ()
        """Names of configured models and revisions that cannot be read here."""
        self._leaving: dict[Revision, asyncio.Task[None]] = {}
        self.refused = OrchestratorStats()
        """Counts of requests for unknown models."""
        self._left: dict[tuple[str, str], OrchestratorStats] = {}  # counts of former revisions
        self.become(revisions)

    @classmethod
    def of(cls, model: ServedModel, peers: Peers, grammars: GrammarCheck | None = None) -> Catalog:
        """Return the catalog of one model with these pods."""
        return Catalog([Revision(model, peers, grammars=grammars)])

    def __iter__(self) -> Iterator[Revision]:
        return (revision for revisions in self._models.values() for revision in revisions)

    @property
    def models(self) -> Mapping[str, list[Revision]]:
        """The revisions of each model by its name."""
        return self._models

    @property
    def leaving(self) -> Iterable[Revision]:
        """Revisions no longer served, while their last requests run."""
        return self._leaving.keys()

    @property
    def all(self) -> Iterable[Revision]:
        """Served revisions, and leaving ones."""
        return (*self, *self._leaving)

    @property
    def max_request_bytes(self) -> int:
        """Bytes of the longest valid request."""
        return max(revision.model.most_request for revision in self)

    def counts(self) -> dict[tuple[str, str], OrchestratorStats]:
        """Return the counts of all requests, by the names of model and revision. Former revisions are included: a
        counter must never decrease."""
        found = defaultdict(list, {NOWHERE: [self.refused]})
        for key, stats in (*self._left.items(), *((revision.key, revision.stats) for revision in self.all)):
            found[key].append(stats)
        return {key: OrchestratorStats.summed(counts) for key, counts in found.items()}

    async def start(self) -> None:
        await asyncio.gather(*(revision.start() for revision in self))

    async def close(self) -> None:
        """Free all resources; called after the last session."""
        for task in self._leaving.values():
            task.cancel()
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)
        await asyncio.gather(*(revision.close() for revision in self.all))

    def become(self, revisions: Iterable[Revision]) -> None:
        """Replace the served revisions. Running requests of removed revisions continue."""
        before = set(self)
        self._models = {}
        for revision in revisions:
            self._models.setdefault(revision.model.name, []).append(revision)
        self._aliases = {alias: revision.model.name for revision in self for alias in revision.model.aliases}
        for gone in before - set(self):
            self._leaving[gone] = asyncio.create_task(self._leave(gone))

    def choose(self, request: generation_pb2.GenerateRequest) -> Revision:
        """Pick the revision for a request: the one named, or the one that started a resumed text, or one drawn by
        share.

        UnknownModelError if the name is unknown, InvalidRequestError if there are several models and no name,
        PeerLostError if the model is configured but cannot be read here.
        """
        asked = self._aliases.get(request.model, request.model)
        if (named := self._named(asked)) is not None:
            return named
        revisions = self._of_model(asked)
        if len(revisions) == 1:
            return revisions[0]
        begun = [
            revision
            for revision in revisions
            if request.model_fingerprint and revision.readiness.knows(request.model_fingerprint)
        ]
        return begun[0] if begun else by_share(revisions, point_of(request))

    def main(self, model: str) -> Revision:
        """Return the revision that a call without generation uses: the one named, or the model's revision with the
        largest share. Raise the errors of `choose`."""
        asked = self._aliases.get(model, model)
        return self._named(asked) or largest(self._of_model(asked))

    def _named(self, asked: str) -> Revision | None:
        """Return the revision requested by its own name; None if a model is requested."""
        name, _, revision = asked.rpartition(SEPARATOR)
        if asked in self._models or name not in self._models:
            return None
        for known in self._models[name]:
            if known.name == revision:
                return known
        if (name, revision) in self.missing:
            raise _cannot_be_read(asked)
        raise UnknownModelError(
            f"model: is {echo(asked)}, must be one of {_listed(known.asked_as or name for known in self._models[name])}"
        )

    def _of_model(self, asked: str) -> list[Revision]:
        """Return the revisions of the requested model; an empty name means the only model."""
        missing = {name for name, _ in self.missing}
        models = self._models.keys() | missing
        if not asked and len(models) > 1:
            raise InvalidRequestError([("model", f"is empty, must be one of {_listed(sorted(models))}")])
        asked = asked or next(iter(models))
        found = self._models.get(asked, [])
        without_share = asked in missing and not any(revision.share for revision in found)
        if without_share or (not found and asked in map(SEPARATOR.join, self.missing)):
            raise _cannot_be_read(asked)
        if not found:
            raise UnknownModelError(
                f"model: is {echo(asked)}, must be one of {_listed([*self._models, *self._aliases])}"
            )
        return found

    async def _leave(self, revision: Revision) -> None:
        await revision.until_idle()
        try:
            await revision.close()
        finally:
            del self._leaving[revision]
            key, stats = revision.key, revision.stats
            self._left[key] = OrchestratorStats.summed((self._left[key], stats)) if key in self._left else stats


def _cannot_be_read(asked: str) -> PeerLostError:
    """Return the error for a configured model that cannot be read here: another orchestrator may serve it."""
    problem = f"model: {echo(asked)} is configured, but this orchestrator cannot read its directory"
    return PeerLostError(problem, "MODEL_UNREADABLE")


def largest(revisions: Iterable[Revision]) -> Revision:
    return max(revisions, key=lambda revision: revision.share)


def _listed(names: Iterable[str]) -> str:
    all = list(names)
    shown = ", ".join(map(repr, all[:NAMED]))
    return shown if len(all) <= NAMED else f"{shown} and {len(all) - NAMED} more"


def point_of(request: generation_pb2.GenerateRequest) -> float:
    """Return the point of a request in [0, 1): a hash of seed and prompt if it has a seed, else random."""
    if not request.sampling.HasField("seed"):
        return random.random()
    seed = request.sampling.seed.to_bytes(8, "little")
    # 53 bits, the precision of a float: the quotient is exact, and below 1.
    return float(int.from_bytes(hashlib.sha256(seed + _ends(request)).digest()[:8], "little") >> 11) / 2**53


def _ends(request: generation_pb2.GenerateRequest) -> bytes:
    """Return the beginning, the end and the length of a prompt, as bytes. The prompt is not validated yet, and may be
    megabytes long."""
    match request.WhichOneof("prompt"):
        case "text":
            length, part = len(request.text), (request.text[:PART] + request.text[-PART:]).encode()
        case "tokens":
            ids = request.tokens.ids
            length, part = len(ids), array("I", [*ids[:PART], *ids[-PART:]]).tobytes()
        case "chat":
            turns = [turn.content for turn in request.chat.messages[:TURNS] + request.chat.messages[-TURNS:]]
            length = len(request.chat.messages) + sum(map(len, turns))
            part = "\0".join(turn[:PART] + turn[-PART:] for turn in turns).encode()
        case _:
            length, part = 0, b""
    return length.to_bytes(8, "little") + part


def by_share(revisions: Sequence[Revision], point: float) -> Revision:
    """Return the revision at a point of [0, 1), which is divided among the revisions by share. The part of a revision
    that is not ready is divided among the others by share, unless none is ready. At least one revision must have a
    share above 0."""
    left = [revision for revision in revisions if revision.share > 0]
    first = None
    while left:
        chosen, point = _at(left, point)
        if chosen.ready:
            return chosen
        first = first or chosen
        left.remove(chosen)
    assert first is not None
    return first


def _at(revisions: Sequence[Revision], point: float) -> tuple[Revision, float]:
    """Return the revision at a point, and the point's place within that revision's part."""
    wanted = point * sum(revision.share for revision in revisions)
    for revision in revisions:
        if wanted < revision.share:
            break
        wanted -= revision.share
    return revision, min(max(wanted / revision.share, 0.0), BELOW_ONE)  # rounding errors must not leave [0, 1)
