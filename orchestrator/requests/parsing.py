"""Parsing of requests: turns a GenerateRequest into valid samples. Later code does not check them again."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal

from orchestrator.requests.model import ServedModel
from orchestrator.requests.prompt import most_prompt_tokens, prompt_tokens, time_of
from orchestrator.requests.reasoning import Reasoning, reasoning_after, reasoning_from
from orchestrator.requests.sample import PromptTokens, Request, Sample
from orchestrator.requests.sampling import MAX_BAD_WORDS, defaults_for, sampling_of
from orchestrator.requests.tools import tool_grammar
from orchestrator.tenants.file import Tenant
from specdec.decoding.noise import sample_seed
from specdec.decoding.sampling import Rule, Sampling, sampling_violations
from specdec.decoding.speculation import NO_DRAFTERS, OWN_DRAFTERS, SpeculationOptions
from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.rewriting import supported_source
from specdec.grammar.json_schema.text_check import TextCheck
from specdec.serving.echo import echo
from specdec.serving.errors import (
    InvalidRequestError,
    PermissionDeniedError,
    PromptChangedError,
    PromptTooLongError,
)
from specdec.serving.messages import RULES, rule_of, sampling_message, speculation_from
from specdec.serving.validation import (
    MAX_CACHE_SALT_CHARACTERS,
    MAX_LOGPROBS,
    MAX_TENANT_CHARACTERS,
    drafter_violations,
    grammar_violations,
    rule_violations,
    size_violations,
    speculation_limit_violations,
    token_violations,
    too_many,
    typicality_violations,
    window_violations,
)
from specdec.text.generation_defaults import GenerationDefaults
from specdec.v2 import generation_pb2, model_pb2

MAX_SAMPLES = 16
"""Maximum samples of a request; each has its own sessions."""

DRAWN_SEED_BITS = 53
"""Bits of a drawn seed: by HTTP it is a number in JSON, and JavaScript rounds larger ones."""

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARACTERS = 256
"""Maximum stop strings, and characters of each: all are searched for in every piece of text."""

MAX_STOP_TOKENS = 1024
"""Maximum stop tokens: models have a handful. The services accept four times as many end tokens (`MAX_END_TOKENS`)."""

MAX_FINGERPRINT_CHARACTERS = 128
"""Maximum characters of a model's fingerprint: a SHA-256 has 64."""


