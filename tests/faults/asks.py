"""The requests of these tests: all kinds, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from string import ascii_lowercase
from typing import Any

from specdec.decoding.noise import sample_seed
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from tests.models import tokenizer

CONTEXT = 1024
"""Context of the served models: room for texts long enough to be interrupted."""

_ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "kind": {"enum": ["function", "class"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    {"regex": "([a-z]{1,6}[,.] ){120,}", "ignore_end_token": False},
    {"top_p": 0.9, "top_k": 40},
    {"logprobs": 2},
    {"json_schema": {"type": "array", "items": _ITEM, "minItems": 30}, "ignore_end_token": False},
    {"ignore_end_token": False, "min_tokens": 60},
    {"ignore_end_token": False, "stop": ["q7", "zu", "K"], "presence_penalty": 0.5},
)
_SAMPLING = {"temperature", "top_p", "top_k", "repetition_penalty", "frequency_penalty", "presence_penalty", "seed"}


@dataclass(frozen=True)
class Ask:
    prompt: tuple[int, ...]
    options: dict[str, Any] = field(hash=False)

    @property
    def repeatable(self) -> bool:
        """Whether every run gives the same tokens."""
        return self.options.get("rule") != "rejection" or not self.options["temperature"]

    @property
    def sampler(self) -> RequestSampler:
        sampling = {name: value for name, value in self.options.items() if name in _SAMPLING}
        return RequestSampler(Sampling(**(sampling | {"seed": sample_seed(self.options["seed"], 0)})))


def asks(count: int, seed: int, *, tokens: tuple[int, int] = (100, 300), **options: Any) -> list[Ask]:
    """Return `count` requests of all kinds, alternating temperatures 0 and 0.8; `tokens` bounds their lengths."""
    generator = random.Random(seed)
    made = []
    for number in range(count):
        letters = "".join(generator.choices(ascii_lowercase, k=generator.choice((1, 8, 30, 90))))
        prompt = tuple(tokenizer().encode(letters).ids)  # ASCII: a partial character would change the text's first one
        own = {
            "temperature": 0.8 * (number % 2),
            "seed": generator.getrandbits(64),
            "max_tokens": generator.randint(*tokens),
            "ignore_end_token": True,
        }
        made.append(Ask(prompt, own | _KINDS[number // 2 % len(_KINDS)] | options))
    return made
