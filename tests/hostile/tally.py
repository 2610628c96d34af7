"""What was sent and how it ended, by kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import grpc

BAD = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})
"""Statuses that say that a service is broken, which nothing that a caller sends may do."""

OURS = "Internal error from Core"
"""What grpc's client says of a call in which a write failed: the status that the service gave is lost."""

NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass
class Tally:
    """Counts messages, calls and statuses."""

    messages: Counter[str] = field(default_factory=Counter)  # by method or kind of attack
    frames: int = 0  # in messages of the multiplexer
    attacks: Counter[str] = field(default_factory=Counter)
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (method, status)
    broken: Counter[str] = field(default_factory=Counter)  # BAD statuses, by method and what was said
    examples: dict[str, str] = field(default_factory=dict)  # of each, the first attack that brought it
    longest: tuple[int, str] = (0, "")  # what was said with a status: its length in bytes, and by whom

    def sent(self, kind: str) -> None:
        self.messages[kind] += 1

    def ended(self, method: str, status: str, details: str, attack: str) -> None:
        """A call, or a stream of the multiplexer, ended with a status."""
        status = "(lost here)" if details == OURS else status
        self.statuses[method, status] += 1
        self.longest = max(self.longest, (len(details.encode()), method))
        if status in BAD:
            what = f"{method} {status}: {details[:60]}"
            self.broken[what] += 1
            self.examples.setdefault(what, f"{attack}: {details[:300]}")

    @property
    def total(self) -> int:
        """Messages sent, and pieces of raw bytes."""
        return self.messages.total()

    def report(self) -> str:
        """A table of statuses by method, and what was counted besides."""
        columns = sorted({status for _, status in self.statuses})
        lines = [f"{self.total} messages ({self.frames} frames in them), {self.attacks.total()} attacks"]
        lines.append(f"{'method':24} {'messages':>8} " + " ".join(f"{name[:12]:>12}" for name in columns))
        for method in sorted(self.messages | Counter(method for method, _ in self.statuses)):
            counts = " ".join(f"{self.statuses[method, name] or '':>12}" for name in columns)
            lines.append(f"{method:24} {self.messages[method]:8} {counts}")
        lines.append("attacks: " + ", ".join(f"{name} {count}" for name, count in sorted(self.attacks.items())))
        lines.append(f"longest message of a status: {self.longest[0]} bytes, {self.longest[1]}")
        lines += [f"BROKEN {count} x {what}; as in {self.examples[what]}" for what, count in self.broken.most_common()]
        return "\n".join(lines)
