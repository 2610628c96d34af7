"""Conversions between messages and dataclasses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.lookahead import Lookahead
from specdec.decoding.proposal import MAX_PARTIAL_IDS, NO_DISTRIBUTION, DistributionSizes, DraftDistribution
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import (
    DEFAULT_CONTRAST,
    DEFAULT_TYPICALITY,
    NUMBERS,
    Contrast,
    Rule,
    Sampling,
    Typicality,
)
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
"""Quantization step of log-probabilities in messages: byte = sqrt(-logprob) / LOGPROB_UNIT. It is fine near probability
1, so that sums over long paths stay accurate, and coarse for unlikely tokens."""

LOGPROBS = [-((LOGPROB_UNIT * byte) ** 2) for byte in range(256)]
"""Log-probability by byte value."""


_FINISHES: dict[int, str] = {
    number: name.removeprefix("FINISH_REASON_").lower() for name, number in model_pb2.FinishReason.items()
}


def finish_name(reason: int) -> str:
    """Return the name of a FinishReason, as in "length"; "unspecified" for an unknown one."""
    return _FINISHES.get(reason, "unspecified")


def sampling_from(message: model_pb2.Sampling) -> Sampling:
    """Return the sampling parameters of a message; a number of 0 means unset."""
    default = Sampling()
    return Sampling(
        logit_bias=dict(message.logit_bias),
        banned_tokens=frozenset(message.banned_tokens),
        banned_sequences=frozenset(tuple(sequence.tokens) for sequence in message.banned_sequences),
        seed=message.seed,
        **{name: getattr(message, name) or getattr(default, name) for name in NUMBERS},
    )


def sampling_message(sampling: Sampling) -> model_pb2.Sampling:
    return model_pb2.Sampling(
        logit_bias=sampling.logit_bias,
        banned_tokens=sorted(sampling.banned_tokens),
        banned_sequences=[model_pb2.TokenSequence(tokens=tokens) for tokens in sorted(sampling.banned_sequences)],
        seed=sampling.seed,
        **{name: getattr(sampling, name) for name in NUMBERS},
    )


def outlook_from(message: verifier_pb2.VerifyOpened | verifier_pb2.Commit) -> Outlook:
    return Outlook(message.drafting_wanted, message.min_candidate_probability)


def contrast_from(message: model_pb2.Contrast) -> Contrast:
    default = DEFAULT_CONTRAST
    return Contrast(
        message.alpha if message.HasField("alpha") else default.alpha,
        message.amateur_temperature if message.HasField("amateur_temperature") else default.amateur_temperature,
    )


def typicality_from(message: model_pb2.Typicality) -> Typicality:
    default = DEFAULT_TYPICALITY
    return Typicality(
        message.typical_epsilon if message.HasField("typical_epsilon") else default.epsilon,
        message.typical_delta if message.HasField("typical_delta") else default.delta,
    )


RULES = {
    model_pb2.ACCEPTANCE_RULE_UNSPECIFIED: Rule.COUPLED,
    model_pb2.ACCEPTANCE_RULE_COUPLED: Rule.COUPLED,
    model_pb2.ACCEPTANCE_RULE_REJECTION: Rule.REJECTION,
    model_pb2.ACCEPTANCE_RULE_CONTRASTIVE: Rule.CONTRASTIVE,
    model_pb2.ACCEPTANCE_RULE_TYPICAL: Rule.TYPICAL,
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
    """Return the scorer with this number, from a validated message; None for the default."""
    return Scorer(number) if number else None


def rule_message(rule: Rule) -> model_pb2.AcceptanceRule.ValueType:
    return model_pb2.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{rule.name}")


def rule_of(rule: model_pb2.AcceptanceRule.ValueType, sampling: Sampling) -> Rule:
    """Return the effective rule: at temperature 0, REJECTION and TYPICAL equal COUPLED."""
    found = RULES[rule]
    return Rule.COUPLED if found in (Rule.REJECTION, Rule.TYPICAL) and sampling.greedy else found


def sampler_from(
    sampling: Sampling,
    end_tokens: frozenset[int],
    first_end_position: int,
    message: verifier_pb2.VerifyOpen | draft_pb2.DraftOpen,
) -> RequestSampler:
    """Return the sampler of a validated session."""
    rule = rule_of(message.rule, sampling)
    typicality = DEFAULT_TYPICALITY  # drafts guess as under COUPLED
    if isinstance(message, verifier_pb2.VerifyOpen):
        typicality = typicality_from(message.typicality)
    return RequestSampler(sampling, end_tokens, first_end_position, rule, contrast_from(message.contrast), typicality)


def paths_message(base: int, paths: Paths) -> model_pb2.Extend:
    return model_pb2.Extend(
        base=base,
        tokens=paths.tokens,
        parents=paths.parents,
        logprob_bytes=logprobs_message(paths.logprobs),
        distributions=[distribution_message(parent, row) for parent, row in paths.distributions],
    )


def paths_from(message: model_pb2.Extend, most: DistributionSizes = NO_DISTRIBUTION) -> Paths:
    """Return candidates in the token tree's form. Distributions that are malformed or larger than `most` are dropped,
    as the tree drops nodes that can never be accepted."""
    distributions = []
    for distribution in message.distributions:
        try:
            distributions.append((distribution.parent, distribution_from(distribution, most)))
        except ValueError:
            continue
    return Paths(list(message.tokens), list(message.parents), logprobs_from(message.logprob_bytes), distributions)


def distribution_message(parent: int, row: DraftDistribution) -> model_pb2.DraftDistribution:
    """Return a distribution over the children of the node numbered `parent`."""
    message = model_pb2.DraftDistribution(parent=parent, values=row.values.astype("<f2").tobytes(), answer=row.answer)
    if row.ids is None:
        return message
    if row.vocabulary is None:
        message.ids.extend(row.ids.tolist())
    else:
        message.id_gaps.extend(_gaps(row.ids))
        message.vocabulary_size = row.vocabulary
    return message


def distribution_from(message: model_pb2.DraftDistribution, most: DistributionSizes) -> DraftDistribution:
    """Return the distribution in a message. ValueError if it is malformed, or (without reading it) larger than
    `most`."""
    for field, size, limit in (
        ("ids", len(message.ids), most.ids),
        ("id_gaps", len(message.id_gaps), most.gaps),
        ("values", len(message.values) // 2, most.values),  # float16
    ):
        if size > limit:
            raise ValueError(f"{field}: has {size} tokens, must have at most {limit}")
    if not message.id_gaps:
        return replace(DraftDistribution.received(list(message.ids), message.values), answer=message.answer)
    if message.ids:
        raise ValueError("ids: is set, must be unset with id_gaps")
    row = DraftDistribution.received(_ids(message.id_gaps).tolist(), message.values)
    return replace(row, vocabulary=message.vocabulary_size, answer=message.answer)


def query_message(query: DraftQuery) -> model_pb2.DraftQuery:
    return model_pb2.DraftQuery(base=query.base, id_gaps=() if query.ids is None else _gaps(query.ids))


def query_from(message: model_pb2.DraftQuery, vocabulary: int) -> DraftQuery:
    """Return a query about a target with `vocabulary` token ids; ValueError if it is invalid."""
    if len(message.id_gaps) > MAX_PARTIAL_IDS:
        raise ValueError(f"query.id_gaps: has {len(message.id_gaps)} ids, must have at most {MAX_PARTIAL_IDS}")
    if not message.id_gaps:
        return DraftQuery(message.base, None)
    ids = _ids(message.id_gaps)
    if (np.diff(ids) <= 0).any():
        raise ValueError("query.id_gaps: has a gap of 0 after the first; ids must ascend")
    if ids[-1] >= vocabulary:
        raise ValueError(f"query.id_gaps: names token {ids[-1]}, the vocabulary has {vocabulary} tokens")
    return DraftQuery(message.base, ids)


def _gaps(ids: NDArray[np.int64]) -> list[int]:
    """Return ascending token ids as gaps: over a large vocabulary most gaps take a byte or two, ids take three."""
    gaps: list[int] = np.diff(ids, prepend=0).tolist()
    return gaps


def _ids(gaps: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum(np.asarray(gaps, dtype=np.int64))


def logprobs_message(logprobs: Sequence[float]) -> bytes:
    """Return log-probabilities quantized to one byte each."""
    return bytes([round(min(math.sqrt(max(-logprob, 0.0)) / LOGPROB_UNIT, 255.0)) for logprob in logprobs])


def logprobs_from(message: bytes) -> list[float]:
    return [LOGPROBS[byte] for byte in message]