def parse(
    message: generation_pb2.GenerateRequest,
    model: ServedModel,
    *,
    owner: Tenant | None = None,
    untrusted_drafts: bool = False,
    streamed: bool = True,
    arrived: datetime | None = None,
) -> Request:
    """Parse a message into a request. Raise InvalidRequestError, which names all invalid fields; sizes are checked
    before the other fields, the grammar after them. Raise PromptTooLongError if the prompt is too long,
    PermissionDeniedError if the message names another tenant than `owner` or sets `learn` without permission,
    PromptChangedError if a resumed text's prompt gives other tokens here.

    `owner` is the tenant of the caller's key; without one, the message names the tenant. `untrusted_drafts` refuses
    rules that let a draft service influence tokens. Commits may be coalesced unless the request is `streamed` or a stop
    string may end the text. `arrived`, in UTC, is the present time for a chat template unless the request gives one; it
    defaults to now.
    """
    if violations := _prompt_sizes(message, model):
        raise PromptTooLongError(violations)
    if violations := _sizes(message, model):
        raise InvalidRequestError(violations)
    if owner is not None and message.tenant not in ("", owner.name):
        problem = f"tenant: is {echo(message.tenant)}, the API key belongs to {echo(owner.name)}"
        raise PermissionDeniedError(problem, "WRONG_TENANT")
    if owner is not None and message.learn and not owner.learn:
        problem = f"learn: is set, the tenant {echo(owner.name)} does not permit it (`learn` in the file of tenants)"
        raise PermissionDeniedError(problem, "LEARNING_NOT_PERMITTED")
    time = time_of(message, arrived or datetime.now(UTC), violations)
    prompt = PromptTokens(prompt_tokens(message, model, time, violations))
    # The tokenizer may have more tokens than the model.
    if not violations and (unknown := max(prompt, default=0)) >= model.vocabulary:
        problem = f"has the token {unknown}, the model has token ids below {model.vocabulary}"
        violations.append((message.WhichOneof("prompt") or "prompt", problem))
    generated = list(message.generated_tokens)
    violations += token_violations("generated_tokens", generated, model.vocabulary)

    seed = message.sampling.seed if message.sampling.HasField("seed") else secrets.randbits(DRAWN_SEED_BITS)
    defaults = defaults_for(message, model)
    sampling = sampling_of(message, model, defaults, violations)
    reasoning = _reasoning(message, model, prompt, violations)
    stops = _unshown_stops(message, model, reasoning)
    end_tokens = _end_tokens(message, model, stops, violations)
    violations += sampling_violations(sampling, model.vocabulary, end_tokens if message.min_tokens else frozenset())
    violations += rule_violations(message.rule, message.contrast, sampling)
    violations += typicality_violations(message.rule, message.typicality)

    max_tokens = _max_tokens(message, defaults, model.context - len(prompt), violations)
    top_logprobs, prompt_logprobs = (_top(message, field, violations) for field in ("logprobs", "prompt_logprobs"))
    _check_stops(message, model, violations)
    grammar, check = _grammar(message, model, violations)
    if grammar is not None:
        # How the text is split must not change its tokens.
        thought = _detected_reasoning(message, model, prompt) if message.reasoning.none else reasoning
        grammar = grammar if thought is None else thought.before(grammar)
        violations += grammar_violations(grammar, end_tokens, model.vocabulary, grammar_field(message))
        stops = _unshown_stops(message, model, thought)
        violations += _ending_marks(message, grammar, end_tokens | stops, stops)
    rule, speculation = _rule(message, sampling, violations)
    if not max_tokens:  # no token is generated, so none needs a draft
        rule, speculation = Rule.COUPLED, SpeculationOptions(NO_DRAFTERS)
    if untrusted_drafts and speculation.remote and rule is not Rule.COUPLED:
        problem = f"is {rule.name}, must be COUPLED: the drafts here are not trusted (--trust-drafts)"
        violations.append(("rule", problem))
    if violations:
        raise InvalidRequestError(violations)
    if message.prompt_digest and message.prompt_digest != prompt.digest:
        raise PromptChangedError("prompt: gives different tokens here than where the text was started")

    sample = Sample(
        index=0,
        prompt=prompt,
        generated=generated,
        sampling=sampling,
        sampling_message=sampling_message(sampling),
        max_tokens=max_tokens,
        min_tokens=message.min_tokens,
        end_tokens=end_tokens,
        stop=tuple(message.stop),
        top_logprobs=top_logprobs,
        speculation=speculation,
        tenant=message.tenant if owner is None else owner.name,
        weight=1.0 if owner is None else owner.weight,
        priority=message.priority,
        rule=rule,
        contrast=message.contrast,
        typicality=message.typicality,
        model_fingerprint=message.model_fingerprint,
        coalesce_commits=not streamed and not message.stop,
        grammar=grammar,
        grammar_field="" if grammar is None else grammar_field(message),
        schema_check=check,
        shown_tokens=frozenset(model.tool_tokens.values()) if message.chat.tools else frozenset(),
        show_special=message.show_special_tokens,
        include_stop=message.include_stop,
        reasoning=reasoning,
        time=time if message.WhichOneof("prompt") == "chat" else None,
        rejected_candidates=message.rejected_candidates,
        cache_salt=message.cache_salt,
        learn=message.learn,
        tool_format=model.tool_format.name if message.chat.tools and model.tool_format is not None else "",
    )
    # Compute these now: a long prompt is parsed in a thread, but the samples run on the event loop.
    _ = prompt.digest
    prompt.block_hashes(sample.cache_scope)
    return Request(
        seed,
        [
            replace(
                sample,
                index=i,
                sampling=replace(sampling, seed=sample_seed(seed, i)),
                prompt_logprobs=None if i else prompt_logprobs,
            )
            for i in range(max(1, message.n))
        ],
    )


