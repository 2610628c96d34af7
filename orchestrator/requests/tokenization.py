"""Tokenize: the tokens of a prompt, without generating a text."""

from __future__ import annotations

from orchestrator.requests.model import ServedModel
from orchestrator.requests.parsing import parse
from specdec.serving.errors import InvalidRequestError
from specdec.v2 import generation_pb2


def tokenize(message: generation_pb2.TokenizeRequest, model: ServedModel) -> generation_pb2.TokenizeResponse:
    """Return the tokens of a prompt. It is parsed like a request for a completion, so both calls give the same tokens
    and refuse the same prompts."""
    asked = generation_pb2.GenerateRequest(model=message.model)
    match message.WhichOneof("prompt"):
        case "text":
            asked.text = message.text
        case "tokens":
            asked.tokens.CopyFrom(message.tokens)
        case "chat":
            asked.chat.CopyFrom(message.chat)
    bare = message.HasField("add_special")
    if bare and message.WhichOneof("prompt") != "text":
        raise InvalidRequestError([("add_special", "is set, may be set only with text")])
    ids: list[int] = parse(asked, model).samples[0].prompt
    if bare and not message.add_special:
        ids = model.tokenizer.encode(message.text, special=False)
    pieces = [model.tokenizer.piece(token) for token in ids] if message.pieces else []
    return generation_pb2.TokenizeResponse(
        ids=ids,
        pieces=[generation_pb2.TokenPiece(text=piece.decode(errors="replace"), bytes=piece) for piece in pieces],
        count=len(ids),
        context_tokens=model.context,
        text=model.tokenizer.decode(ids, special=True) if message.text_of_tokens else "",
    )
