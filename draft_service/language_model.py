"""A language model as a drafter: one forward pass expands the most probable nodes of all sessions.

From its opening a session owns KV slots for its longest text and its maximum number of nodes. When a commit follows the
tree, the nodes' slots become the text's without a copy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from draft_service.children import Computed, chosen, give
from draft_service.drafter import Drafter, ExpansionError
from draft_service.pass_times import PassTimes, Width
from draft_service.session import DrafterSession, RootMove
from draft_service.translation import Translation
from specdec.decoding.candidates import QueriedRow
from specdec.decoding.sampling import Rule
from specdec.decoding.tree import Node
from specdec.engine.batch import Packer
from specdec.engine.engine import DraftPass, Engine, draft_pass_of
from specdec.engine.kv.slots import KVPool, Slots
from specdec.engine.model_directory import MAX_CONTEXT
from specdec.engine.probe import EngineProbe
from specdec.serving.fair_turns import SharedBudget


class SessionSlots:
    """The slots of one session, enough for its text and its maximum number of nodes. `text[i]` is the slot of the token
    at position i; `nodes` maps every computed node to its slot."""

    def __init__(self, slots: Slots) -> None:
        self.all = slots
        self.nodes: dict[Node, int] = {}
        self.computed = 0  # number of text tokens with a slot
        self._text = np.empty(len(slots), dtype=np.int64)
        self._free = slots[::-1].tolist()  # popped in ascending order: contiguous texts are read without a copy

    @property
    def text(self) -> Slots:
        """A view, not a copy: every pass reads the slots of the whole text."""
        return self._text[: self.computed]

    def add_text(self, count: int) -> Slots:
        """Take slots for the next `count` tokens of the text and return them."""
        begin, self.computed = self.computed, self.computed + count
        self._text[begin : self.computed] = [self._free.pop() for _ in range(count)]
        return self._text[begin : self.computed]

    def add_node(self, node: Node) -> int:
        slot: int = self._free.pop()
        self.nodes[node] = slot
        return slot

    def remove(self, text: int, nodes: Sequence[Node]) -> None:
        """Free the slots of the last `text` tokens and of these nodes, after a failed pass."""
        if text:
            self._free += self.text[-text:].tolist()
            self.computed -= text
        self._free += [self.nodes.pop(node) for node in nodes if node in self.nodes]

    def follow_root(self, followed: Sequence[Node], alive: Collection[Node]) -> None:
        """Move slots of `followed` nodes to the text, up to the first uncomputed one; free the slots of nodes not
        `alive`."""
        for node in followed:
            if node not in self.nodes:
                break
            self._text[self.computed] = self.nodes.pop(node)
            self.computed += 1
        self._free += [self.nodes.pop(node) for node in [node for node in self.nodes if node not in alive]]


class ModelSession:
    """A session as the language model sees it. A pass computes either its pending text, whose last row expands the
    root, or its nodes.

    Without a `translation`, the model reads the tokens of the session's tree. With one, the model's text has other
    tokens, maybe more or fewer, so a node's position in the model differs from its position in the tree.
    """

    def __init__(self, session: DrafterSession, slots: Slots, translation: Translation | None = None) -> None:
        self.session = session
        self.slots = SessionSlots(slots)
        self._translation = translation
        self._text = session.tree.committed if translation is None else translated(session, translation)
        self._planned: list[Node] = []  # nodes that get logits in the planned pass
        self._wanted: list[int] = []  # their rows' indices among the logits
        self._planned_text = 0  # text tokens computed by the planned pass
        self.waiting_since = time.monotonic()  # with pending text; inf without

    @property
    def pending_text(self) -> int:
        """Committed tokens still to be computed before the session can propose anything."""
        return len(self._text) - self.slots.computed

    def fits(self, context: int) -> bool:
        """Return whether the text and the nodes below it fit the session's memory and the model's context. Only a
        translated text may exceed these."""
        if self._translation is None:
            return True
        text, room = len(self._text), len(self.slots.all) - self.session.max_nodes
        return text <= room and text + self.session.policy.deepest < context

    def commit(self, move: RootMove) -> None:
        if self._translation is not None:  # otherwise the text is the tree's own list, extended already
            self._text += self._translation.spelled(move.tokens)
        self.slots.follow_root(move.followed, move.alive)
        self.waiting_since = min(self.waiting_since, time.monotonic()) if self.pending_text else math.inf

    # --- a forward pass -----------------------------------------------------------------------------

    def plan_text(self, packer: Packer, budget: int) -> int:
        """Plan to compute pending text, at the start or after a correction, as one chain of at most `budget` rows.
        Return the number of rows."""
        start = self.slots.computed
        text = self._text[start : start + budget]
        self._planned_text = len(text)
        rows = packer.add_rows(text, start, self.slots.add_text(len(text)))
        packer.add_path(self.slots.text, rows)
        if not self.pending_text and not self.session.root_is_expanded:
            self._planned.append(self.session.take_best())
            self._wanted.append(packer.want(rows[-1]))
        return len(text)

    def plan_nodes(self, packer: Packer, most: int, break_even: float) -> int:
        """Plan to compute at most `most` nodes: the best one, which must exist, and further ones with a path logprob of
        at least `break_even`. Return the number of nodes."""
        session, slots, planned = self.session, self.slots, self._planned
        branches: list[list[int]] = []
        rows: list[int] = []
        while len(planned) < most and (not planned or -math.inf < session.best_logprob() >= break_even):
            node = session.take_best()
            planned.append(node)
            rows.append(packer.add_row(*self._read(node), slots.add_node(node)))
            branches.append([slots.nodes[ancestor] for ancestor in node.path()])
        packer.add_leaves(slots.text, branches, rows)
        self._wanted = [packer.want(row) for row in rows]
        return len(planned)

    def _read(self, node: Node) -> tuple[int, int]:
        """Return a node's token and position in the model's text."""
        if self._translation is None:
            return node.token, node.position
        return self._translation.common[node.token], node.position + len(self._text) - self.session.tree.base

    def undo_plan(self) -> None:
        """Undo the plan of a failed pass: free its slots and put its nodes back on the frontier."""
        root = self.session.tree.root
        self.slots.remove(self._planned_text, [node for node in self._planned if node is not root])
        for node in self._planned:
            self.session.put_back(node)
        self.forget_plan()

    def computed(self) -> list[Computed]:
        """Return the nodes of the planned pass with their rows of logits."""
        session, planned = self.session, zip(self._planned, self._wanted, strict=True)
        rows = [(node, QueriedRow(row, session.query(node), session.vocabulary)) for node, row in planned]
        return [Computed(session, node, row) for node, row in rows]

    def forget_plan(self) -> None:
        self._planned, self._wanted, self._planned_text = [], [], 0
        if not self.pending_text:
            self.waiting_since = math.inf


def translated(session: DrafterSession, translation: Translation) -> list[int]:
    """Return a session's committed text in the model's tokens."""
    request = session.request
    return [*request.own_prompt, *translation.spelled(session.tree.committed[len(request.prompt) :])]


SPELLED = 2
"""Draft tokens to reserve memory for, per token of a target with another tokenizer. A session whose text needs more
proposes nothing."""

PROMPT_BUDGET = 512
"""Maximum tokens of committed text in a pass."""

PAUSED_LAG_TOKENS = PROMPT_BUDGET
"""Number of pending committed tokens above which a paused draft reads some. Up to this number, a paused text costs
other sessions nothing, and a resumed draft catches up in one pass, or in a few shared passes. A pass reads at most as
many tokens, so a paused draft never reads its text to the end, which would expand the root."""

PROMPT_WIDTHS = 4
"""Rows of committed text in a pass that also expands other sessions, in multiples of the expansion width.

