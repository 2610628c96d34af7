"""Statistics of a draft service: its load, and the accuracy of its proposals."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DraftStats:
    """Counters of a draft service; written by the draft loop's thread, read by any."""

    busy: float = 0.0  # seconds spent in steps
    committed: int = 0  # tokens committed in sessions
    guessed: int = 0  # committed tokens found in the session's tree
    sent: int = 0  # candidates in messages, repeated ancestors included
    messages: int = 0
