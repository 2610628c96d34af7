"""Request bodies in OpenAI's format, parsed into gRPC messages, one per prompt.

No field is ignored silently (`fields.py`). The orchestrator validates values and limits; only the number of values is
limited here, since messages are built from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.client import build_request
from specdec.openai_api.constraints import constraint, grammar_names
from specdec.openai_api.conversation import conversation, tool_schemas
from specdec.openai_api.errors import ApiError, refused, unknown, unsupported, wrong
from specdec.openai_api.fields import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    FLAGS,
    LEAST,
    OF_CHAT,
    OF_COMPLETIONS,
    RENAMED,
    SAME,
    alike,
    check_names,
    flag,
    listed,
)
from specdec.v2.generation_pb2 import GenerateRequest

LONG = frozenset(
    {"allowed_token_ids", "messages", "prompt", "response_format", "specdec", "structured_outputs", "tools"}
)
"""Fields exempt from MAX_ENTRIES; the whole body has its own limits (`structure.py`)."""

OWN = frozenset(
    {
        "alpha",
        "amateur_temperature",
        "banned_tokens",
        "drafters",
        "expansion",
        "forced",
        "ignore_generation_config",
        "jacobi",
        "learn",
        "lookahead",
        "max_branches",
        "max_candidates",
        "max_depth",
        "max_nodes",
        "min_path_probability",
        "rejected_candidates",
        "rule",
        "scorer",
        "speculation",
        "split_reasoning",
        "tenant",
        "typical_delta",
        "typical_epsilon",
    }
)
"""Client options allowed in the field `specdec`, without counterparts in other servers."""

CHUNKS = "chunks"
"""Field of `specdec` that requests the tokens of every chunk, with their sources."""

COMPLETION_TOKENS = 16
"""OpenAI's default for max_tokens of a completion. A chat may fill the context."""

TEMPERATURE = 1.0
"""OpenAI's default temperature, used if neither the request nor the model's generation_config.json sets one."""

UNLIMITED = -1
"""llama.cpp's `n_predict` for a text that may fill the context."""

MAX_TOKENS = (1 << 31) - 1
"""More tokens than any context has: such a text ends where the context ends."""

MAX_ENTRIES = 4096
"""Maximum values in a list or object option, however nested; equal to the limit on logit biases."""

MAX_PROMPTS = 64
"""Maximum prompts of a completion request."""

PROMPT_FIELDS = {"text": "prompt", "tokens": "prompt", "tokens.ids": "prompt", "chat": "messages"}
"""Names of prompts in the gRPC API and its client, mapped to their names here."""

