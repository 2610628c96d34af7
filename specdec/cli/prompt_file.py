"""A file of prompts: one JSON object per line, with `text`, `tokens` or `messages`, and optional options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from specdec.client import GenerateOptions, build_request

FORMS = ("text", "tokens", "messages")

OPTIONS = GenerateOptions.__annotations__.keys() - {
    *FORMS,
    *("n", "logprobs", "prompt_logprobs"),  # a result holds one sample, without log-probabilities
    *("generated_tokens", "model_fingerprint"),  # the client resumes broken texts itself
    *("rejected_candidates", "return_prompt_token_ids"),  # a result has neither
}
"""Options allowed on a line."""


class PromptFileError(ValueError):
    """The file cannot be used; the message names file and line, and the problem."""


_GRAMMARS = {"json_schema", "regex", "lark", "choice"}
REPLACED = (
    ({"speculation", "drafters"}, {"speculation", "drafters"}),
    ({"lookahead", "jacobi"}, {"lookahead", "jacobi"}),
    (_GRAMMARS, {*_GRAMMARS, "grammar_after_token"}),
)
"""Options that exclude each other: a line that sets one of a first set ignores the command's options of its second."""

OF_A_RULE = {
    **dict.fromkeys(("alpha", "amateur_temperature"), "contrastive"),
    **dict.fromkeys(("typical_epsilon", "typical_delta"), "typical"),
}
"""Options of one rule: a line with another rule ignores the command's."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file."""

    line: int
    text: str | None
    options: Mapping[str, Any]  # the line's and the command's, including `tokens` and `messages`

    @property
    def digest(self) -> str:
        """First half of the SHA-256, in hex, of this prompt and its options; `--resume` matches results by it."""
        content = json.dumps([self.text, dict(self.options)], sort_keys=True, default=str)
        return hashlib.sha256(content.encode()).hexdigest()[:32]


class PromptFile:
    """The prompts of a file. Every iteration reads it line by line, so that memory does not depend on its size."""

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        """`options` apply to all prompts that do not set them. Only `prompts` reads the file."""
        self.path = path
        self._options = {name: value for name, value in options.items() if value is not None}

    def prompts(self) -> Iterator[Prompt]:
        """Yield the prompts in order, skipping empty lines; PromptFileError at the first invalid line."""
        if self.path.exists() and not self.path.is_file():
            raise PromptFileError(f"{self.path}: is not a file")
        try:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield self._prompt(number, line.removeprefix(b"\xef\xbb\xbf"))
        except OSError as error:
            raise PromptFileError(f"{self.path}: {error.strerror}") from error

    def _prompt(self, number: int, line: bytes) -> Prompt:
        try:
            return self._parsed(number, line)
        except UnicodeDecodeError:
            what = "is not UTF-8 text"
        except json.JSONDecodeError as error:
            what = f"is not JSON: {error.msg}, at character {error.pos + 1}"
        except RecursionError:
            what = "is nested too deeply"
        except (ValueError, TypeError) as error:
            what = str(error)
        raise PromptFileError(f"{self.path}:{number}: {what}")

    def _parsed(self, number: int, line: bytes) -> Prompt:
        entry = json.loads(line.decode())
        if not isinstance(entry, dict) or sum(entry.get(form) is not None for form in FORMS) != 1:
            raise ValueError("must be an object with one of `text`, `tokens`, `messages`")
        unknown = entry.keys() - OPTIONS - {*FORMS}
        if unknown:
            names = ", ".join(f"`{name}`" for name in sorted(unknown))
            raise ValueError(f"{names} cannot be set on a line, must be one of {', '.join(sorted(OPTIONS))}")
        options = dict(self._options)
        for chosen, replaced in REPLACED:
            if any(entry.get(name) is not None for name in chosen):  # the line takes precedence
                options = {name: value for name, value in options.items() if name not in replaced}
        if (rule := entry.get("rule")) is not None:
            options = {name: value for name, value in options.items() if OF_A_RULE.get(name, rule) == rule}
        options |= {name: value for name, value in entry.items() if value is not None and name != "text"}
        if "logit_bias" in options and isinstance(options["logit_bias"], dict):
            options["logit_bias"] = {int(token): bias for token, bias in options["logit_bias"].items()}
        if isinstance(options.get("time"), str):
            options["time"] = datetime.fromisoformat(options["time"])
        if not isinstance(entry.get("text", ""), str):
            raise TypeError(f"text = {entry['text']!r}: must be a string")
        build_request(entry.get("text"), **options)  # report invalid values before any request is sent
        return Prompt(number, entry.get("text"), options)
