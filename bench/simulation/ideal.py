"""An idealised schedule with latency: drafts know everything that can reach them in time, and policies are perfect.

All sessions step together, so one stands for all, with its share of the drafts' rows. The draft always computes the
pending nodes of highest path probability, `width` at a time. Verify results and candidates take two hops each. A step
begins a fixed pause after the last one, with all arrived candidates that are worth their rows at the current rate. The
best of several widths and pauses counts.

This is not a bound: pauses that depend on the trees may do better. The services' limits of depth, width and nodes,
errors of estimates, and the send timer are left out.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count, product

from bench.simulation.devices import Hardware
from bench.simulation.language import Language

WIDTHS = (1, 2, 4, 16)
PAUSES = (0, 2, 4)
"""Pauses between two steps of the target, in multiples of a draft step's duration. A pause above 0 is longer by the
travel time of a verify result to the draft and of the candidates back."""

TRIAL, MEASUREMENT = 300, 2400
"""Steps of a trial and of the measurement. A short trial picks the schedule, and other texts measure it: the maximum of
several noisy figures would be biased upwards."""

SETTLING = 50
"""Uncounted steps at the start."""

MIN_PATH_PROBABILITY = 1e-3
"""Minimum path probability of computed or verified nodes, however cheap they are."""

SMOOTHING = 0.1


@dataclass(eq=False)
class Text:
    """A node. `apply` creates its children, (logprob, node) by rank. The draft sees them once the node is computed
    (`read`), the target from the time `arrived` on. `next` is the rank of the child that the target chooses, or the
    number of children if it chooses none of them."""

    children: list[tuple[float, Text]] = field(default_factory=list)
    next: int = -1
    read: bool = False
    arrived: float = math.inf


class Reader:
    """The draft of the idealised schedule."""

    def __init__(self, language: Language, seed: int) -> None:
        self._random = random.Random(seed)
        self._kinds = [[p for p in kind.tolist() if p > MIN_PATH_PROBABILITY] for kind in language.kinds]
        self._shares = language.shares.tolist()
        self._order = count()
        self._unread: list[tuple[float, int, Text]] = []

    def follow(self, root: Text) -> None:
        """Continue from this root: the nodes below it that are not read yet become the frontier."""
        self._unread.clear()
        pending = [(0.0, root)]
        while pending:
            reach, node = pending.pop()
            if node.read:
                pending += [(reach + score, child) for score, child in node.children]
            else:
                self._push(reach, node)

    def read(self, width: int, arrives: float) -> None:
        """Take one step, which computes up to `width` nodes; the target has their children at `arrives`."""
        batch = [heapq.heappop(self._unread) for _ in range(min(width, len(self._unread)))]
        for negative_reach, _, node in batch:
            self.apply(node)
            node.read, node.arrived = True, arrives
            for score, child in node.children:
                self._push(score - negative_reach, child)

    def apply(self, node: Text) -> None:
        """Choose the continuation of a text, once."""
        if node.next >= 0:
            return
        (probabilities,) = self._random.choices(self._kinds, self._shares)
        node.children = [(math.log(p), Text()) for p in probabilities]
        node.next, draw = 0, self._random.random()
        while node.next < len(probabilities) and draw >= probabilities[node.next]:
            draw -= probabilities[node.next]
            node.next += 1

    def _push(self, reach: float, node: Text) -> None:
        if reach > math.log(MIN_PATH_PROBABILITY):
            heapq.heappush(self._unread, (-reach, next(self._order), node))


def _worth(root: Text, now: float, price: float) -> Iterator[Text]:
    """Yield arrived candidates with path probability of at least `price`."""
    least = math.log(max(price, MIN_PATH_PROBABILITY))
    pending = [(0.0, root)]
    while pending:
        reach, node = pending.pop()
        if node.arrived <= now:
            for score, child in node.children:
                if reach + score >= least:
                    yield child
                    pending.append((reach + score, child))


def _verdict(reader: Reader, root: Text, offered: set[int]) -> tuple[int, Text]:
    """Return (tokens committed, the new root) of a step over candidates with these ids."""
    node, tokens = root, 0
    while True:
        tokens += 1
        reader.apply(node)
        if node.next == len(node.children):
            return tokens, Text()
        node = node.children[node.next][1]
        if id(node) not in offered:
            return tokens, node


def lockstep(
    language: Language,
    hardware: Hardware,
    sessions: int,
    drafts: int,
    delay: float,
    *,
    width: int,
    pause: int,
    steps: int,
) -> float:
    """Return tokens a second. `width`: rows of one session in a step of its draft; `pause`: as in PAUSES."""
    reader, root = Reader(language, seed=steps), Text()
    reader.follow(root)
    target, draft_step, hops = hardware.target, hardware.draft.seconds(width * sessions / drafts), 2 * delay
    wait = pause * draft_step + (2 * hops if pause else 0.0)
    now, draft_now = 0.0, 0.0
    mean, price = 0.0, MIN_PATH_PROBABILITY  # mean candidates of a session and step; break-even probability of one more
    counted, since = 0, 0.0
    results: deque[tuple[float, Text]] = deque()  # on their way to the draft
    for step in range(steps):
        offered = {id(node) for node in _worth(root, now, price)}
        mean += SMOOTHING * (len(offered) - mean)
        rows = sessions * (1.0 + mean)
        now += target.seconds(rows)
        tokens, root = _verdict(reader, root, offered)
        results.append((now + hops, root))
        now += wait
        counted += tokens
        if step == SETTLING:
            counted, since = 0, now
        rate = sessions * counted / (now - since) if now > since else sessions / target.seconds(sessions)
        price = rate * (target.seconds(rows + 1.0) - target.seconds(rows))
        while draft_now + draft_step <= now:
            while results and results[0][0] <= draft_now:
                reader.follow(results.popleft()[1])
            draft_now += draft_step
            reader.read(width, draft_now + hops)
    return sessions * counted / (now - since)


@cache
def ideal(language: Language, hardware: Hardware, sessions: int, drafts: int, delay: float) -> float:
    """Return tokens a second of the best of these schedules, plain decoding among them."""
    plain = sessions / hardware.target.seconds(sessions)
    if not drafts:
        return plain
    schedule = partial(lockstep, language, hardware, sessions, drafts, delay)
    width, pause = max(product(WIDTHS, PAUSES), key=lambda wp: schedule(width=wp[0], pause=wp[1], steps=TRIAL))
    return max(plain, schedule(width=width, pause=pause, steps=MEASUREMENT))