def _end_tokens(
    message: generation_pb2.GenerateRequest,
    model: ServedModel,
    stops: frozenset[int],
    violations: list[tuple[str, str]],
) -> frozenset[int]:
    """Return the tokens that end the text; faults are appended to `violations`. `stops`: those from stop strings."""
    found = frozenset(message.stop_tokens) | stops
    found |= frozenset() if message.ignore_end_token else model.end_tokens
    if len(found) > MAX_STOP_TOKENS:  # a request that resumes the text gives all of them as stop tokens
        problem = f"gives {len(found)} end tokens together with the model's own, must give at most {MAX_STOP_TOKENS}"
        violations.append(("stop_tokens", problem))
    return found


def _top(
    message: generation_pb2.GenerateRequest,
    field: Literal["logprobs", "prompt_logprobs"],
    violations: list[tuple[str, str]],
) -> int | None:
    """Return a number of top tokens, None if it is not set; a fault is appended to `violations`."""
    if not message.HasField(field):
        return None
    top: int = getattr(message, field)
    if top > MAX_LOGPROBS:
        violations.append((field, f"is {top}, must be at most {MAX_LOGPROBS}"))
    return top


def _max_tokens(
    message: generation_pb2.GenerateRequest,
    defaults: GenerationDefaults,
    room: int,
    violations: list[tuple[str, str]],
) -> int:
    """Return the maximum length of the text; faults of length, limits and resumption are appended to `violations`. The
    context has `room` tokens after the prompt."""
    most = max(1, room) + 1  # one more than fits, so that a text that fills the context ends with CONTEXT, not LENGTH
    unasked = most if defaults.max_new_tokens is None else min(most, defaults.max_new_tokens)
    max_tokens = message.max_tokens if message.HasField("max_tokens") else unasked
    generated = len(message.generated_tokens)
    if max_tokens < 1 and not message.HasField("prompt_logprobs"):
        violations.append(("max_tokens", "is 0, must be at least 1 without prompt_logprobs"))
    elif generated and generated >= min(max_tokens, room):
        violations.append(("generated_tokens", f"has {generated} tokens, must have fewer than {min(max_tokens, room)}"))
    if message.min_tokens > max_tokens:
        violations.append(("min_tokens", f"is {message.min_tokens}, must be at most max_tokens ({max_tokens})"))
    if generated and not message.sampling.HasField("seed"):
        violations.append(("sampling.seed", "is not set, must be given with generated_tokens"))
    if message.n > 1 and (generated or not max_tokens):
        beside = "generated_tokens" if generated else "max_tokens 0"
        violations.append(("n", f"is {message.n}, must be 1 with {beside}"))
    return max_tokens


def _prompt_sizes(message: generation_pb2.GenerateRequest, model: ServedModel) -> list[tuple[str, str]]:
    """Return the violations of a prompt too long to be parsed. Cheap for any length."""
    chat, context = message.chat.messages, model.context
    found = [
        too_many("text", len(message.text.encode()), model.most_text, "bytes"),
        too_many("tokens.ids", len(message.tokens.ids), most_prompt_tokens(message, model), "tokens"),
        too_many("chat.messages", len(chat), context, "messages"),
    ]
    if len(chat) <= context:
        calls = sum(len(turn.tool_calls) for turn in chat)
        found.append(too_many("chat.messages.tool_calls", calls, context, "calls"))
        length = sum(turn.ByteSize() for turn in chat) + sum(tool.ByteSize() for tool in message.chat.tools)
        found.append(too_many("chat", length, model.most_text, "bytes"))
    return [violation for violation in found if violation is not None]


