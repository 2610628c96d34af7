"""Sampling parameters of a request: the given ones, the model's defaults, and the tokens that may not be chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from orchestrator.requests.model import ServedModel
from specdec.decoding.sampling import NUMBERS, Sampling
from specdec.serving.validation import MAX_BANNED_SEQUENCE_TOKENS, token_violations
from specdec.text.generation_defaults import NEUTRAL, GenerationDefaults
from specdec.v2 import generation_pb2, model_pb2

MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256
"""Maximum bad words, and characters of each: all are tokenised."""


def defaults_for(message: generation_pb2.GenerateRequest, model: ServedModel) -> GenerationDefaults:
    """Return the defaults for fields the request leaves open."""
    if message.ignore_generation_config:
        return NEUTRAL
    contrastive = message.rule == model_pb2.ACCEPTANCE_RULE_CONTRASTIVE
    return model.defaults.for_contrast() if contrastive else model.defaults


def sampling_of(
    message: generation_pb2.GenerateRequest,
    model: ServedModel,
    defaults: GenerationDefaults,
    violations: list[tuple[str, str]],
) -> Sampling:
    """Return the sampling parameters of a request, except the seed; faults are appended to `violations`."""
    asked, default = message.sampling, _with_fallback(defaults, message)

    def of(field: str) -> Any:
        return getattr(asked if asked.HasField(field) else default, field)  # type: ignore[arg-type]

    given = Sampling(
        logit_bias=dict(asked.logit_bias),
        banned_tokens=frozenset(asked.banned_tokens),
        **{name: of(name) for name in NUMBERS},
    )
    return _with_bans(given, asked, model, violations)


def _with_fallback(defaults: GenerationDefaults, message: generation_pb2.GenerateRequest) -> Sampling:
    """Return the defaults, with the request's fallback temperature if the model has none. CONTRASTIVE does not
    sample."""
    default, contrastive = defaults.sampling, message.rule == model_pb2.ACCEPTANCE_RULE_CONTRASTIVE
    named = defaults.greedy or default.temperature
    if named or contrastive or not message.HasField("fallback_temperature"):
        return default
    return replace(default, temperature=message.fallback_temperature)


def _with_bans(
    sampling: Sampling,
    asked: generation_pb2.SamplingParameters,
    model: ServedModel,
    violations: list[tuple[str, str]],
) -> Sampling:
    """Return the sampling parameters with the bans that follow from `allowed_tokens` and `bad_words`; faults are
    appended to `violations`."""
    allowed = list(asked.allowed_tokens)
    violations += token_violations("sampling.allowed_tokens", allowed, model.vocabulary)
    banned = set(sampling.banned_tokens)
    if allowed:
        banned |= set(range(model.vocabulary)).difference(allowed)
    sequences: set[tuple[int, ...]] = set()
    for index, word in enumerate(asked.bad_words):
        field = f"sampling.bad_words[{index}]"
        bare = word.lstrip()
        if not bare or len(word) > MAX_BAD_WORD_CHARACTERS:
            problem = f"has {len(word)} characters, must have 1 to {MAX_BAD_WORD_CHARACTERS}, not only white space"
            violations.append((field, problem))
            return sampling
        for tokens in _spellings(model, bare):
            if not 0 < len(tokens) <= MAX_BANNED_SEQUENCE_TOKENS:
                problem = f"is {len(tokens)} tokens of this model, must be 1 to {MAX_BANNED_SEQUENCE_TOKENS}"
                violations.append((field, problem))
                return sampling
            if max(tokens) >= model.vocabulary:  # not a token of the model, so it is never chosen
                continue
            if len(tokens) == 1:
                banned.update(tokens)
            else:
                sequences.add(tokens)
    needed = frozenset(tokens for tokens in sequences if tokens[-1] not in banned)
    return replace(sampling, banned_tokens=frozenset(banned), banned_sequences=needed)


def _spellings(model: ServedModel, word: str) -> Iterator[tuple[int, ...]]:
    """Yield a word's tokens alone, after a space, and after a line break. Tokenizers such as Llama 2's put a space
    before a text. The tokens after a line break then equal those after a bracket, unlike those of the word alone."""

    def encode(text: str) -> tuple[int, ...]:
        return tuple(model.tokenizer.encode(text, special=False))

    yield encode(word)
    yield encode(f" {word}")
    before, both = encode("\n"), encode(f"\n{word}")
    if before != both[: len(before)]:  # the tokenizer joins them, or strips line breaks
        return
    yield both[len(before) :]
