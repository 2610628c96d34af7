"""The fields of OpenAI's, vLLM's and llama.cpp's requests, and how each is treated.

A field is honoured (`SAME`, `RENAMED`, `READ`), has no effect on tokens (`WITHOUT_EFFECT`), or is accepted only with
values that request the default behaviour (`UNSUPPORTED`). Fields in no table are ignored and listed in the answer; with
`--strict-fields` they are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from specdec.openai_api.errors import refused, unknown, unsupported, wrong

SAMPLING = frozenset({"min_p", "repetition_penalty", "temperature", "top_p", "typical_p"})
"""Sampling parameters that every API here accepts, besides `top_k`."""

SAME = SAMPLING | frozenset(
    {
        "bad_words",
        "frequency_penalty",
        "max_tokens",
        "min_tokens",
        "model",
        "n",
        "presence_penalty",
        "priority",
        "stop",
        "truncate_prompt_tokens",
    }
)
"""Fields equal to client options in name and meaning. Fields that OpenAI's API lacks have vLLM's names."""

RENAMED = {
    "allowed_token_ids": "allowed_tokens",
    "ignore_eos": "ignore_end_token",
    "include_stop_str_in_output": "include_stop",
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",  # llama.cpp's
    "repeat_penalty": "repetition_penalty",  # llama.cpp's
    "return_token_ids": "return_prompt_token_ids",  # gRPC always sends the text's token ids
    "stop_token_ids": "stop_tokens",
}
"""Fields equal to client options with another name."""

READ = frozenset(
    {
        "add_generation_prompt",
        "cache_salt",
        "chat_template_kwargs",
        "continue_final_message",
        "echo",
        "include_reasoning",
        "logit_bias",
        "logprobs",
        "messages",
        "parallel_tool_calls",
        "prompt",
        "prompt_logprobs",
        "reasoning_effort",
        "response_format",
        "seed",
        "skip_special_tokens",
        "specdec",
        "stream",
        "stream_options",
        "structured_outputs",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
    }
)
"""Fields read individually in `requests.py`, `conversation.py` and `constraints.py`."""

FLAGS = frozenset({"ignore_end_token", "include_stop", "return_prompt_token_ids"})
"""Client options that are true or false."""

LEAST = {"max_tokens": 1, "min_tokens": 0, "n": 1, "truncate_prompt_tokens": 1}
"""Client options that are whole numbers, and their minimum values."""

OF_CHAT = frozenset(
    {
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "include_reasoning",
        "messages",
        "parallel_tool_calls",
        "reasoning_effort",
        "tool_choice",
        "tools",
        "top_logprobs",
    }
)
OF_COMPLETIONS = frozenset({"echo", "prompt"})

CHAT_FIELDS = (SAME | READ | RENAMED.keys()) - OF_COMPLETIONS
COMPLETION_FIELDS = (SAME | READ | RENAMED.keys()) - OF_CHAT
"""All honoured fields of either API."""

WITHOUT_EFFECT = frozenset(
    {
        # about OpenAI's own accounts and caches
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "user",
        # about other servers' caches, logs and slots
        "cache_prompt",
        "id_slot",
        "n_cache_reuse",
        "n_keep",
        "request_id",
        "session_id",
        "verbose",
    }
)


@dataclass(frozen=True)
class Unsupported:
    """A field that is not supported."""

    accepted: tuple[object, ...] = ()  # values that request the default behaviour
    instead: str = ""  # what to use instead


_GUIDED = Unsupported(instead="use structured_outputs")
_ZERO = Unsupported((0,))
_ONE = Unsupported((1,))
_OFF = Unsupported((False,))
_THINKING = Unsupported((-1,), "if the template can turn thinking off, use chat_template_kwargs")

UNSUPPORTED: Mapping[str, Unsupported] = {
    # OpenAI's
    "audio": Unsupported(),
    "best_of": Unsupported(),  # except a value equal to `n`
    "function_call": Unsupported(("none",), "use tool_choice"),
    "functions": Unsupported(([],), "use tools"),
    "modalities": Unsupported((["text"],)),
    "moderation": Unsupported(),
    "prediction": Unsupported(),
    "service_tier": Unsupported(("auto", "default")),
    "store": Unsupported((False,), "use /v1/responses"),
    "suffix": Unsupported(("",)),
    "verbosity": Unsupported(("medium",)),
    "web_search_options": Unsupported(),
    # vLLM's
    "add_special_tokens": Unsupported(),
    "bad_words_token_ids": Unsupported(([],), "use specdec.banned_tokens"),
    "beam_width": _ONE,
    "chat_template": Unsupported(instead="the model's own is used, or the server's --chat-template"),
    "documents": Unsupported(([],)),
    "guided_choice": _GUIDED,
    "guided_decoding_backend": _GUIDED,
    "guided_grammar": _GUIDED,
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_whitespace_pattern": _GUIDED,
    "length_penalty": Unsupported((1.0,)),
    "logits_processors": Unsupported(([],)),
    "logprob_token_ids": Unsupported(([],), "use top_logprobs"),
    "lora_request": Unsupported(({},)),
    "num_beams": _ONE,
    "prompt_embeds": Unsupported(),
    "repetition_detection": Unsupported(),
    "return_tokens_as_token_ids": _OFF,
    "spaces_between_special_tokens": Unsupported((True,)),
    "thinking_token_budget": _THINKING,
    "truncation_side": Unsupported(("left",)),
    "use_beam_search": _OFF,
    "vllm_xargs": Unsupported(({},)),
    "watermarking": _OFF,
    # llama.cpp's
    "adaptive_target": Unsupported((-1,)),
    "dry_multiplier": _ZERO,
    "dynatemp_range": _ZERO,
    "grammar": Unsupported(instead="use structured_outputs.grammar"),
    "json_schema": Unsupported(instead="use response_format"),
    "lora": Unsupported(([],)),
    "min_keep": Unsupported((0, 1)),
    "mirostat": _ZERO,
    "n_cmpl": Unsupported((1,), "use n"),
    "n_indent": _ZERO,
    "n_probs": Unsupported((0,), "use logprobs"),
    "reasoning_budget_tokens": _THINKING,
    "repeat_last_n": Unsupported((-1,), "penalties look at the whole text"),  # accepted without penalties
    "samplers": Unsupported(),
    "t_max_predict_ms": _ZERO,
    "thinking_budget_tokens": _THINKING,
    "top_n_sigma": Unsupported((-1, 0)),
    "xtc_probability": _ZERO,
    # sampling parameters of further servers
    "epsilon_cutoff": _ZERO,
    "eta_cutoff": _ZERO,
    "no_repeat_ngram_size": _ZERO,
    "smoothing_factor": _ZERO,
    "tfs_z": _ONE,
    "top_a": _ZERO,
}

MAX_IGNORED = 32
MAX_NAME_CHARACTERS = 64
"""Maximum number of ignored fields listed in an answer, and maximum characters of each name."""


def check_names(
    given: Mapping[str, Any],
    known: Collection[str],
    *,
    hints: Mapping[str, str],
    without_effect: Collection[str] = WITHOUT_EFFECT,
    others: Mapping[str, Unsupported] = MappingProxyType({}),
) -> list[str]:
    """Refuse unsupported fields; return the names of unknown ones.

    `known` fields are read by the caller of this function. `hints` maps fields of other APIs to error messages;
    `others` are unsupported fields in addition to `UNSUPPORTED`.
    """
    ignored: list[str] = []
    for name, value in given.items():
        if name in known or name in without_effect:
            continue
        if name in hints:
            raise unsupported(name, hints[name])
        field = others.get(name) or UNSUPPORTED.get(name)
        if field is None:
            ignored.append(name)
        elif not any(alike(value, accepted) for accepted in field.accepted):
            raise unsupported(name, "is not supported" + (field.instead and f": {field.instead}"))
    return ignored


def listed(ignored: Sequence[str], *, strict: bool) -> tuple[str, ...]:
    """Return the names of ignored fields as an answer lists them; ApiError, with `strict`, if there are any."""
    if ignored and strict:
        raise unknown(ignored[0][:MAX_NAME_CHARACTERS])
    return tuple(name[:MAX_NAME_CHARACTERS] for name in ignored[:MAX_IGNORED])


def unread(given: Mapping[str, Any], place: str, known: Collection[str]) -> list[str]:
    """Return the names of an object's fields that are neither `known` nor null."""
    return [f"{place}.{name}" for name, value in given.items() if name not in known and value is not None]


def encodable(name: str, text: str) -> str:
    """Return a text; ApiError if it has a lone surrogate, which UTF-8 cannot encode."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise refused(name, "has a lone surrogate, must be Unicode text")
    return text


def flag(given: Mapping[str, Any], name: str, *, default: bool = False, where: str = "") -> bool:
    """Return a boolean field; ApiError for another value. In the error, `where` precedes the field's name."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise wrong(where + name, value, "true or false")
    return value


def alike(value: object, other: object) -> bool:
    """Return whether two values are equal in JSON, where true differs from 1, and 1 equals 1.0."""
    kinds = {type(value), type(other)}
    return value == other and (len(kinds) == 1 or kinds == {int, float})