def _sizes(message: generation_pb2.GenerateRequest, model: ServedModel) -> list[tuple[str, str]]:
    """Return the violations of other fields too long to be parsed. Also cheap."""
    found: list[tuple[str, str] | None] = [
        too_many("generated_tokens", len(message.generated_tokens), model.context, "tokens"),
        too_many("stop", len(message.stop), MAX_STOP_STRINGS, "strings"),
        too_many("stop_tokens", len(message.stop_tokens), MAX_STOP_TOKENS, "tokens"),
        too_many("tenant", len(message.tenant), MAX_TENANT_CHARACTERS, "characters"),
        too_many("cache_salt", len(message.cache_salt), MAX_CACHE_SALT_CHARACTERS, "characters"),
        too_many("model_fingerprint", len(message.model_fingerprint), MAX_FINGERPRINT_CHARACTERS, "characters"),
        too_many("prompt_digest", len(message.prompt_digest), MAX_FINGERPRINT_CHARACTERS, "characters"),
        *size_violations(message.sampling, model.vocabulary),
        too_many("sampling.allowed_tokens", len(message.sampling.allowed_tokens), model.vocabulary, "tokens"),
        too_many("sampling.bad_words", len(message.sampling.bad_words), MAX_BAD_WORDS, "words"),
    ]
    if message.n > MAX_SAMPLES:
        found.append(("n", f"is {message.n}, must be at most {MAX_SAMPLES}"))
    return [violation for violation in found if violation is not None]


def _rule(
    message: generation_pb2.GenerateRequest, sampling: Sampling, violations: list[tuple[str, str]]
) -> tuple[Rule, SpeculationOptions]:
    """Return the acceptance rule, and how to speculate; faults are appended to `violations`."""
    wanted = message.speculation
    rule = rule_of(message.rule, sampling) if message.rule in RULES else Rule.COUPLED  # an unknown rule is refused
    wrong = speculation_limit_violations("speculation", wanted)
    wrong += drafter_violations("speculation.drafters", wanted.drafters)
    if wrong:
        violations += wrong
        return rule, SpeculationOptions()
    if wanted.off:
        for field, is_set in (("drafters", wanted.drafters), ("forced", wanted.forced)):
            if is_set:
                violations.append((f"speculation.{field}", "is set, must not be set with `off`"))
    options = speculation_from(wanted)
    if message.rule == model_pb2.ACCEPTANCE_RULE_CONTRASTIVE and not options.remote:
        field = "off" if wanted.off else "drafters"
        violations.append((f"speculation.{field}", "leaves out REMOTE, which the CONTRASTIVE rule needs"))
    if rule is Rule.REJECTION and options.lookahead is not None and not wanted.drafters and not wanted.off:
        options = replace(options, drafters=OWN_DRAFTERS)  # draws of a draft would exclude the lookahead window
    violations += window_violations("speculation", options, rule)
    return rule, options


def _reasoning(
    message: generation_pb2.GenerateRequest, model: ServedModel, prompt: list[int], violations: list[tuple[str, str]]
) -> Reasoning | None:
    """Return the reasoning of the text; faults are appended to `violations`."""
    if message.HasField("reasoning"):
        violations += [
            (f"reasoning.{name}", f"is {token}, must be a token id below {model.vocabulary}")
            for name in ("opening_token", "closing_token")
            if (token := getattr(message.reasoning, name)) >= model.vocabulary
        ]
        return reasoning_from(message.reasoning)
    return _detected_reasoning(message, model, prompt)


def _detected_reasoning(
    message: generation_pb2.GenerateRequest, model: ServedModel, prompt: list[int]
) -> Reasoning | None:
    """Return the reasoning of the text as the model's template shows it, whatever the request sets."""
    marks = model.reasoning_marks if message.WhichOneof("prompt") == "chat" else None
    return None if marks is None else reasoning_after(prompt, marks, model.tokenizer)


