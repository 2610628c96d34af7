"""Counts of messages and outcomes, by kind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import grpc

BAD = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})
"""Statuses that mean a bug in the service; no input may provoke them."""

OURS = "Internal error from Core"
"""The message of grpc's client for a call with a failed write: the service's status is lost."""

NAMES = {code.value[0]: code.name for code in grpc.StatusCode}


@dataclass
class Tally:
    """Counts messages, calls and statuses."""

    messages: Counter[str] = field(default_factory=Counter)  # by method or kind of attack
    frames: int = 0  # in messages of the multiplexer
    attacks: Counter[str] = field(default_factory=Counter)
    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)  # by (method, status)
    broken: Counter[str] = field(default_factory=Counter)  # BAD statuses, by method and details
    examples: dict[str, str] = field(default_factory=dict)  # the first attack that caused each
    longest: tuple[int, str] = (0, "")  # longest details of a status: length in bytes, and their source

    def sent(self, kind: str) -> None:
        self.messages[kind] += 1

    def ended(self, method: str, status: str, details: str, attack: str) -> None:
        """Count the end of a call, or of a multiplexed stream."""
        status = "(lost here)" if details == OURS else status
        self.statuses[method, status] += 1
        self.longest = max(self.longest, (len(details.encode()), method))
        if status in BAD:
            what = f"{method} {status}: {details[:60]}"
            self.broken[what] += 1
            self.examples.setdefault(what, f"{attack}: {details[:300]}")

    @property
    def total(self) -> int:
        """Number of messages and raw pieces sent."""
        return self.messages.total()

    def report(self) -> str:
        """Return a table of statuses by method, with the other counts."""
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
