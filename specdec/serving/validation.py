"""Validation of messages. Every check returns all violations as (field, problem with value and limit), so that a caller
can fix them all together."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.sampling import NUMBERS, PENALTIES, Rule, Sampling
from specdec.decoding.speculation import ALL_DRAFTERS, CandidateSource, Scorer, SpeculationOptions
from specdec.grammar.grammar import Kind, source_violation
from specdec.serving.messages import RULES, contrast_from, typicality_from
from specdec.serving.target_logprobs import MAX_TOP
from specdec.v2 import draft_pb2, generation_pb2, model_pb2, verifier_pb2

MAX_MESSAGE_BYTES = 16 << 20
"""Maximum bytes of a message between services, and of a request."""

MAX_ANSWER_BYTES = 64 << 20
"""Maximum bytes of an answer, which may hold whole texts with log-probabilities; also our clients' receive limit."""

MAX_FEATURE_BYTES = 1 << 19
"""Maximum bytes of features in one message."""

MAX_NODES_A_MESSAGE = 1024
"""Maximum candidates in an `Extend`: several times a verifier's grant for a session."""


MAX_BIASES = 4096


def size_violations(
    sampling: model_pb2.Sampling | generation_pb2.SamplingParameters, vocabulary: int
) -> list[tuple[str, str]]:
    """Return violations for sampling fields with too many entries to check one by one."""
    return [
        violation
        for violation in (
            too_many("sampling.logit_bias", len(sampling.logit_bias), MAX_BIASES, "entries"),
            too_many("sampling.banned_tokens", len(sampling.banned_tokens), vocabulary, "tokens"),
        )
        if violation is not None
    ]


def too_many(field: str, count: int, limit: int, of: str) -> tuple[str, str] | None:
    """Return the violation of a field with more than `limit` entries; None within the limit."""
    return (field, f"has {count} {of}, must have at most {limit}") if count > limit else None


def token_violations(field: str, tokens: list[int], vocabulary: int) -> list[tuple[str, str]]:
    """Return the violation of the first token id outside the vocabulary, if any."""
    if max(tokens, default=0) < vocabulary:
        return []
    for index, token in enumerate(tokens):
        if token >= vocabulary:
            return [(f"{field}[{index}]", f"is {token}, must be a token id below {vocabulary}")]
    return []


MAX_BANNED_SEQUENCES = 768
MAX_BANNED_SEQUENCE_TOKENS = 64
"""Maximum banned sequences of a request, three for each bad word, and tokens of each: each row needs one lookup per
distinct sequence length."""

MAX_END_TOKENS = 4096
"""Maximum end tokens of a session, the model's and the request's together."""

MAX_TENANT_CHARACTERS = 256
"""Maximum characters of a tenant's name."""


MAX_CACHE_SALT_CHARACTERS = 256
"""Maximum characters of a cache salt: it is stored as long as prefixes with it are cached."""


def open_size_violations(
    message: verifier_pb2.VerifyOpen | draft_pb2.DraftOpen, vocabulary: int, context: int
) -> list[tuple[str, str]]:
    """Return violations of the limits on the size of a session's opening: entries of its lists, and characters of its
    tenant."""
    counts = (
        too_many("prompt_tokens", len(message.prompt_tokens), context, "tokens"),
        too_many("generated_tokens", len(message.generated_tokens), context, "tokens"),
        too_many("end_tokens", len(message.end_tokens), MAX_END_TOKENS, "tokens"),
    )
    found = [violation for violation in counts if violation is not None] + size_violations(message.sampling, vocabulary)
    found += _sequence_violations(message.sampling)
    if len(message.tenant) > MAX_TENANT_CHARACTERS:
        found.append(("tenant", f"has {len(message.tenant)} characters, must have at most {MAX_TENANT_CHARACTERS}"))
    return found


def _sequence_violations(sampling: model_pb2.Sampling) -> list[tuple[str, str]]:
    """Return the violation of the number of banned sequences, or else of the first with a length out of range."""
    sequences, most = sampling.banned_sequences, MAX_BANNED_SEQUENCE_TOKENS
    if excess := too_many("sampling.banned_sequences", len(sequences), MAX_BANNED_SEQUENCES, "sequences"):
        return [excess]
    return [
        (f"sampling.banned_sequences[{index}]", f"has {len(sequence.tokens)} tokens, must have 2 to {most}")
        for index, sequence in enumerate(sequences)
        if not 2 <= len(sequence.tokens) <= most
    ][:1]


def text_violations(
    prompt: list[int], generated: list[int], max_tokens: int, *, vocabulary: int, context: int
) -> list[tuple[str, str]]:
    """Return violations of a session's initial text."""
    found = token_violations("prompt_tokens", prompt, vocabulary)
    found += token_violations("generated_tokens", generated, vocabulary)
    if not prompt:
        found.append(("prompt_tokens", "is empty, must hold at least 1 token"))
    length = len(prompt) + len(generated)
    if length >= context:
        found.append(("prompt_tokens", f"has {length} tokens with generated_tokens, the context is {context}"))
    if max_tokens <= len(generated):
        found.append(("max_tokens", f"is {max_tokens}, must be more than the {len(generated)} generated_tokens"))
    return found


