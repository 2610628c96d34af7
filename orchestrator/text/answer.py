"""The answer to Complete, collected from the responses of its samples."""

from __future__ import annotations

from collections import defaultdict

from specdec.serving.errors import InvalidRequestError
from specdec.serving.validation import MAX_ANSWER_BYTES
from specdec.v2 import generation_pb2


class CompleteAnswer:
    """Collects responses. Texts are joined once, at the end: appending to a message's string copies all of it."""

    def __init__(self, seed: int, samples: int) -> None:
        self._message = generation_pb2.CompleteResponse(seed=seed)
        for _ in range(samples):
            self._message.completions.add()
        self._reasoning: defaultdict[int, list[str]] = defaultdict(list)  # pieces, by sample
        self._text: defaultdict[int, list[str]] = defaultdict(list)
        self._size = 0  # bytes of all responses

    def add(self, response: generation_pb2.GenerateResponse) -> None:
        """Add a response; InvalidRequestError if the answer becomes too long for one message."""
        self._size += response.ByteSize()
        if self._size > MAX_ANSWER_BYTES:
            limit = f"{MAX_ANSWER_BYTES >> 20} MiB, the limit of one message"
            field = "prompt_logprobs" if response.prompt else "max_tokens"
            raise InvalidRequestError([(field, f"the response is longer than {limit}: use Generate")])
        if response.HasField("resolved"):
            self._message.resolved.CopyFrom(response.resolved)
        self._message.prompt.extend(response.prompt)
        completion = self._message.completions[response.index]
        self._reasoning[response.index].append(response.reasoning)
        self._text[response.index].append(response.text)
        completion.reasoning_tokens += response.reasoning_tokens
        completion.tokens.extend(response.tokens)
        completion.sources.extend(response.sources)
        completion.logprobs.extend(response.logprobs)
        completion.rejected.extend(response.rejected)
        if response.HasField("finish"):
            completion.finish.CopyFrom(response.finish)

    def message(self) -> generation_pb2.CompleteResponse:
        """Return the answer; called after the last response."""
        for index, completion in enumerate(self._message.completions):
            completion.reasoning, completion.text = "".join(self._reasoning[index]), "".join(self._text[index])
        return self._message