If the measured width is the largest of `pass_times.WIDTHS`, rows are so cheap that these at most about double the
time of a pass. Below that, no such limit holds.
"""

OLDEST_SHARE = 4
"""One in OLDEST_SHARE rows of committed text goes to the session that has waited longest."""


class LanguageModelDrafter(Drafter):
    """The drafter that runs a draft model.

    Limits of one pass: `rows` nodes over all sessions, `rows_per_session` nodes of one session, and PROMPT_BUDGET
    tokens of committed text, shortest remaining text first. The last limit is lower while other sessions wait for the
    pass. With `times`, a pass leaves out nodes that would lower its path probability per second. `translation`: for a
    target with another tokenizer; sessions then have an `own_prompt`, and the model drafts for texts of up to its
    `context`. `forward` replaces the engine's pass.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        rows: int = 16,
        rows_per_session: int = 4,
        times: PassTimes | None = None,
        translation: Translation | None = None,
        context: int = MAX_CONTEXT,
        forward: DraftPass | None = None,
    ) -> None:
        self.engine = engine
        self.times = times
        # With a translation, tokens that the draft lacks have a probability of 0, and CONTRASTIVE divides by it. For
        # TYPICAL texts, drafts are opened with COUPLED.
        self.rules = frozenset({Rule.COUPLED, Rule.REJECTION} if translation else {*Rule} - {Rule.TYPICAL})
        self._forward = forward or draft_pass_of(engine)
        self._translation = translation
        self._context = context
        self._pool = KVPool(engine.capacity)
        self._rows = rows
        self._rows_per_session = rows_per_session
        self._sessions: dict[DrafterSession, ModelSession] = {}
        self._virtual_times: dict[str, float] = {}  # virtual time (rows over weight) of tenants with sessions
        self._level = 0.0  # maximum over all passes of the smallest virtual time among their tenants
        self.rows_expanded = 0
        """Rows of the last `expand`; 0 if it had no pass."""
        self._carried = 0.0  # part of a row left over by rounding, added to the next pass that shares its limit
        self._probe = EngineProbe(engine)

    @classmethod
    def of(
        cls,
        engine: Engine,
        width: Width,
        *,
        translation: Translation | None = None,
        context: int = MAX_CONTEXT,
        forward: DraftPass | None = None,
    ) -> LanguageModelDrafter:
        """Return the drafter with the limits and times that were measured."""
        return cls(
            engine,
            rows=width.of_all,
            rows_per_session=width.of_session,
            times=PassTimes(width.seconds),
            translation=translation,
            context=context,
            forward=forward,
        )

    @property
    def slots(self) -> int:
        return self._pool.capacity - 1  # one is the padding slot

    @property
    def slots_used(self) -> int:
        return self._pool.used

    def open(self, session: DrafterSession) -> None:
        tokens = session.end
        if self._translation is not None:
            tokens = len(session.request.own_prompt) + SPELLED * (session.end - len(session.request.prompt))
        slots = self._pool.take(min(tokens, self._context) + session.max_nodes)
        self._sessions[session] = ModelSession(session, slots, self._translation)

    def commit(self, session: DrafterSession, move: RootMove) -> None:
        self._sessions[session].commit(move)

    def close(self, session: DrafterSession) -> None:
        self._pool.give(self._sessions.pop(session).slots.all)
        tenant = session.request.tenant
        if all(other.request.tenant != tenant for other in self._sessions):
            self._virtual_times.pop(tenant, None)

    def best_logprob(self, session: DrafterSession) -> float:
        """Return the base class's value, with three exceptions. A session whose text has outgrown the model gets -inf.
        A paused session gets 0 (so that its text is read, though last) if its pending text exceeds PAUSED_LAG_TOKENS,
        else -inf. A session whose root was expanded before its text was read gets 0."""
        if not self._sessions[session].fits(self._context):
            return -math.inf
        if session.policy.paused and not session.over:
            return 0.0 if self._sessions[session].pending_text > PAUSED_LAG_TOKENS else -math.inf
        if session.root_is_expanded and self._sessions[session].pending_text and not session.over:
            return 0.0  # another version has expanded the root: read the text in advance
        return session.best_logprob()

    def expand(
        self, sessions: Sequence[DrafterSession], among: Sequence[DrafterSession] = ()
    ) -> Mapping[DrafterSession, Exception]:
        """Expand as in the base class. `among`: these sessions and those of other versions, which have a pass each in
        the same step. All passes then share the limits of one by their number of sessions, so that a session gets
        equally many nodes from each version."""
        begin = time.monotonic()
        share = len(sessions) / len(among) if among else 1.0
        rows = self._rows_of(share)
        packer = self.engine.packer()
        expanding: list[ModelSession] = []
        reading: list[ModelSession] = []
        for session in sessions:
            known = self._sessions[session]
            (reading if known.pending_text else expanding).append(known)
        planned: list[ModelSession] = []
        computed: list[Computed] = []
        failed: dict[DrafterSession, Exception] = {}
        try:
            self._plan_nodes(packer, expanding, planned, self._break_even(expanding, reading, share), rows)
            if reading:
                prompt_rows = max(1, math.ceil(share * self._prompt_rows(reading, expanding)))
                for model_session, most in _shared_by_tenant(reading, prompt_rows):
                    planned.append(model_session)
                    model_session.plan_text(packer, most)
            self.rows_expanded = len(packer.tokens)
            if not planned:  # this pass's share is less than a row
                return {}
            logits = self._forward(packer.pack())
            if self._translation is not None:
                logits = self._translation.logits(logits)
            for model_session in planned:
                try:
                    computed += model_session.computed()
                except Exception as error:  # an error of one session must not end the others
                    failed[model_session.session] = error
            children = chosen(computed, logits)
        except Exception as error:  # the whole pass is void; its sessions are retried
            self._probe.pass_failed(packer.slots)
            for model_session in planned:
                model_session.undo_plan()
            raise ExpansionError([model_session.session for model_session in planned], error) from error
        for model_session in planned:
            model_session.forget_plan()
        failed |= give(children)
        if self.times is not None and len(packer.tokens) <= self._rows:  # longer passes read prompts
            self.times.observe(len(packer.tokens), time.monotonic() - begin)
        return failed

    def recover(self) -> bool:
        return self._probe.recovers()

    def _rows_of(self, share: float) -> int:
        """Return the number of rows in the next pass with a share of the limit. What is lost by rounding is carried
        over."""
        if share == 1.0:
            return self._rows
        self._carried += share * self._rows
        rows = int(self._carried)
        self._carried -= rows
        return rows

    def _break_even(self, expanding: Sequence[ModelSession], reading: Sequence[ModelSession], share: float) -> float:
        """Return the path logprob above which a further node of a session pays in the coming pass. All passes that
        share a limit count as one, with sessions like these."""
        if self.times is None:
            return -math.inf
        # The pass contains every session's best node in any case. For a session that lacks only a correction's token,
        # the best node is the root.
        best = [math.exp(session.session.best_logprob()) for session in expanding]
        best += [1.0 for session in reading if session.pending_text == 1 and not session.session.policy.paused]
        best *= round(1 / share)
        probability = self.times.break_even(best[: self._rows]) if best else 0.0
        return math.log(probability) if probability > 0 else -math.inf

    def _plan_nodes(
        self,
        packer: Packer,
        expanding: Sequence[ModelSession],
        planned: list[ModelSession],
        break_even: float,
        rows: int,
    ) -> None:
        """Plan up to `rows` nodes of a pass and append their sessions to `planned`: each session's best, and further
        ones whose path logprob reaches `break_even`. Rows are shared max-min fairly among tenants by weight, regardless
        of their session counts; within a tenant the best sessions come first."""
        tenants = _by_tenant(expanding)
        weights = {tenant: own[0].session.request.weight for tenant, own in tenants.items()}
        # Start-time fair queueing, as in the verifier's `TenantShares`: a new tenant starts at the level, and one that
        # was idle has saved up no more than the rows of a pass.
        virtual_times = {
            tenant: max(self._virtual_times.get(tenant, self._level), self._level - rows / weight)
            for tenant, weight in weights.items()
        }
        wanted = {tenant: float(self._rows_per_session * len(own)) for tenant, own in tenants.items()}
        budget, parts, left = SharedBudget(rows, weights), dict[str, float](), rows
        for tenant in budget.order(wanted):
            parts[tenant] = budget.part(tenant)
            budget.take(tenant, min(parts[tenant], wanted[tenant]))
        # Parts are rounded to whole rows and may not cover every tenant, so the least served tenants come first.
        for tenant in sorted(tenants, key=virtual_times.__getitem__):
            own, part = tenants[tenant], min(left, max(1, round(parts[tenant])))
            share, taken = max(1, min(self._rows_per_session, part // len(own))), 0
            for session in own:
                if taken < part:
                    planned.append(session)
                    taken += session.plan_nodes(packer, min(share, part - taken), break_even)
            left -= taken
            virtual_times[tenant] += taken / weights[tenant]
        self._virtual_times |= virtual_times
        self._level = max(self._level, min(virtual_times.values(), default=0.0))

    def _prompt_rows(self, reading: Sequence[ModelSession], expanding: Sequence[ModelSession]) -> int:
        """Return how many tokens of committed text a pass may compute, at most PROMPT_BUDGET.

        Readers are sessions with pending text; W is `PROMPT_WIDTHS` expansion widths.

        - By default: one row per unpaused reader, since most need only the token of a correction, plus W * max(1,
          unpaused readers / expanding sessions).
        - If expanding tenants wait for readers of other tenants: at most W rows for the first term, plus W * min(total
          weight of the other reading tenants / own weight) over these expanding tenants. So a tenant with many sessions
          cannot lengthen another's passes.
        - If no session expands: at least the shortest pending text as a whole, since no session waits for the pass.
        """
        wanted = sum(not session.session.policy.paused for session in reading)
        beside = PROMPT_WIDTHS * self._rows_per_session
        readers = {session.session.request.tenant: session.session.request.weight for session in reading}
        held_up = {session.session.request.tenant: session.session.request.weight for session in expanding}
        others = [
            sum(weight for reader, weight in readers.items() if reader != tenant) / own
            for tenant, own in held_up.items()
            if readers.keys() - {tenant}
        ]
        if others:
            rows = min(wanted, beside) + max(1, int(beside * min(others)))
        else:
            rows = wanted + max(beside, beside * wanted // max(1, len(expanding)))
        if not expanding:
            rows = max(rows, min(map(_reading_order, reading))[1])
        return min(rows, PROMPT_BUDGET)


def _by_tenant(sessions: Iterable[ModelSession]) -> dict[str, list[ModelSession]]:
    """Group sessions by tenant, keeping their order."""
    found: dict[str, list[ModelSession]] = {}
    for session in sessions:
        found.setdefault(session.session.request.tenant, []).append(session)
    return found


def _shared_by_tenant(reading: Sequence[ModelSession], rows: int) -> Iterator[tuple[ModelSession, int]]:
    """Yield the results of `_shared` for each tenant, with the rows divided among tenants by weight."""
    tenants = _by_tenant(reading)
    budget = SharedBudget(rows, {tenant: own[0].session.request.weight for tenant, own in tenants.items()})
    wanted = {tenant: float(sum(session.pending_text for session in own)) for tenant, own in tenants.items()}
    for tenant in budget.order(wanted):
        taken = 0
        for session, most in _shared(tenants[tenant], math.ceil(budget.part(tenant))):
            taken += min(most, session.pending_text)
            yield session, most
        budget.take(tenant, taken)


def _reading_order(session: ModelSession) -> tuple[bool, int]:
    """Sort key for prefill: shortest remaining first, paused sessions last."""
    return session.session.policy.paused, session.pending_text


def _shared(reading: Sequence[ModelSession], rows: int) -> Iterator[tuple[ModelSession, int]]:
    """Yield the sessions to read in a pass over `rows` rows of text, and the token limit of each. The unpaused session
    that has waited longest gets a quota, so that shorter texts cannot starve it."""
    wanted = [session for session in reading if not session.session.policy.paused]
    oldest = min(wanted, key=lambda session: session.waiting_since, default=None)
    quota = 0 if oldest is None else min(rows // OLDEST_SHARE, oldest.pending_text)
    left = rows - quota
    for session in sorted(reading, key=_reading_order):
        own = quota if session is oldest else 0
        more = min(left, session.pending_text - own)
        if own + more > 0:
            left -= more
            yield session, own + more
