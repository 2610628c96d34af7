"""The properties of a served model that requests depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from orchestrator.requests.reasoning import Reasoning, marks_of
from orchestrator.requests.tool_recognition import format_of
from specdec.engine.model_directory import ModelDirectory
from specdec.text.generation_defaults import NEUTRAL, GenerationDefaults
from specdec.text.tokenizer import Tokenizer
from specdec.wire.tool_formats import ToolFormat


@dataclass(frozen=True)
class ServedModel:
    """A model served by this orchestrator, as of one revision."""

    name: str
    tokenizer: Tokenizer
    tokenizer_fingerprint: str
    context: int
    vocabulary: int
    end_tokens: frozenset[int]
    defaults: GenerationDefaults = NEUTRAL
    aliases: tuple[str, ...] = ()  # further names in requests

    @classmethod
    def of(cls, directory: ModelDirectory, *names: str, chat_template: Path | None = None) -> Self:
        """Read a model directory; ModelDirectoryError if its tokenizer, chat template or generation defaults cannot be
        used. Without `names`, the model is named after the directory. `chat_template`: a file that replaces the model's
        chat templates."""
        name, *aliases = dict.fromkeys(names or (directory.name,))
        model = cls(
            name=name,
            tokenizer=Tokenizer(directory, chat_template),
            tokenizer_fingerprint=directory.tokenizer_fingerprint,
            context=directory.context,
            vocabulary=directory.vocabulary,
            end_tokens=directory.end_tokens,
            defaults=GenerationDefaults.of(directory),
            aliases=tuple(aliases),
        )
        _ = model.tool_format  # computed before requests arrive: rendering templates takes tens of milliseconds
        return model

    @cached_property
    def text_fingerprint(self) -> str:
        """SHA-256, in hex, over everything that decides how a request becomes tokens: orchestrators with equal
        fingerprints treat requests the same."""
        decides = [self.tokenizer.fingerprint, sorted(self.end_tokens), self.defaults.used]
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()

    @cached_property
    def takes_tools(self) -> bool:
        """True if the model's chat template supports tools."""
        templates = self.tokenizer.chat_templates
        return templates is not None and templates.takes_tools

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes tool calls; None if its chat template writes none, or uses an unknown format."""
        return format_of(self.tokenizer)

    @cached_property
    def tool_tokens(self) -> Mapping[str, int]:
        """Special tokens among the marks of the tool format, by mark. The text shows them if the request has tools."""
        marks = () if self.tool_format is None else self.tool_format.marks
        found = {mark: self.tokenizer.special_token(mark) for mark in marks}
        return {mark: token for mark, token in found.items() if token is not None}

    @cached_property
    def reasoning_marks(self) -> Reasoning | None:
        """The tokens around the model's reasoning; None if it does not reason, or uses unknown marks."""
        return marks_of(self.tokenizer)

    @property
    def most_text(self) -> int:
        """Upper bound in bytes on a text within the context: a longer one is refused without tokenising it."""
        return self.context * self.tokenizer.longest_token

    @property
    def most_request(self) -> int:
        """Upper bound in bytes on a valid request, the sum of:

        - the longest text
        - 30 bytes for each token of the context: 5 for each prompt token (up to four contexts before truncation), or
          about 10 around each chat turn; and 5 for each resumed token
        - 10 bytes for each token id, which may be both banned and allowed
        - 512 KiB for all other fields"""
        return self.most_text + 30 * self.context + 10 * self.vocabulary + (512 << 10)
