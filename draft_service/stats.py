"""Statistics of a draft service: how busy it is, and how much of what it proposes is right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DraftStats:
    """Counters of a draft service; the draft loop's thread writes them, any thread reads them."""

    busy: float = 0.0  # seconds spent in steps
    committed: int = 0  # tokens that became final in sessions
    guessed: int = 0  # those of them that stood in the session's tree before
    sent: int = 0  # candidates in messages, repeated ancestors included
    messages: int = 0
