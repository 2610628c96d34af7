"""The client: typed, synchronous or asyncio, with grpcio and protobuf as its only dependencies.

    with Client("localhost:50050") as client:
        print(client.complete("def main", max_tokens=64).text)
        with client.generate("def main", max_tokens=64) as stream:
            for chunk in stream:
                print(chunk.text, end="")

If its server fails, a stream resumes on another one: the caller sees a pause, but no repeated or missing text. Only
`specdec.client` itself is public; the modules below it may move.
"""

from specdec.client.aio import AsyncClient, AsyncStream
from specdec.client.completion import (
    Chunk,
    Completion,
    Finish,
    Logprobs,
    Model,
    Piece,
    PromptToken,
    ReasoningPosition,
    Rejected,
    Resolved,
    Result,
    SchemaCheck,
    Speculation,
    SpeculationDecisions,
    SpeculationLimits,
)
from specdec.client.errors import (
    AccessDenied,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    PromptChanged,
    ServerError,
    SpecdecError,
    Unavailable,
    Unimplemented,
)
from specdec.client.options import GenerateOptions, Message
from specdec.client.request import build_request
from specdec.client.sync import Client, Stream
from specdec.client.tokenized import Tokenized

__all__ = [
    "AccessDenied",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Chunk",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Finish",
    "GenerateOptions",
    "InvalidRequest",
    "Logprobs",
    "Message",
    "Model",
    "NotFound",
    "Overloaded",
    "Piece",
    "PromptChanged",
    "PromptToken",
    "ReasoningPosition",
    "Rejected",
    "Resolved",
    "Result",
    "SchemaCheck",
    "ServerError",
    "SpecdecError",
    "Speculation",
    "SpeculationDecisions",
    "SpeculationLimits",
    "Stream",
    "Tokenized",
    "Unavailable",
    "Unimplemented",
    "build_request",
]
