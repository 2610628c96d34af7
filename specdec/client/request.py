"""Conversion of a request's options to a message.

Values are not validated here, since the server knows the model and its limits. Only a value that does not fit into the
message is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar, Unpack, cast

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from specdec.client.options import GenerateOptions, takes_options
from specdec.v2 import generation_pb2 as pb
from specdec.v2 import model_pb2
from specdec.wire.speculation import DRAFTERS, SCORERS, SPECULATIONS


def put(message: Message, field: str, option: str, value: object) -> None:
    """Set a field of any kind. ValueError or TypeError, naming the option, if the value does not fit."""
    descriptor = cast("FieldDescriptor", message.DESCRIPTOR.fields_by_name[field])
    is_number = descriptor.type not in (FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_STRING)
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else [value]
    if is_number and any(isinstance(item, bool) for item in values):  # protobuf would accept True and False as 1 and 0
        raise TypeError(f"{option} = {_shown(value)}: must be a number")
    if isinstance(value, str | bytes | Mapping) and descriptor.is_repeated and descriptor.message_type is None:
        raise TypeError(f"{option} = {_shown(value)}: {_wanted(descriptor)}")  # not its characters or keys
    try:
        message.MergeFrom(type(message)(**{field: value}))
    except UnicodeEncodeError as error:
        place = f"character {error.start + 1} cannot be encoded"
        raise ValueError(f"{option} = {_shown(value)}: is not valid UTF-8: {place}") from error
    except (ValueError, TypeError, OverflowError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{option} = {_shown(value)}: {_wanted(descriptor) or error}") from error


_WHOLE_NUMBERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def _wanted(field: FieldDescriptor) -> str:
    """Return what a field accepts, since protobuf's own errors describe Python types; "" for a message."""
    if field.message_type is None:
        item = _item(field)
        return f"must be a list, each item {item}" if field.is_repeated else f"must be {item}"
    if field.message_type.GetOptions().map_entry:
        key, value = map(_item, field.message_type.fields)
        return f"must be a mapping, each key {key}, each value {value}"
    return ""


def _item(field: FieldDescriptor) -> str:
    if field.cpp_type in _WHOLE_NUMBERS:
        least, most = _WHOLE_NUMBERS[field.cpp_type]
        return f"a whole number from {least} to {most}"
    if field.type == FieldDescriptor.TYPE_BOOL:
        return "true or false"
    return "text (str)" if field.type == FieldDescriptor.TYPE_STRING else "a number"


MAX_SHOWN_CHARACTERS = 120


