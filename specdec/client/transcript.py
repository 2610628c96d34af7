"""What a stream has delivered, and so what is missing when it breaks. Makes no calls itself."""

from __future__ import annotations

import grpc

from specdec.client.completion import Chunk, read_chunk
from specdec.client.errors import ServerError, from_rpc
from specdec.client.retries import Retries
from specdec.v1.generation_pb2 import GenerateRequest, GenerateResponse


class Transcript:
    """One stream's account: a request that always asks for exactly what has not arrived yet.

    The tokens a server was given as generated, and the seed, determine the rest of the text, so a
    stream of one sample can go on anywhere. Several samples cannot be told in one request: there
    only a call that has delivered nothing is tried again.
    """

    def __init__(self, request: GenerateRequest, retries: Retries) -> None:
        self._request = request
        self._retries = retries
        self._single = request.n <= 1
        self._unfinished = max(1, request.n)
        self._empty = True
        self._before_seconds = 0.0

    def take(self, response: GenerateResponse) -> Chunk:
        """Enter a response."""
        if response.HasField("seed"):
            self._request.sampling.seed = response.seed
        if not self._empty:
            response.ClearField("seed")  # a server that resumes says it again
        chunk = read_chunk(response, before_seconds=self._before_seconds)
        if chunk.tokens:
            self._retries.progressed()
        if chunk.finish is not None:
            self._unfinished -= 1
        if self._single:
            self._request.generated_tokens.extend(chunk.tokens)
        self._empty = False
        return chunk

    def end(self) -> None:
        """The server closed the stream; raises if something is missing."""
        if self._unfinished > 0:
            raise ServerError("the stream ended before the completion did", code=grpc.StatusCode.INTERNAL)

    def pause(self, error: grpc.RpcError) -> float | None:
        """Seconds to wait before asking for the rest; None if nothing is missing.

        Raises the error where the stream cannot go on.
        """
        if self._unfinished <= 0:
            return None  # the caller has it all: how the connection ended is of no interest
        if not self._empty and not (self._single and self._request.sampling.HasField("seed")):
            raise from_rpc(error) from error
        return self._retries.pause(error)

    def ask(self) -> tuple[GenerateRequest, float | None]:
        """The request to send now, and the seconds it may take."""
        self._before_seconds = self._retries.seconds_passed
        return self._request, self._retries.seconds_left
