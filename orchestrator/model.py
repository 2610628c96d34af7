"""The model that an orchestrator serves, as far as requests depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """The model this orchestrator serves."""

    name: str
    tokenizer: Tokenizer
    tokenizer_fingerprint: str
    context: int
    vocabulary: int
    end_tokens: frozenset[int]

    @property
    def most_text(self) -> int:
        """Bytes of text that the context may hold: a longer text is refused before it is looked at."""
        return self.context * self.tokenizer.longest_token

    @property
    def most_request(self) -> int:
        """Bytes of the longest request that can be valid: text, or tokens of 5 bytes each and as many to resume, turns
        of a chat with some 10 bytes around each, a ban of every token, and 256 KiB for all the rest."""
        return self.most_text + 20 * self.context + 5 * self.vocabulary + (256 << 10)