def _shown(value: object) -> str:
    """Return a value for an error, shortened; as JSON if possible, since callers of the HTTP API read it too."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        text = repr(value)
    text = text.encode("utf-8", "backslashreplace").decode()  # surrogates could not be sent
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}..."


Value = TypeVar("Value")

_RULES = {
    "coupled": model_pb2.ACCEPTANCE_RULE_COUPLED,
    "rejection": model_pb2.ACCEPTANCE_RULE_REJECTION,
    "contrastive": model_pb2.ACCEPTANCE_RULE_CONTRASTIVE,
    "typical": model_pb2.ACCEPTANCE_RULE_TYPICAL,
}
# Options stored in a field of the same name: of the request, and of its parts.
_PLAIN = {
    "model", "max_tokens", "min_tokens", "stop_tokens", "ignore_end_token", "ignore_generation_config", "n", "logprobs",
    "fallback_temperature", "generated_tokens", "tenant", "priority", "model_fingerprint", "prompt_digest",
    "prompt_logprobs", "show_special_tokens", "include_stop", "return_prompt_token_ids", "truncate_prompt_tokens",
    "rejected_candidates", "cache_salt", "learn",
}  # fmt: skip
_PARTS = {
    **dict.fromkeys(pb.SamplingParameters.DESCRIPTOR.fields_by_name, "sampling"),
    **dict.fromkeys(("alpha", "amateur_temperature"), "contrast"),
    **dict.fromkeys(("typical_epsilon", "typical_delta"), "typicality"),
    **dict.fromkeys(("forced", "max_candidates", "max_depth", "max_branches", "max_nodes"), "speculation"),
    **dict.fromkeys(("min_path_probability", "expansion"), "speculation"),
}

_GRAMMARS = ("json_schema", "regex", "lark", "choice")

_TURN_FIELDS = {"role", "content", "reasoning", "tool_calls", "tool_call_id", "name"}
_TURN = 'a mapping with "role" and "content", and perhaps "reasoning", "tool_calls", "tool_call_id", "name"'


@takes_options
def build_request(prompt: str | None = None, **options: Unpack[GenerateOptions]) -> pb.GenerateRequest:
    """Return the message for a prompt and its options; ValueError or TypeError for a value that does not fit."""
    given = {name: value for name, value in {"prompt": prompt, **options}.items() if value is not None}
    prompts = given.keys() & {"prompt", "tokens", "messages"}
    if len(prompts) > 1:
        raise ValueError(f"a request has one prompt, not several: {', '.join(sorted(prompts))}")
    for name in ("time", "template_arguments", "tools", "add_generation_prompt", "continue_final_message"):
        if name in given and "messages" not in given:
            raise ValueError(f"{name} is given, but no messages: only chat templates use it")
    for name in ("tool_choice", "parallel_tool_calls"):
        if name in given and "tools" not in given:
            raise ValueError(f"{name} is given, but no tools")
    if "speculation" in given and "drafters" in given:
        raise ValueError("give either speculation or drafters: both select drafters")
    if "lookahead" in given and "jacobi" in given:
        raise ValueError("give either lookahead or jacobi: both are the size of the window")
    if "allowed_tokens" in given and not given["allowed_tokens"]:  # in the message, an empty list means all tokens
        raise ValueError("allowed_tokens = []: allows no token, must have at least one")
    if (n := given.get("n")) is not None and isinstance(n, int) and n < 1:
        raise ValueError(f"n = {n}: must be at least 1")  # in the message, 0 means unset
    grammars = [name for name in _GRAMMARS if name in given]
    if len(grammars) > 1:
        raise ValueError(f"a request has one grammar, not several: {', '.join(grammars)}")
    if "grammar_after_token" in given and not grammars:
        raise ValueError(f"grammar_after_token is given, but none of {', '.join(_GRAMMARS)}")
    request = pb.GenerateRequest()
    for name, value in given.items():
        if name in _PLAIN:
            put(request, name, name, value)
        elif name in _PARTS:
            put(getattr(request, _PARTS[name]), name, name, value)
        elif name in _GRAMMARS:
            _put_grammar(request.grammar, name, value)
        elif name == "grammar_after_token":
            put(request.grammar, "after_token", name, value)
        elif name == "split_reasoning":
            if not _flag(name, value):
                request.reasoning.none = True
        elif name == "prompt":
            put(request, "text", name, value)
        elif name == "tokens":
            request.tokens.SetInParent()  # marks an empty prompt as tokens
            put(request.tokens, "ids", name, value)
        elif name == "messages":
            request.chat.SetInParent()
            request.chat.messages.extend(_turns(value))
        elif name == "time":
            if not isinstance(value, datetime) or value.tzinfo is None:
                raise ValueError(f"time = {_shown(value)}: not a datetime with a time zone")
            try:
                request.chat.time.FromDatetime(value)
            except OverflowError:
                raise ValueError(f"time = {_shown(value)}: not in the years 1 to 9999 in UTC") from None
        elif name == "template_arguments":
            _put_arguments(request.chat, value)
        elif name == "continue_final_message":
            request.chat.continue_final_message = _flag(name, value)
        elif name == "add_generation_prompt":
            request.chat.no_generation_prompt = not _flag(name, value)
        elif name == "tools":
            put_tools(pb.ChatPrompt() if given.get("tool_choice") == "none" else request.chat, value)
        elif name == "tool_choice":
            put_tool_choice(request.chat, value)
        elif name == "parallel_tool_calls":
            request.chat.single_tool_call = not _flag(name, value) and given.get("tool_choice") != "none"
        elif name == "stop":  # a single string, not a sequence of characters
            put(request, name, name, [value] if isinstance(value, str) else value)
        elif name == "speculation":
            request.speculation.MergeFrom(_named(SPECULATIONS, name, value))
        elif name == "drafters":
            if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
                raise ValueError(f"drafters = {_shown(value)}: not a list of names")
            found = [_named(DRAFTERS, name, drafter) for drafter in value]
            if not found:
                raise ValueError("drafters = []: use speculation='off' for no drafters")
            request.speculation.drafters.extend(found)
        elif name == "lookahead":
            if not isinstance(value, Sequence) or len(value) != 3:
                raise ValueError(f"lookahead = {_shown(value)}: not (W, N, G)")
            put(request.speculation, name, name, dict(zip(("window", "ngram", "guesses"), value, strict=True)))
        elif name == "jacobi":
            put(request.speculation.lookahead, "window", name, value)
            request.speculation.lookahead.ngram, request.speculation.lookahead.guesses = 2, 1
        elif name == "scorer":
            request.speculation.scorer = _named(SCORERS, name, value)
        elif name == "rule":
            put(request, name, name, _named(_RULES, name, value))
        else:
            raise TypeError(f"unknown option: {name}")
    return request


def _flag(option: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{option} = {_shown(value)}: must be true or false")
    return value


def _put_grammar(grammar: model_pb2.Grammar, kind: str, value: object) -> None:
    """Set the grammar; a schema given as a mapping is encoded as JSON."""
    if kind == "choice":
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(f"choice = {_shown(value)}: must be a list of texts")
        grammar.choice.SetInParent()
        put(grammar.choice, "texts", kind, value)
        return
    if kind == "json_schema" and isinstance(value, Mapping):
        try:
            value = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"json_schema = {_shown(value)}: {error}") from error
    put(grammar, kind, kind, value)


def _put_arguments(chat: pb.ChatPrompt, arguments: object) -> None:
    """Set the arguments of the chat template; TypeError or ValueError if JSON cannot represent them."""
    if not isinstance(arguments, Mapping):
        raise TypeError(f"template_arguments = {_shown(arguments)}: must be a mapping")
    try:
        chat.template_arguments.update(arguments)
        chat.FromString(chat.SerializeToString())  # fails here if it would fail at the server
    except (ValueError, TypeError, OverflowError, DecodeError) as error:
        raise ValueError(f"template_arguments = {_shown(arguments)}: {error}") from error
    except RecursionError:  # formatting the value would recurse as well
        raise ValueError("template_arguments = ...: are nested too deeply") from None


def _turns(messages: object) -> Iterator[pb.ChatMessage]:
    """Yield the turns of a conversation; TypeError or ValueError naming the first invalid one."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        raise TypeError(f"messages = {_shown(messages)}: must be a list, each item {_TURN}")
    for index, message in enumerate(messages):
        option = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise TypeError(f"{option} = {_shown(message)}: must be {_TURN}")
        if not {"role", "content"} <= message.keys() <= _TURN_FIELDS:
            raise ValueError(f"{option} = {_shown(message)}: must be {_TURN}")
        turn = pb.ChatMessage()
        for field, value in message.items():
            if field == "tool_calls":
                put_tool_calls(turn, f"{option}.{field}", value)
                continue
            put(turn, field, f"{option}.{field}", value)
            if value is None:  # a message would treat None as an absent field
                raise TypeError(f"{option}.{field} = null: must be text (str)")
        yield turn