def rule_violations(
    rule: model_pb2.AcceptanceRule.ValueType, contrast: model_pb2.Contrast, sampling: Sampling
) -> list[tuple[str, str]]:
    """Return violations of a rule and its parameters, and of sampling parameters that the rule excludes."""
    if rule not in RULES:
        return [("rule", f"is {rule}, must be a value of AcceptanceRule")]
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
                f"is {getattr(sampling, field):g}, must be unset with the CONTRASTIVE rule, which does not sample",
            )
            for field in NUMBERS
            if field not in PENALTIES and getattr(sampling, field) != getattr(off, field)
        ]
    elif contrast.ByteSize():
        found.append(("contrast", "is set, must be unset unless the rule is CONTRASTIVE"))
    return found


def typicality_violations(
    rule: model_pb2.AcceptanceRule.ValueType, typicality: model_pb2.Typicality
) -> list[tuple[str, str]]:
    """Return violations of the parameters of the TYPICAL rule."""
    if rule != model_pb2.ACCEPTANCE_RULE_TYPICAL:
        is_set = bool(typicality.ByteSize())
        return [("typicality", "is set, must be unset unless the rule is TYPICAL")] if is_set else []
    found: list[tuple[str, str]] = []
    t = typicality_from(typicality)
    if not 0 < t.epsilon <= 1:
        found.append(("typicality.typical_epsilon", f"is {t.epsilon:g}, must be in (0, 1]"))
    if not 0 < t.delta < math.inf:
        found.append(("typicality.typical_delta", f"is {t.delta:g}, must be a finite number above 0"))
    return found


def grammar_violations(
    message: model_pb2.Grammar, end_tokens: frozenset[int], vocabulary: int, source_field: str = ""
) -> list[tuple[str, str]]:
    """Return violations of a grammar that are visible without compiling it. `source_field` is the field to report for
    its source; by default the field that holds it."""
    kind = message.WhichOneof("kind")
    if kind is None:
        return [("grammar", "is set and empty, must have one of json_schema, regex, lark, choice")]
    source = message.choice.texts if kind == "choice" else [getattr(message, kind)]
    found = []
    if problem := source_violation(Kind(kind), source):
        found.append((source_field or f"grammar.{kind}", problem))
    if not end_tokens:
        found.append(("grammar", "needs a token that ends the text: the model's own, or one of stop_tokens"))
    found += [
        (f"grammar.{name}", f"is {token}, must be a token id below {vocabulary}")
        for name in ("after_token", "opening_token")
        if (token := getattr(message, name)) >= vocabulary
    ]
    if message.HasField("opening_token") and not message.HasField("after_token"):
        found.append(("grammar.opening_token", "is set, which requires after_token"))
    return found


MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0
"""Range of a tenant's weight, relative to other tenants."""


def weight_violations(weight: float) -> list[tuple[str, str]]:
    """Return violations of a tenant's weight; 0 means 1."""
    if not weight or MIN_WEIGHT <= weight <= MAX_WEIGHT:
        return []
    return [("tenant_weight", f"is {weight:g}, must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")]


MAX_LOGPROBS = 20
"""Maximum top log-probabilities per token, as in the OpenAI API."""

MAX_CANDIDATES = 128
MAX_DEPTH = 128
MAX_BRANCHES = 16
MAX_NODES = 256
"""Limits on a request's speculation, in this order: candidates of a session per step, tokens ahead of its text,
alternatives at one position, live candidates of a draft. A pod may grant less, but never more."""


def candidate_limit_violations(
    field: str, message: generation_pb2.Speculation | verifier_pb2.VerifyPolicy
) -> list[tuple[str, str]]:
    """Return the violation if the limit on a step's candidates is higher than any pod grants."""
    return _above(field, message.max_candidates, "max_candidates", MAX_CANDIDATES)


def depth_violations(
    field: str, message: generation_pb2.Speculation | verifier_pb2.VerifyPolicy | draft_pb2.DraftPolicy
) -> list[tuple[str, str]]:
    """Return the violation if the limit on depth is higher than any pod grants."""
    return _above(field, message.max_depth, "max_depth", MAX_DEPTH)


def overruled_violations(field: str, message: verifier_pb2.VerifyPolicy) -> list[tuple[str, str]]:
    """Return the violation if more log-probabilities are requested for a draft than any verifier returns."""
    return _above(field, message.overruled_logprobs, "overruled_logprobs", MAX_TOP)


def token_tree_violations(
    field: str, message: generation_pb2.Speculation | draft_pb2.DraftPolicy
) -> list[tuple[str, str]]:
    """Return violations of a message's fields about the token tree of a draft service, except its number of nodes."""
    found = depth_violations(field, message) + _above(field, message.max_branches, "max_branches", MAX_BRANCHES)
    if not 0 <= message.min_path_probability < 1:
        problem = f"is {message.min_path_probability:g}, must be in [0, 1)"
        found.append((f"{field}.min_path_probability", problem))
    if message.scorer and message.scorer not in set(map(int, Scorer)):
        found.append((f"{field}.scorer", f"is {message.scorer}, must be a value of DraftScorer"))
    return found + expansion_violations(f"{field}.expansion", message.expansion)


