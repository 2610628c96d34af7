"""The wire format: converts messages to the values that the code works with and back, and checks their contents."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from specdec.decoding.choice import RequestSampler
from specdec.decoding.lookahead import Lookahead
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.sampling import USUAL_CONTRAST, Contrast, Rule, Sampling
from specdec.decoding.speculation import Drafter
from specdec.decoding.tree import Paths
from specdec.engine.engine import Engine
from specdec.engine.model_directory import ModelDirectory
from specdec.v2 import draft_pb2, generation_pb2, model_pb2, verifier_pb2

PROTOCOL_VERSION = 2

MAX_MESSAGE_BYTES = 16 << 20

MAX_NODES_A_MESSAGE = 1024
"""Candidates in an `Extend` at most: several times what a verifier grants a session."""

LOGPROB_UNIT = 1.0 / 96.0
"""Unit of log-probabilities in messages: one is sent as the number of units in the square root of its negative. That is
fine where a child is likely, so that long paths add up right, and coarse where it is not."""


def identity_of(directory: ModelDirectory, engine: Engine, context: int) -> model_pb2.ModelIdentity:
    """Return what a pod that serves a directory says of itself; `context` is the longest text that it has room for."""
    mode = model_pb2.NUMERICS_MODE_EXACT if engine.exact else model_pb2.NUMERICS_MODE_FAST
    return model_pb2.ModelIdentity(
        protocol_version=PROTOCOL_VERSION,
        model=directory.name,
        tokenizer_fingerprint=directory.tokenizer_fingerprint,
        model_fingerprint=directory.model_fingerprint,
        numerics_fingerprint=engine.numerics,
        numerics_mode=mode,
        context_tokens=min(directory.context, context),
        vocabulary_size=directory.vocabulary,
    )


def sampling_from(message: model_pb2.Sampling) -> Sampling:
    return Sampling(
        repetition_penalty=message.repetition_penalty or 1.0,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=dict(message.logit_bias),
        banned_tokens=frozenset(message.banned_tokens),
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p or 1.0,
        min_p=message.min_p,
        seed=message.seed,
    )


def sampling_message(sampling: Sampling) -> model_pb2.Sampling:
    return model_pb2.Sampling(
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=sampling.logit_bias,
        banned_tokens=sorted(sampling.banned_tokens),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )


MAX_BIASES = 4096

MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Limits of the repetition penalty: outside of them, logits become so large or small that only the penalty would
choose."""


def size_violations(
    sampling: model_pb2.Sampling | generation_pb2.SamplingParameters, vocabulary: int
) -> list[tuple[str, str]]:
    """Return violations for sampling fields that have too many entries to be looked at one by one."""
    return [
        violation
        for violation in (
            too_many("sampling.logit_bias", len(sampling.logit_bias), MAX_BIASES, "entries"),
            too_many("sampling.banned_tokens", len(sampling.banned_tokens), vocabulary, "tokens"),
        )
        if violation is not None
    ]


def too_many(field: str, count: int, limit: int, of: str) -> tuple[str, str] | None:
    """Return the violation of a field that has more than `limit` of something; None if it has not."""
    return (field, f"has {count} {of}, must have at most {limit}") if count > limit else None


def sampling_violations(sampling: Sampling, vocabulary: int, barred: frozenset[int]) -> list[tuple[str, str]]:
    """Return (field, problem) for every field with a value outside its range, for the first such value of a field.
    `barred`: end tokens that `min_tokens` rules out at first; with the banned ones they must leave something to
    choose."""
    prefix = "sampling."
    found: list[tuple[str, str]] = []

    def check(field: str, value: float, good: bool, limit: str) -> bool:
        if not good:
            found.append((prefix + field, f"is {value:g}, must be {limit}"))
        return good

    s = sampling
    check("temperature", s.temperature, 0 <= s.temperature < math.inf, "a finite number of at least 0")
    check("top_p", s.top_p, 0 < s.top_p <= 1, "in (0, 1]")
    check("min_p", s.min_p, 0 <= s.min_p < 1, "in [0, 1)")
    least, most = MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
    # A float32 on the wire: 0.01 is a little less there.
    within = least * (1 - 1e-6) <= s.repetition_penalty <= most
    check("repetition_penalty", s.repetition_penalty, within, f"in [{least:g}, {most:g}]")
    check("frequency_penalty", s.frequency_penalty, -2 <= s.frequency_penalty <= 2, "in [-2, 2]")
    check("presence_penalty", s.presence_penalty, -2 <= s.presence_penalty <= 2, "in [-2, 2]")
    for token, bias in s.logit_bias.items():
        known = check(f"logit_bias[{token}]", token, token < vocabulary, f"keyed by a token id below {vocabulary}")
        if not (known and check(f"logit_bias[{token}]", bias, -100 <= bias <= 100, "in [-100, 100]")):
            break
    highest = max(s.banned_tokens, default=0)
    check("banned_tokens", highest, highest < vocabulary, f"a token id below {vocabulary}")
    if len(s.banned_tokens | barred) >= vocabulary:
        found.append((f"{prefix}banned_tokens", f"leaves none of the {vocabulary} tokens to choose"))
    return found