def _named(values: Mapping[str, Value], option: str, name: object) -> Value:
    if not isinstance(name, str) or name not in values:
        raise ValueError(f"{option} = {_shown(name)}: not one of {', '.join(values)}")
    return values[name]


_OF_A_FUNCTION = ("type", "function")


def put_tools(chat: pb.ChatPrompt, tools: object) -> None:
    """Set the functions; TypeError or ValueError naming the problem."""
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Iterable):
        raise TypeError(f"tools = {_shown(tools)}: must be a list of functions")
    for index, tool in enumerate(tools):
        option = f"tools[{index}]"
        function = _function(tool, option, "name", "description", "parameters", "strict")
        _check_fields(tool, option, _OF_A_FUNCTION)
        message = chat.tools.add()
        for field in ("name", "description", "strict"):
            put(message, field, f"{option}.function.{field}", function.get(field))
        if function.get("parameters") is not None:
            where = f"{option}.function.parameters"
            put(message, "parameters", where, _json(function["parameters"], where))


def put_tool_choice(chat: pb.ChatPrompt, choice: object) -> None:
    """Set whether functions may or must be called; ValueError for an unknown choice."""
    if isinstance(choice, Mapping):
        function = _function(choice, "tool_choice", "name")
        _check_fields(choice, "tool_choice", _OF_A_FUNCTION)
        put(chat, "tool_name", "tool_choice.function.name", function.get("name"))
    elif choice == "required":
        chat.tool_required = True
    elif choice not in ("auto", "none"):
        raise ValueError(f"tool_choice = {_shown(choice)}: not one of auto, none, required, or a function")


def put_tool_calls(turn: pb.ChatMessage, option: str, calls: object) -> None:
    """Set the calls of a turn; arguments are JSON text or a mapping. TypeError or ValueError naming the problem."""
    if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Iterable):
        raise TypeError(f"{option} = {_shown(calls)}: must be a list of calls")
    for index, call in enumerate(calls):
        name = f"{option}[{index}]"
        function = _function(call, name, "name", "arguments")
        message = turn.tool_calls.add()
        put(message, "id", f"{name}.id", call.get("id"))
        put(message, "name", f"{name}.function.name", function.get("name"))
        given, where = function.get("arguments", "{}"), f"{name}.function.arguments"
        put(message, "arguments", where, given if isinstance(given, str) else _json(given, where))


def _function(given: object, option: str, *fields: str) -> Mapping[str, Any]:
    """Return the `function` part of a tool or a call, checked to have only these fields."""
    if not isinstance(given, Mapping) or given.get("type", "function") != "function":
        raise ValueError(f'{option} = {_shown(given)}: must have the type "function"')
    function = given.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"{option}.function = {_shown(function)}: must have a name")
    _check_fields(function, f"{option}.function", fields)
    return function


def _check_fields(given: Mapping[str, Any], option: str, known: Iterable[str]) -> None:
    for field, value in given.items():
        if field not in known and value is not None:
            raise ValueError(f"{option}.{field} = {_shown(value)}: not one of {', '.join(known)}")


def _json(value: object, option: str) -> str:
    """Return the JSON of an object."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{option} = {_shown(value)}: must be an object")
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{option} = {_shown(value)}: {error}") from error
