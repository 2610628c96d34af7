"""Request and result of `tokenize`: a prompt as the model's tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec.client.completion import Piece
from specdec.client.request import build_request
from specdec.v2 import generation_pb2 as pb


@dataclass(frozen=True)
class Tokenized:
    """The tokens of a prompt."""

    ids: list[int]
    pieces: list[Piece]  # of each token, if requested
    context_tokens: int  # longest text of the model, prompt included
    text: str = ""  # of the tokens, if requested, with special tokens

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.ids)


def build_tokenize_request(
    model: str | None, add_special: bool | None, pieces: bool, text: bool, **prompt: Any
) -> pb.TokenizeRequest:
    """Return the message; ValueError or TypeError for a value that does not fit. `prompt`: the options of
    `build_request` for the prompt."""
    asked = build_request(**prompt, model=model)
    request = pb.TokenizeRequest(model=asked.model, add_special=add_special, pieces=pieces, text_of_tokens=text)
    match asked.WhichOneof("prompt"):
        case "text":
            request.text = asked.text
        case "tokens":
            request.tokens.CopyFrom(asked.tokens)
        case "chat":
            request.chat.CopyFrom(asked.chat)
    return request


def read_tokenized(response: pb.TokenizeResponse) -> Tokenized:
    """Convert the answer of `Tokenize`."""
    pieces = [Piece(piece.text, piece.bytes) for piece in response.pieces]
    return Tokenized(list(response.ids), pieces, response.context_tokens, response.text)