def token_violations(field: str, tokens: list[int], vocabulary: int) -> list[tuple[str, str]]:
    """Return the violation of the first token id outside the vocabulary, if there is one."""
    if max(tokens, default=0) < vocabulary:
        return []
    for index, token in enumerate(tokens):
        if token >= vocabulary:
            return [(f"{field}[{index}]", f"is {token}, must be a token id below {vocabulary}")]
    return []


MAX_END_TOKENS = 4096
"""End tokens of a session at most: those of the model and those of the request."""


def open_size_violations(
    message: verifier_pb2.VerifyOpen | draft_pb2.DraftOpen, vocabulary: int, context: int
) -> list[tuple[str, str]]:
    """Return violations for fields of a session's opening that have too many entries to be looked at one by one."""
    counts = (
        too_many("prompt_tokens", len(message.prompt_tokens), context, "tokens"),
        too_many("generated_tokens", len(message.generated_tokens), context, "tokens"),
        too_many("end_tokens", len(message.end_tokens), MAX_END_TOKENS, "tokens"),
    )
    return [violation for violation in counts if violation is not None] + size_violations(message.sampling, vocabulary)


def text_violations(
    prompt: list[int], generated: list[int], max_tokens: int, *, vocabulary: int, context: int
) -> list[tuple[str, str]]:
    """Return what is wrong with the text that a session begins with."""
    found = token_violations("prompt_tokens", prompt, vocabulary)
    found += token_violations("generated_tokens", generated, vocabulary)
    if not prompt:
        found.append(("prompt_tokens", "is empty, must hold at least 1 token"))
    length = len(prompt) + len(generated)
    if length >= context:
        found.append(("prompt_tokens", f"with generated_tokens {length} tokens, the context is {context}"))
    if max_tokens <= len(generated):
        found.append(("max_tokens", f"is {max_tokens}, must be more than the {len(generated)} generated_tokens"))
    return found


def contrast_from(message: model_pb2.Contrast) -> Contrast:
    usual = USUAL_CONTRAST
    return Contrast(
        message.alpha if message.HasField("alpha") else usual.alpha,
        message.amateur_temperature if message.HasField("amateur_temperature") else usual.amateur_temperature,
    )


RULES = {
    model_pb2.ACCEPTANCE_RULE_UNSPECIFIED: Rule.COUPLED,
    model_pb2.ACCEPTANCE_RULE_COUPLED: Rule.COUPLED,
    model_pb2.ACCEPTANCE_RULE_REJECTION: Rule.REJECTION,
    model_pb2.ACCEPTANCE_RULE_CONTRASTIVE: Rule.CONTRASTIVE,
}


def rule_violations(
    rule: model_pb2.AcceptanceRule.ValueType, contrast: model_pb2.Contrast, sampling: Sampling
) -> list[tuple[str, str]]:
    """Return what is wrong with a rule, its parameters, and the sampling parameters that it excludes."""
    if rule not in RULES:
        return [("rule", f"is {rule}, which is no AcceptanceRule")]
    found: list[tuple[str, str]] = []
    if RULES[rule] is Rule.CONTRASTIVE:
        c = contrast_from(contrast)
        if not 0 < c.alpha <= 1:
            found.append(("contrast.alpha", f"is {c.alpha:g}, must be in (0, 1]"))
        if not 0 < c.amateur_temperature < math.inf:
            found.append(
                ("contrast.amateur_temperature", f"is {c.amateur_temperature:g}, must be a finite number above 0")
            )
        off = Sampling()
        found += [
            (
                f"sampling.{field}",
                f"is {getattr(sampling, field):g}: the CONTRASTIVE rule takes the best, and draws none",
            )
            for field in ("temperature", "top_k", "top_p", "min_p")
            if getattr(sampling, field) != getattr(off, field)
        ]
    elif contrast.ByteSize():
        found.append(("contrast", "is set, means something to the CONTRASTIVE rule only"))
    return found


