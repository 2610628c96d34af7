"""The transcript of a stream: what was delivered, and the request for the rest after a failure. It makes no calls.

Its tally adds up the speculation statistics of the interrupted parts. A server counts from the position where it
resumed the text, and reports at the end. For an interrupted part, only the statistics in its chunks are known.
"""

from __future__ import annotations

import grpc

from specdec.client.completion import Chunk, read_chunk
from specdec.client.errors import ServerError, SpecdecError, Unavailable, from_rpc, is_loss, read
from specdec.client.retries import Retries
from specdec.v2.generation_pb2 import GenerateRequest, GenerateResponse, ResolvedRequest, SpeculationStatistics
from specdec.wire.decisions import add_decisions
from specdec.wire.sources import accepted_candidates, accepted_histogram, histogram_entries, source_name


class Transcript:
    """The state of one stream: provides a request for exactly the part that has not arrived yet.

    The generated tokens and the seed determine the rest of the text, so a stream of one sample can resume on any server
    of the same model. A request cannot carry the tokens of several samples, so their stream is only retried before its
    first response.
    """

    def __init__(self, request: GenerateRequest, retries: Retries) -> None:
        self._request = request
        self._retries = retries
        self._samples = max(1, request.n)
        self._unfinished = self._samples
        self._empty = True
        self._resumed = False
        self._prompt_tokens = 0  # tokens of the prompt received
        self._repeated = 0  # how many of these will arrive again after a retry
        self._tally = Tally()
        self._before_seconds = 0.0

    def record(self, response: GenerateResponse | None) -> Chunk:
        """Record a response and return its chunk; ServerError if it is invalid."""
        return read(self._record, response)

    def _record(self, response: GenerateResponse) -> Chunk:
        if response.HasField("seed"):
            self._request.sampling.seed = response.seed
        if response.model_fingerprint:
            self._request.model_fingerprint = response.model_fingerprint
        if self._empty and self._samples == 1:
            _make_explicit(self._request, response.resolved)
        if not self._empty and self._samples == 1:  # a server that resumes the text sends the defaults again
            response.ClearField("resolved")
        if not self._empty:
            response.ClearField("seed")
            response.ClearField("model_fingerprint")
            response.ClearField("prompt_token_ids")
        if self._repeated and response.prompt:
            repeated = min(self._repeated, len(response.prompt))
            self._repeated -= repeated
            del response.prompt[:repeated]
        self._prompt_tokens += len(response.prompt)
        if self._samples == 1:
            self._request.generated_tokens.extend(response.tokens)
            self._tally.count(response)
        if response.tokens or response.prompt:
            self._retries.progressed()
        if response.tokens:  # the prompt is complete
            self._request.ClearField("prompt_logprobs")
        if response.HasField("finish"):
            self._unfinished -= 1
            if self._resumed and self._request.learn:  # a draft of the interrupted part may have kept that
                response.finish.kept_for_learning = True
        self._empty = False
        return read_chunk(response, before_seconds=self._before_seconds)

    @property
    def is_complete(self) -> bool:
        """True once every sample has its finish."""
        return self._unfinished <= 0

    def end(self) -> None:
        """Note that the server closed the stream; ServerError if something is missing."""
        if self._unfinished > 0:
            raise ServerError("the stream ended before the completion did", code=grpc.StatusCode.INTERNAL)

    def pause(self, error: grpc.RpcError) -> float | None:
        """Return the seconds to wait before requesting the rest; None if nothing is missing.

        Raise the error if the stream cannot be resumed, Cancelled if the client was closed.
        """
        if self.is_complete:
            return None  # complete: a broken connection does not matter
        if self._empty:
            return self._retries.pause(error)
        self._retries.check_open()
        if self._samples > 1:
            raise _not_resumed(f"a stream of {self._samples} samples cannot be resumed", error) from error
        if not self._request.sampling.HasField("seed"):
            raise _not_resumed("the server sent no seed, which resuming needs", error) from error
        pause = self._retries.pause(error, begun=True)
        self._tally.broke_off()
        self._resumed = True
        return pause

    def ask(self) -> tuple[str, GenerateRequest, float | None]:
        """Return the address for the next try, the request, and the seconds left for it; Cancelled if the client was
        closed."""
        self._retries.check_open()
        self._repeated = self._prompt_tokens if self._request.HasField("prompt_logprobs") else 0
        self._before_seconds = self._retries.seconds_passed
        return self._retries.address, self._request, self._retries.seconds_left


