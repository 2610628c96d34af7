"""Conversions between messages and the dataclasses of the code."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import DEFAULT_CONTRAST, Contrast, Rule, Sampling
from specdec.decoding.speculation import (
    ALL_DRAFTERS,
    NO_DRAFTERS,
    Outlook,
    Scorer,
    SpeculationOptions,
    drafters_of,
)
from specdec.decoding.tree import Paths
from specdec.grammar.grammar import Grammar, Kind
from specdec.v2 import draft_pb2, generation_pb2, model_pb2, verifier_pb2

LOGPROB_UNIT = 1.0 / 96.0
"""Quantization step of log-probabilities in messages: byte = sqrt(-logprob) / LOGPROB_UNIT. Fine near probability 1, so
that sums over long paths stay accurate; coarse for unlikely tokens."""

LOGPROBS = [-((LOGPROB_UNIT * byte) ** 2) for byte in range(256)]
"""Log-probability by byte value."""


_FINISHES: dict[int, str] = {
    number: name.removeprefix("FINISH_REASON_").lower() for name, number in model_pb2.FinishReason.items()
}


def finish_name(reason: int) -> str:
    """Return the name of a FinishReason, as in "length"; "unspecified" for an unknown one."""
    return _FINISHES.get(reason, "unspecified")


def sampling_from(message: model_pb2.Sampling) -> Sampling:
    return Sampling(
        repetition_penalty=message.repetition_penalty or 1.0,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
        logit_bias=dict(message.logit_bias),
        banned_tokens=frozenset(message.banned_tokens),
        banned_sequences=frozenset(tuple(sequence.tokens) for sequence in message.banned_sequences),
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
        banned_sequences=[model_pb2.TokenSequence(tokens=tokens) for tokens in sorted(sampling.banned_sequences)],
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )


def outlook_from(message: verifier_pb2.VerifyOpened | verifier_pb2.Commit) -> Outlook:
    return Outlook(message.drafting_wanted, message.min_candidate_probability)


def contrast_from(message: model_pb2.Contrast) -> Contrast:
    default = DEFAULT_CONTRAST
    return Contrast(
        message.alpha if message.HasField("alpha") else default.alpha,
        message.amateur_temperature if message.HasField("amateur_temperature") else default.amateur_temperature,
    )


RULES = {
    model_pb2.ACCEPTANCE_RULE_UNSPECIFIED: Rule.COUPLED,
    model_pb2.ACCEPTANCE_RULE_COUPLED: Rule.COUPLED,
    model_pb2.ACCEPTANCE_RULE_REJECTION: Rule.REJECTION,
    model_pb2.ACCEPTANCE_RULE_CONTRASTIVE: Rule.CONTRASTIVE,
}


def grammar_from(message: model_pb2.Grammar) -> Grammar | None:
    """Return the grammar of a message; None if it has none."""
    field = message.WhichOneof("kind")
    if field is None:
        return None
    source = tuple(message.choice.texts) if field == "choice" else (getattr(message, field),)
    after = message.after_token if message.HasField("after_token") else None
    opening = message.opening_token if message.HasField("opening_token") else None
    return Grammar(Kind(field), source, after, opening)


def lookahead_from(message: model_pb2.Lookahead) -> Lookahead:
    return Lookahead(message.window, message.ngram, message.guesses)


def lookahead_message(size: Lookahead) -> model_pb2.Lookahead:
    return model_pb2.Lookahead(window=size.window, ngram=size.ngram, guesses=size.guesses)


def speculation_from(message: generation_pb2.Speculation) -> SpeculationOptions:
    """Return the options of a validated message."""
    windowed = message.HasField("lookahead")
    return SpeculationOptions(
        drafters=NO_DRAFTERS if message.off else drafters_of(message.drafters) or ALL_DRAFTERS,
        forced=message.forced,
        max_candidates=message.max_candidates,
        max_depth=message.max_depth,
        max_branches=message.max_branches,
        max_nodes=message.max_nodes,
        min_path_probability=message.min_path_probability,
        scorer=scorer_of(message.scorer),
        expansion=tuple(message.expansion),
        lookahead=lookahead_from(message.lookahead) if windowed else None,
        jacobi=message.jacobi,
        unspecified=not (message.off or message.drafters or message.forced or windowed or message.jacobi),
    )


def scorer_of(number: int) -> Scorer | None:
    """Return the scorer with this number of a validated message; None for the default."""
    return Scorer(number) if number else None


def rule_message(rule: Rule) -> model_pb2.AcceptanceRule.ValueType:
    return model_pb2.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{rule.name}")


def rule_of(rule: model_pb2.AcceptanceRule.ValueType, sampling: Sampling) -> Rule:
    """Return the effective rule: at temperature 0, REJECTION equals COUPLED."""
    found = RULES[rule]
    return Rule.COUPLED if found is Rule.REJECTION and sampling.greedy else found


def sampler_from(
    sampling: Sampling,
    end_tokens: frozenset[int],
    first_end_position: int,
    message: verifier_pb2.VerifyOpen | draft_pb2.DraftOpen,
) -> RequestSampler:
    """Return the sampler of a validated session."""
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


def paths_from(message: model_pb2.Extend, most_ids: int = 0, most_values: int = 0) -> Paths:
    """Return candidates in the token tree's form. Malformed distributions are dropped, as the tree drops nodes that can
    never be accepted. Those with more than `most_ids` ids or `most_values` values are dropped unread."""
    received = [
        (distribution.parent, DraftDistribution.received(list(distribution.ids), distribution.values))
        for distribution in message.distributions
        if len(distribution.ids) <= most_ids and len(distribution.values) <= 2 * most_values  # float16
    ]
    distributions = [(parent, found) for parent, found in received if found is not None]
    return Paths(list(message.tokens), list(message.parents), logprobs_from(message.logprob_bytes), distributions)


def logprobs_message(logprobs: Sequence[float]) -> bytes:
    """Return log-probabilities quantized to one byte each."""
    return bytes([round(min(math.sqrt(max(-logprob, 0.0)) / LOGPROB_UNIT, 255.0)) for logprob in logprobs])


def logprobs_from(message: bytes) -> list[float]:
    return [LOGPROBS[byte] for byte in message]