def expansion_violations(field: str, widths: Sequence[int]) -> list[tuple[str, str]]:
    """Return violations of a list of fixed widths."""
    if len(widths) > MAX_DEPTH:
        return [(field, f"has {len(widths)} widths, must have at most {MAX_DEPTH}")]
    for index, width in enumerate(widths):
        if not 1 <= width <= MAX_BRANCHES:
            return [(f"{field}[{index}]", f"is {width}, must be 1 to {MAX_BRANCHES}")]
    if (nodes := sum(itertools.accumulate(widths, operator.mul))) > MAX_NODES:
        return [(field, f"makes a tree of {nodes} nodes, must make at most {MAX_NODES}")]
    return []


def speculation_limit_violations(field: str, message: generation_pb2.Speculation) -> list[tuple[str, str]]:
    """Return violations of a request's limits on candidates, and of its options for the token tree."""
    found = candidate_limit_violations(field, message) + token_tree_violations(field, message)
    found += _above(field, message.max_nodes, "max_nodes", MAX_NODES)
    for name in ("max_depth", "max_branches", "min_path_probability"):
        if message.expansion and getattr(message, name):
            found.append((f"{field}.{name}", "is set, must not be set with `expansion`, which decides it"))
    return found


def _above(field: str, value: int, name: str, most: int) -> list[tuple[str, str]]:
    return [(f"{field}.{name}", f"is {value}, must be at most {most}")] if value > most else []


MAX_WINDOW_ROWS = 128


MAX_GUESSES = 64


MAX_DRAFTERS = 32
"""Maximum entries of a list of drafters, including those that only newer peers know."""


def drafter_violations(field: str, numbers: Sequence[int]) -> list[tuple[str, str]]:
    """Return violations of a list of drafters. Unknown drafters are ignored beside known ones: newer peers send them,
    for example, for `local`, which names all drafters inside the verifier."""
    if len(numbers) > MAX_DRAFTERS:
        return [(field, f"has {len(numbers)} entries, must have at most {MAX_DRAFTERS}")]
    if 0 in numbers or (numbers and ALL_DRAFTERS.isdisjoint(numbers)):
        return [(field, f"has {0 if 0 in numbers else numbers[0]}, must have values of Drafter")]
    if len(set(numbers)) < len(numbers):
        return [(field, "has a drafter twice")]
    return []


def lookahead_violations(field: str, size: Lookahead, most: int = MAX_WINDOW_ROWS) -> list[tuple[str, str]]:
    """Return violations of a lookahead window's size; a window may add up to `most` rows to a step."""
    found = []
    if size.window < 2:
        found.append((f"{field}.window", f"is {size.window}, must be at least 2"))
    if size.ngram < 2:
        found.append((f"{field}.ngram", f"is {size.ngram}, must be at least 2"))
    if not 1 <= size.guesses <= MAX_GUESSES:
        found.append((f"{field}.guesses", f"is {size.guesses}, must be 1 to {MAX_GUESSES}"))
    if not found and size.most_rows > most:
        found.append((field, f"is {tuple(size)}, adds {size.most_rows} tokens to a step, must add at most {most}"))
    return found


def window_violations(
    field: str, options: SpeculationOptions, rule: Rule, most: int = MAX_WINDOW_ROWS
) -> list[tuple[str, str]]:
    """Return violations of the windows that a request's options ask for, under its effective rule."""
    size, found = options.lookahead, list[tuple[str, str]]()
    option = f"{field}.lookahead" if size is not None else f"{field}.jacobi" if options.jacobi else None
    if option is None:
        return found
    if size is not None:
        found += lookahead_violations(f"{field}.lookahead", size, most)
        if options.jacobi and size.ngram != 2:
            found.append((f"{field}.lookahead.ngram", f"is {size.ngram}, must be 2 with jacobi"))
    if CandidateSource.LOOKAHEAD not in options.drafters:
        found.append((option, "is set, which requires the drafter LOOKAHEAD"))
    elif rule is Rule.CONTRASTIVE:
        found.append(
            (option, "is set, which requires a rule other than CONTRASTIVE, where only a draft's candidates can win")
        )
    elif rule is Rule.REJECTION and (options.jacobi or (size is not None and size.ngram == 2)):
        # The row below a token of the chain would use its noise twice: to draw the target's token, and for the next
        # guess. Under REJECTION a guess must not depend on the noise that tests it.
        found.append(
            (option, "asks for Jacobi decoding, which tests its own choices: needs temperature 0 or another rule")
        )
    elif rule is Rule.REJECTION and CandidateSource.REMOTE in options.drafters:
        why = "only one drafter may draw at each position"
        found.append((option, f"is set, which under REJECTION requires drafters without REMOTE: {why}"))
    return found