def _grammar(
    message: generation_pb2.GenerateRequest, model: ServedModel, violations: list[tuple[str, str]]
) -> tuple[model_pb2.Grammar | None, TextCheck | None]:
    """Return the grammar of the text, for an answer or for tool calls in place of an answer; None if the text is
    unconstrained. Also return the check that the finished answer needs, if any (never with tools)."""
    answer = message.grammar if message.HasField("grammar") else None
    if message.json_schema:
        if answer is not None:
            violations.append(("grammar", "is set together with json_schema, must be the only grammar"))
        answer = model_pb2.Grammar(json_schema=message.json_schema)
    if violations:
        return None, None
    if answer is not None and answer.WhichOneof("kind") is None:
        return answer, None  # refused by `grammar_violations`
    check = None
    try:
        if answer is not None and answer.WhichOneof("kind") == "json_schema":
            source, check = supported_source(answer.json_schema, checks=not message.chat.tools)
            given, answer = answer, model_pb2.Grammar()
            answer.CopyFrom(given)
            answer.json_schema = source
        return tool_grammar(message.chat, model, answer), check
    except GrammarError as error:
        violations.append((grammar_field(message), str(error)))
        return None, None


def grammar_field(message: generation_pb2.GenerateRequest) -> str:
    """Return the field that sets the grammar of a request: the answer's if it is set, else `chat.tools`."""
    if message.HasField("grammar"):
        return f"grammar.{message.grammar.WhichOneof('kind')}"
    return "json_schema" if message.json_schema else "chat.tools"


def _ending_marks(
    message: generation_pb2.GenerateRequest,
    grammar: model_pb2.Grammar,
    end_tokens: frozenset[int],
    stops: frozenset[int],
) -> Iterator[tuple[str, str]]:
    """Yield violations of a grammar whose marks are end tokens of the text. Unless the request sets these marks, they
    are those of reasoning. `stops`: the end tokens from stop strings."""
    is_own = message.grammar.HasField("after_token") or message.grammar.HasField("opening_token")
    for name in ("after_token", "opening_token"):
        closes = name == "after_token"
        mark = "closing_token" if closes else "opening_token"
        why = "the grammar would never apply" if closes else "a text that begins with it would end at once"
        token = getattr(grammar, name)
        if not grammar.HasField(name) or token not in end_tokens:
            continue
        if is_own:
            yield f"grammar.{name}", f"is {token}, which ends the text (stop, stop_tokens): {why}"
        elif token in stops or token in message.stop_tokens:
            field = "stop" if token in stops else "stop_tokens"
            yield field, f"contains the {mark.replace('_', ' ')} of the reasoning ({token}), which ends the text: {why}"
        else:
            yield f"reasoning.{mark}", f"is {token}, which ends the text: {why}"


def _unshown_stops(
    message: generation_pb2.GenerateRequest, model: ServedModel, reasoning: Reasoning | None
) -> frozenset[int]:
    """Return the hidden tokens (special tokens or marks of reasoning) whose text equals a stop string. They end the
    text like end tokens. Detokenisation searches for stop strings that merely contain the text of a hidden token
    (`StopStrings`)."""
    marks = () if reasoning is None else (reasoning.opening, reasoning.closing)
    found = {
        token
        for stop in message.stop
        if (token := model.tokenizer.added_token(stop)) is not None
        and (token in marks or token == model.tokenizer.special_token(stop))
    }
    return frozenset(token for token in found if token < model.vocabulary)  # the model never chooses others


def _check_stops(
    message: generation_pb2.GenerateRequest, model: ServedModel, violations: list[tuple[str, str]]
) -> None:
    for index, stop in enumerate(message.stop):
        if not 0 < len(stop) <= MAX_STOP_STRING_CHARACTERS:
            violations.append(
                (f"stop[{index}]", f"has {len(stop)} characters, must have 1 to {MAX_STOP_STRING_CHARACTERS}")
            )
            break
    violations += token_violations("stop_tokens", list(message.stop_tokens), model.vocabulary)
