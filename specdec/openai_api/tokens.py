"""`/tokenize` and `/detokenize`: the tokens of a prompt and the text of tokens, in vLLM's format and in llama.cpp's,
where `content` is the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specdec.client.tokenized import Tokenized
from specdec.openai_api.errors import refused, unsupported, wrong
from specdec.openai_api.event_stream import ignored_header
from specdec.openai_api.fields import check_names, encodable, flag, listed
from specdec.openai_api.gateway import Gateway
from specdec.openai_api.json_text import Json, as_bytes, encoded, json_list, json_object
from specdec.openai_api.parsing import Intake, Parse
from specdec.openai_api.presence import while_present
from specdec.openai_api.requests import parse_fields
from specdec.openai_api.routes import OF_DETOKENIZE, OF_TOKENIZE
from specdec.v2.generation_pb2 import TokenizeRequest

FORMS = ("prompt", "messages", "content")
"""The fields of a prompt; a request has one of them."""

FLAGS: Mapping[str, Mapping[str, bool]] = {
    "prompt": {"add_special_tokens": True, "return_token_strs": False},
    "messages": {
        "add_generation_prompt": True,
        "add_special_tokens": False,
        "continue_final_message": False,
        "return_token_strs": False,
    },
    "content": {"add_special": False, "parse_special": True, "with_pieces": False},
}
"""The flags of each form, and their defaults."""

FIXED = {
    ("messages", "add_special_tokens"): "the chat template adds them",
    ("content", "parse_special"): "special tokens are always parsed",
}
"""Flags that must have their default value, and why."""

MAX_BODY_WITH_TEXTS = 32 << 10
"""Maximum bytes of a body that requests the text of each token. Decoding the tokens of such a body takes up to 30
ms."""

AT_ONCE = 1 << 14
"""Token ids encoded per slice, in a millisecond."""


@dataclass(frozen=True)
class AskedTokens:
    """A parsed request."""

    message: TokenizeRequest
    form: str
    names: Mapping[str, str]
    """Names of the message's fields, mapped to the caller's."""
    ignored: tuple[str, ...]


def parse_tokenize(fields: Mapping[str, Any], *, strict: bool = False) -> AskedTokens:
    """Parse the fields of a body of /tokenize; ApiError if they are invalid."""
    given = {name: value for name, value in fields.items() if value is not None}
    forms = [form for form in FORMS if form in given]
    if len(forms) != 1:
        raise refused(forms[1] if forms else "prompt", f"give exactly one of {', '.join(FORMS)}")
    form = forms[0]
    flags = FLAGS[form]
    others = {"chat_template_kwargs", "tools"} if form == "messages" else set()
    known = {form, "model", *flags, *others}
    ignored = check_names(given, known, hints=dict.fromkeys(OF_TOKENIZE - known, f"cannot be combined with {form}"))
    values = {name: flag(given, name, default=default) for name, default in flags.items()}
    for name, value in values.items():
        if value is not flags[name] and (form, name) in FIXED:
            raise unsupported(name, f"must be {encoded(flags[name])}: {FIXED[form, name]}")
    pieces = values["with_pieces" if form == "content" else "return_token_strs"]
    message = TokenizeRequest(model=_model(given), pieces=pieces)
    names: Mapping[str, str] = {"text": form}
    if form == "messages":
        of_chat = {name: given[name] for name in ("messages", *others) if name in given}
        of_chat |= {name: values[name] for name in ("add_generation_prompt", "continue_final_message") if name in given}
        parsed = parse_fields(of_chat, chat=True)
        ignored += parsed.ignored
        names = parsed.names
        message.chat.CopyFrom(parsed.message(0).chat)
    else:
        if not isinstance(given[form], str):
            raise wrong(form, given[form], "text")
        message.text = encodable(form, given[form])
        message.add_special = values["add_special_tokens" if form == "prompt" else "add_special"]
    return AskedTokens(message, form, names, listed(ignored, strict=strict))


def parse_detokenize(fields: Mapping[str, Any], *, strict: bool = False) -> AskedTokens:
    """Parse the fields of a body of /detokenize; ApiError if they are invalid."""
    given = {name: value for name, value in fields.items() if value is not None}
    ignored = check_names(given, OF_DETOKENIZE, hints={})
    tokens = given.get("tokens")
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < 1 << 32 for token in tokens):
        raise refused("tokens", "must be a list of token ids")
    message = TokenizeRequest(model=_model(given), text_of_tokens=True)
    message.tokens.ids[:] = tokens
    message.tokens.SetInParent()  # marks an empty list as this form
    return AskedTokens(message, "tokens", {"tokens.ids": "tokens"}, listed(ignored, strict=strict))


def _model(given: Mapping[str, Any]) -> str:
    model = given.get("model", "")
    if not isinstance(model, str):
        raise wrong("model", model, "text")
    return encodable("model", model)


class Tokens:
    """Serves `/tokenize` and `/detokenize`."""

    def __init__(
        self,
        gateway: Gateway,
        intake: Intake,
    ) -> None:
        self._gateway = gateway
        self._intake = intake

    async def tokenize(self, http: Request) -> Response:
        return await self._answered(http, parse_tokenize)

    async def detokenize(self, http: Request) -> Response:
        return await self._answered(http, parse_detokenize)

    async def _answered(self, http: Request, parse: Parse[AskedTokens]) -> Response:
        taken = await self._intake.take(http, parse)
        asked = taken.request
        if asked.message.pieces and taken.size > MAX_BODY_WITH_TEXTS:
            field = "with_pieces" if asked.form == "content" else "return_token_strs"
            raise refused(field, f"must be false for a body of more than {MAX_BODY_WITH_TEXTS >> 10} KiB")
        found = await while_present(http.receive, self._gateway.tokenized(asked.message, asked.names, taken.caller))
        answer = await self._intake.parser.parse(len(found.ids), partial(_answer, asked, found), taken.owner)
        return Response(answer, headers=ignored_header(asked.ignored), media_type="application/json")


def _answer(asked: AskedTokens, found: Tokenized) -> bytes:
    """Return the answer as JSON."""
    own: Json = {"specdec": {"ignored": list(asked.ignored)}} if asked.ignored else {}
    if asked.form == "tokens":  # the text, under vLLM's and llama.cpp's names
        return as_bytes(encoded({"prompt": found.text, "content": found.text, **own}))
    if asked.form == "content":
        if asked.message.pieces:
            pairs = zip(found.ids, found.pieces, strict=True)
            parts = [encoded({"id": token, "piece": _piece(piece.bytes)}) for token, piece in pairs]
            return as_bytes(json_object(own, {"tokens": json_list(parts)}))
        return as_bytes(json_object(own, {"tokens": _encoded_ids(found.ids)}))
    texts = json_list(encoded(piece.text) for piece in found.pieces) if asked.message.pieces else "null"
    counts = {"count": found.count, "max_model_len": found.context_tokens, **own}
    return as_bytes(json_object(counts, {"tokens": _encoded_ids(found.ids), "token_strs": texts}))


def _piece(spelt: bytes) -> str | list[int]:
    """Return a token's text, or its bytes if they are not whole characters, as llama.cpp does."""
    try:
        return spelt.decode()
    except UnicodeDecodeError:
        return list(spelt)


def _encoded_ids(ids: list[int]) -> str:
    slices = (ids[at : at + AT_ONCE] for at in range(0, len(ids), AT_ONCE))
    return json_list(",".join(map(str, part)) for part in slices)