def _make_explicit(request: GenerateRequest, resolved: ResolvedRequest) -> None:
    """Write every default that the server resolved into the request: another server that resumes the text might resolve
    it differently. The prompt is checked by digest, since a request cannot carry both its text and its tokens."""
    if not resolved.ByteSize():
        return
    request.sampling.MergeFrom(resolved.sampling)
    request.max_tokens = resolved.max_tokens
    request.ignore_end_token = True
    request.stop_tokens[:] = resolved.end_tokens
    request.prompt_digest = resolved.prompt_digest
    if resolved.model:
        request.model = resolved.model
    if resolved.HasField("reasoning"):
        request.reasoning.CopyFrom(resolved.reasoning)
    if resolved.HasField("time") and request.HasField("chat"):
        request.chat.time.CopyFrom(resolved.time)


def _not_resumed(why: str, error: grpc.RpcError) -> SpecdecError:
    """Return the error that ended the stream; after a lost server, add why this stream cannot be resumed."""
    seen = from_rpc(error)
    if is_loss(seen):
        return Unavailable(f"{why}: {seen}", code=seen.code, reason=seen.reason, retry_after=seen.retry_after)
    return seen


class Tally:
    """The speculation statistics of one sample, across the interrupted parts of its stream."""

    def __init__(self) -> None:
        self._broken = SpeculationStatistics()  # of the interrupted parts
        self._part = SpeculationStatistics()  # of the current part
        self._begun = False  # the current part has responses

    def count(self, response: GenerateResponse) -> None:
        """Count a response. The last one is changed: its statistics get those of the interrupted parts added, and then
        cover the whole stream."""
        if response.HasField("finish"):
            _add(response.finish.speculation, self._broken)
        else:
            self._begun = True
            _add(self._part, _statistics(response))

    def broke_off(self) -> None:
        """Note that the stream broke and will be resumed. An attempt without responses is not counted."""
        if not self._begun:
            return
        self._begun = False
        self._part.failover_events["resumed"] += 1
        _add(self._broken, self._part)
        self._part.Clear()


def _statistics(response: GenerateResponse) -> SpeculationStatistics:
    histogram = accepted_histogram(response.sources, response.steps)
    statistics = SpeculationStatistics(
        steps=response.steps,
        offered=response.offered,
        accepted=accepted_candidates(histogram),
        accepted_histogram=histogram_entries(histogram),
    )
    for source in response.sources:
        statistics.sources[source_name(source)] += 1
    return statistics


def _add(total: SpeculationStatistics, part: SpeculationStatistics) -> None:
    """Add a part of a stream to a total, saturating, since a server may send any number."""
    total.steps = _sum(total.steps, part.steps)
    total.offered = _sum(total.offered, part.offered)
    total.accepted = _sum(total.accepted, part.accepted)
    for name, count in part.sources.items():
        total.sources[name] = _sum(total.sources[name], count)
    for name, count in part.failover_events.items():
        total.failover_events[name] = _sum(total.failover_events[name], count)
    add_decisions(total.decisions, part.decisions)
    total.accepted_histogram.extend([0] * (len(part.accepted_histogram) - len(total.accepted_histogram)))
    for accepted, steps in enumerate(part.accepted_histogram):
        total.accepted_histogram[accepted] = _sum(total.accepted_histogram[accepted], steps)


def _sum(one: int, other: int) -> int:
    """Return the sum, at most the largest uint32."""
    return min(one + other, (1 << 32) - 1)