NEUTRAL_PENALTIES = {"repeat_penalty": 1, "repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0}
"""Values that turn off the penalties whose window llama.cpp limits by `repeat_last_n`."""

_OPTION = re.compile(r"(\w+)((\[\d+\])|(\.\w+))* = ")
"""The start of a client error about a single option."""


@dataclass(frozen=True)
class ParsedRequest:
    """One parsed request: one or more prompts, and options common to all of them."""

    chat: bool
    model: str
    prompts: list[GenerateRequest]
    """The prompts without options. They are built while parsing, since this may take seconds."""
    options: GenerateRequest
    """Options common to all prompts. They are merged in when a prompt is sent (`message`): they may be megabytes in
    size, and there may be many prompts."""
    names: Mapping[str, str]
    """Option and gRPC field names, mapped to the caller's names."""
    stream: bool
    usage_in_stream: bool
    """True if the stream ends with the usage."""
    usage_in_pieces: bool
    """True if each stream event has its choice's usage so far."""
    schemas: Mapping[str, Mapping[str, Any]]
    """The functions' argument schemas by name; empty if the prompt has no tools."""
    reasoning: bool = True
    """True if the answer includes the reasoning."""
    chunks: bool = False
    """True if the answer includes the tokens of its chunks."""
    ignored: tuple[str, ...] = ()
    """Names of unknown fields, for the answer."""
    echo: bool = False
    """True if the completions start with their prompts."""
    prompt_logprobs: int | None = None
    """Number of the prompts' top log-probabilities in vLLM's field; None: no such field."""

    places: Sequence[str] = ()
    """Each message's place in the caller's request, such as `instructions`, for errors; empty for chats."""

    def renamed(self, names: Mapping[str, str], places: Sequence[str]) -> ParsedRequest:
        """Return the request with the caller's names for further options, gRPC fields, and messages."""
        here = {field: names.get(name, name) for field, name in self.names.items()}
        return replace(self, names={**here, **names}, places=places)

    @property
    def samples(self) -> int:
        """Samples per prompt."""
        return max(1, self.options.n)

    @property
    def calls_tools(self) -> bool:
        """True if the text may contain tool calls to parse."""
        return len(self.prompts[0].chat.tools) > 0

    @property
    def forces_calls(self) -> bool:
        """True if the text consists of calls only."""
        chat = self.prompts[0].chat
        return chat.tool_required or bool(chat.tool_name)

    @property
    def token_ids(self) -> bool:
        """True if the answer has the token ids of the prompt and the text."""
        return self.options.return_prompt_token_ids

    @property
    def tells_end(self) -> bool:
        """True if log-probabilities cover the token that ends the text. In a chat they cover the content, as in
        OpenAI's API, so the end token counts only if the text shows it or, as in vLLM, if the answer has token ids."""
        options = self.options
        return not self.chat or self.token_ids or options.show_special_tokens or options.include_stop

    @property
    def logprobs(self) -> bool:
        return self.options.HasField("logprobs")

    @property
    def scores_prompts(self) -> bool:
        """True if the prompts' log-probabilities are computed."""
        return self.options.HasField("prompt_logprobs")

    def message(self, number: int) -> GenerateRequest:
        """Return the complete message for the prompt with this number."""
        message = GenerateRequest()
        message.CopyFrom(self.prompts[number])
        message.MergeFrom(self.options)
        return message


def parse_fields(fields: Mapping[str, Any], *, chat: bool, strict: bool = False) -> ParsedRequest:
    """Parse the fields of a chat or completion request; ApiError if they are invalid or unsupported. With `strict`,
    unknown fields are refused."""
    given = {name: value for name, value in fields.items() if value is not None}
    ignored = _check_names(given, chat=chat)
    for name in given.keys() - LONG:
        _check_entries(name, given[name])
    if isinstance(own := given.get("specdec"), dict):  # banned_tokens may be the whole vocabulary
        _check_entries("specdec", {name: value for name, value in own.items() if name != "banned_tokens"})
    options = {name: value for name, value in given.items() if name in SAME}
    options |= {
        RENAMED[name]: MAX_TOKENS if name == "n_predict" and alike(value, UNLIMITED) else value
        for name, value in given.items()
        if name in RENAMED
    }
    own_options = _own(given)
    names = _names(given, chat=chat)
    for name, value in options.items():
        field = names.get(name, name)
        if name in FLAGS and not isinstance(value, bool):  # protobuf would accept 1 as true, and true as 1
            raise wrong(field, value, "true or false")
        if isinstance(value, bool) and name not in FLAGS:
            raise wrong(field, value, "text" if name in ("model", "stop") else "a number")
        # a max_tokens of 0 is checked later: it is valid with prompt log-probabilities
        least = LEAST.get(name)
        if least is not None and isinstance(value, int) and value < (0 if name == "max_tokens" else least):
            raise wrong(field, value, f"at least {least}")
    if not chat:
        options.setdefault("max_tokens", COMPLETION_TOKENS)
    for read in (_seed, _top_k, _logit_bias, _special_tokens, _cache_salt, constraint):
        options |= dict(read(given))
    options |= dict(_logprobs(given, chat=chat))
    options |= dict(_prompt_logprobs(given, options))
    options |= own_options
    prompts = [_built(prompt, names) for prompt in ([conversation(given, ignored)] if chat else _prompts(given))]
    return ParsedRequest(
        chat=chat,
        model=given.get("model", ""),
        prompts=prompts,
        options=_built(options | {"fallback_temperature": TEMPERATURE}, names),
        names=names,
        stream=flag(given, "stream"),
        chunks=_chunks(given),
        **_stream_options(given),
        places=(),  # mypy would take it from the options above
        reasoning=flag(given, "include_reasoning", default=True),
        schemas=tool_schemas(given) if prompts[0].chat.tools else {},  # kept for the text's life, so only if needed
        ignored=listed(ignored, strict=strict),
        echo=flag(given, "echo"),
        prompt_logprobs=given.get("prompt_logprobs"),
    )


def _check_entries(name: str, value: object) -> None:
    """Refuse an option with too many values."""
    number, open_values = 0, [value]
    while open_values:
        found = open_values.pop()
        if isinstance(found, list | dict):
            number += len(found)
            if number > MAX_ENTRIES:
                raise refused(name, f"has {number} values or more, must have at most {MAX_ENTRIES}")
            open_values += found.values() if isinstance(found, dict) else found


def _check_names(given: Mapping[str, Any], *, chat: bool) -> list[str]:
    """Refuse unsupported and conflicting fields; return the names of unknown ones."""
    known, other = (CHAT_FIELDS, OF_COMPLETIONS) if chat else (COMPLETION_FIELDS, OF_CHAT)
    hints = dict.fromkeys(other, f"is a field of {'completions' if chat else 'chats'}")
    defaults = {"best_of": given.get("n", 1), "add_special_tokens": not chat, "echo": False}
    if all(alike(given.get(name, neutral), neutral) for name, neutral in NEUTRAL_PENALTIES.items()):
        defaults["repeat_last_n"] = given.get("repeat_last_n")
    given = {name: value for name, value in given.items() if not alike(value, defaults.get(name))}
    ignored = check_names(given, known, hints=hints)
    for name, option in RENAMED.items():
        for alias in [other for other in given if other != name and RENAMED.get(other, other) == option]:
            if name in given and not alike(given[name], given[alias]):
                raise refused(alias, f"conflicts with {name}, which means the same")
    return ignored


def _names(given: Mapping[str, Any], *, chat: bool) -> dict[str, str]:
    """Return the caller's names for options and fields with other names in the gRPC API."""
    names = dict(PROMPT_FIELDS) | {"template_arguments": "chat_template_kwargs"}
    names |= {"tool_name": "tool_choice", "tool_required": "tool_choice", "single_tool_call": "parallel_tool_calls"}
    names |= {RENAMED[name]: name for name in given if name in RENAMED}
    own_options = given.get("specdec", {})
    if "speculation" in own_options:  # a shorthand for these options
        names |= dict.fromkeys(("off", "drafters", "forced", "jacobi"), "specdec.speculation")
    names |= {name: f"specdec.{name}" for name in own_options}
    if "jacobi" in own_options:  # the size of a window
        names |= dict.fromkeys(("lookahead", "lookahead.window"), "specdec.jacobi")
    names |= grammar_names(given)
    if "prompt_logprobs" not in given:  # from `echo` with `logprobs`
        names["prompt_logprobs"] = "logprobs"
    return names | ({"logprobs": "top_logprobs", "prompt": "messages"} if chat else {})


def _built(options: Mapping[str, Any], names: Mapping[str, str]) -> GenerateRequest:
    """Build a message from options; ApiError, with the caller's names, for values that do not fit into it."""
    try:
        return build_request(**options)
    except (ValueError, TypeError) as error:
        message = str(error)
        if (found := _OPTION.match(message)) is None:  # about several options
            raise ApiError(400, message, code="invalid_value") from None
        option = found[1]
        name, path = names.get(option, option), found[0].removesuffix(" = ")
        param = name + path[len(option) :]
        raise ApiError(400, name + message[len(option) :], param=param, code="invalid_value") from None


def _seed(given: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the seed. OpenAI's seeds are signed 64-bit numbers, ours unsigned. As in vLLM and llama.cpp, -1 requests a
    random seed."""
    if "seed" in given:
        seed = given["seed"]
        if type(seed) is not int or not -(1 << 63) <= seed < 1 << 64:
            raise wrong("seed", seed, "a whole number from -2^63 to 2^64 - 1")
        if seed != -1:
            yield "seed", seed % (1 << 64)


def _cache_salt(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the cache salt. An empty one would not separate caches, so it is refused, as in vLLM."""
    if "cache_salt" in given:
        salt = given["cache_salt"]
        if not isinstance(salt, str) or not salt:
            raise wrong("cache_salt", salt, "text that is not empty")
        yield "cache_salt", salt


def _top_k(given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield top_k, with vLLM's -1 (keep all) mapped to 0."""
    if "top_k" in given:
        if type(given["top_k"]) is not int:
            raise wrong("top_k", given["top_k"], "a whole number")
        yield "top_k", 0 if given["top_k"] == -1 else given["top_k"]


def _logit_bias(given: Mapping[str, Any]) -> Iterator[tuple[str, dict[int, float]]]:
    """Yield the logit biases by token id; in JSON the ids are strings."""
    if "logit_bias" in given:
        bias = given["logit_bias"]
        if not isinstance(bias, dict):
            raise wrong("logit_bias", bias, "an object of token ids and biases")
        for token in bias:
            if not (token.isascii() and token.isdecimal() and len(token) < 11):
                raise refused("logit_bias", f"{token[:20]!r} is not a token id")
        yield "logit_bias", {int(token): value for token, value in bias.items()}


def _special_tokens(given: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Yield whether the text includes special tokens."""
    if not flag(given, "skip_special_tokens", default=True):
        yield "show_special_tokens", True


def _logprobs(given: Mapping[str, Any], *, chat: bool) -> Iterator[tuple[str, int]]:
    """Yield the number of top log-probabilities in addition to the chosen token's. Chats enable them by a separate
    flag."""
    name = "top_logprobs" if chat else "logprobs"
    top = given.get(name, 0)
    if type(top) is not int:
        of_chats = isinstance(top, bool) and not chat
        raise wrong(name, top, "a whole number" + (": false or true is for chats" if of_chats else ""))
    if not chat:
        if name in given:
            yield "logprobs", top
        return
    wanted = flag(given, "logprobs")
    if top and not wanted:
        raise refused(name, "needs logprobs: true")
    if wanted:
        yield "logprobs", top


def _prompt_logprobs(given: Mapping[str, Any], options: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the number of top log-probabilities for the prompts' tokens: the larger of vLLM's `prompt_logprobs` and,
    with `echo`, the number asked for the completions' tokens (`logprobs`). With `echo` and nothing to generate, prompts
    are always scored."""
    wanted: list[int] = []
    if (top := given.get("prompt_logprobs")) is not None:
        if type(top) is not int or top < 0:
            raise wrong("prompt_logprobs", top, "a whole number, at least 0")
        if flag(given, "stream"):
            raise refused("prompt_logprobs", "is not available in streams")
        wanted.append(top)
    if flag(given, "echo"):
        if given.get("truncate_prompt_tokens"):
            raise refused("truncate_prompt_tokens", "cannot be combined with echo")
        wanted += [options["logprobs"]] if "logprobs" in options else []
        wanted += [0] if options.get("max_tokens") == 0 else []
    if wanted:
        yield "prompt_logprobs", max(wanted)


def _own(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in the field `specdec`."""
    own = given.get("specdec", {})
    if not isinstance(own, dict):
        raise wrong("specdec", own, "an object")
    known = OWN | {CHUNKS}
    for name in own:
        if name not in known:
            raise unknown(f"specdec.{name}", f"unknown parameter, must be one of {', '.join(sorted(known))}")
    return {name: value for name, value in own.items() if name != CHUNKS}


def _chunks(given: Mapping[str, Any]) -> bool:
    """Return whether the answer includes the tokens of its chunks."""
    own = given.get("specdec", {})
    own = {name: value for name, value in own.items() if value is not None}
    chunks, rejected = (flag(own, name, where="specdec.") for name in (CHUNKS, "rejected_candidates"))
    if rejected and not chunks:
        raise refused("specdec.rejected_candidates", f"needs specdec.{CHUNKS}: true")
    return chunks


def _stream_options(given: Mapping[str, Any]) -> dict[str, bool]:
    """Return the attributes of ParsedRequest about usage in the stream."""
    options = given.get("stream_options", {})
    if not isinstance(options, dict):
        raise wrong("stream_options", options, "an object")
    if options and not given.get("stream"):
        raise refused("stream_options", "is for streams only: set stream")
    wanted = {name: value for name, value in options.items() if value is not None}
    for name in wanted:
        if name not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise unknown(f"stream_options.{name}")
    if flag(wanted, "include_obfuscation"):
        raise unsupported("stream_options.include_obfuscation")
    return {
        "usage_in_stream": flag(wanted, "include_usage"),
        "usage_in_pieces": flag(wanted, "continuous_usage_stats"),  # vLLM's
    }


def _prompts(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the prompts: a text, a list of texts, a list of token ids, or a list of lists of token ids."""
    prompt, forms = given.get("prompt"), "text, a list of token ids, or a list of either"
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if not isinstance(prompt, list):
        raise wrong("prompt", prompt, forms)
    mixed = refused("prompt", f"{'has other values' if prompt else 'is empty'}, must be {forms}")
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [{"tokens": prompt}]
    if kinds not in ({str}, {list}):
        raise mixed
    if len(prompt) > MAX_PROMPTS:
        raise refused("prompt", f"has {len(prompt)} prompts, must have at most {MAX_PROMPTS}")
    if kinds == {list} and not all(set(map(type, tokens)) <= {int} for tokens in prompt):
        raise mixed
    return [{"prompt" if kinds == {str} else "tokens": item} for item in prompt]