MOST_WINDOW_ROWS = 128
MOST_GUESSES = 64


def drafter_violations(field: str, numbers: Sequence[int]) -> list[tuple[str, str]]:
    """Return what is wrong with a list of drafters."""
    known = set(map(int, Drafter))
    if len(numbers) > len(known):
        return [(field, f"has {len(numbers)} entries, may have {len(known)} at most")]
    if wrong := [number for number in numbers if number not in known]:
        return [(field, f"has {wrong[0]}, which is no Drafter")]
    if len(set(numbers)) < len(numbers):
        return [(field, "names a drafter twice")]
    return []


def lookahead_violations(field: str, message: model_pb2.Lookahead) -> list[tuple[str, str]]:
    """Return what is wrong with the size of a window."""
    found = []
    if message.window < 2:
        found.append((f"{field}.window", f"is {message.window}, must be at least 2"))
    if message.ngram < 2:
        found.append((f"{field}.ngram", f"is {message.ngram}, must be at least 2"))
    if not 1 <= message.guesses <= MOST_GUESSES:
        found.append((f"{field}.guesses", f"is {message.guesses}, must be 1 to {MOST_GUESSES}"))
    if not found and (rows := lookahead_from(message).most_rows) > MOST_WINDOW_ROWS:
        found.append((field, f"adds {rows} tokens to a step, may add {MOST_WINDOW_ROWS} at most"))
    return found


def lookahead_from(message: model_pb2.Lookahead) -> Lookahead:
    return Lookahead(message.window, message.ngram, message.guesses)


def lookahead_message(size: Lookahead) -> model_pb2.Lookahead:
    return model_pb2.Lookahead(window=size.window, ngram=size.ngram, guesses=size.guesses)


def rule_message(rule: Rule) -> model_pb2.AcceptanceRule.ValueType:
    return model_pb2.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{rule.name}")


def rule_of(rule: model_pb2.AcceptanceRule.ValueType, sampling: Sampling) -> Rule:
    """Return the rule to go by: without temperature, REJECTION is the same as COUPLED."""
    found = RULES[rule]
    return Rule.COUPLED if found is Rule.REJECTION and sampling.greedy else found


def sampler_from(
    sampling: Sampling,
    end_tokens: frozenset[int],
    first_end_position: int,
    message: verifier_pb2.VerifyOpen | draft_pb2.DraftOpen,
) -> RequestSampler:
    """Return the sampler of a session that was found valid."""
    rule = rule_of(message.rule, sampling)
    return RequestSampler(sampling, end_tokens, first_end_position, rule, contrast_from(message.contrast))


def paths_message(base: int, paths: Paths) -> model_pb2.Extend:
    distributions = []
    for parent, row in paths.distributions:
        ids, values = row.sent()
        distributions.append(model_pb2.DraftDistribution(parent=parent, ids=ids, values=values))
    return model_pb2.Extend(
        base=base,
        tokens=paths.tokens,
        parents=paths.parents,
        logprob_bytes=logprobs_message(paths.logprobs),
        distributions=distributions,
    )


def paths_from(message: model_pb2.Extend) -> Paths:
    """Return candidates as a tree takes them. Distributions that make no sense are left out, like nodes that can never
    be taken."""
    received = [
        (each.parent, DraftDistribution.received(list(each.ids), each.values)) for each in message.distributions
    ]
    distributions = [(parent, found) for parent, found in received if found is not None]
    return Paths(list(message.tokens), list(message.parents), logprobs_from(message.logprob_bytes), distributions)


def logprobs_message(logprobs: Sequence[float]) -> bytes:
    """Return a byte for each log-probability."""
    units = np.rint(np.sqrt(-np.minimum(logprobs, 0.0)) / LOGPROB_UNIT)
    return np.minimum(units, 255).astype(np.uint8).tobytes()


def logprobs_from(message: bytes) -> list[float]:
    roots = np.frombuffer(message, np.uint8) * LOGPROB_UNIT
    logprobs: list[float] = (-roots * roots).tolist()
    return logprobs
