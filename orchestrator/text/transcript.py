"""The transcript of one sample: turns its commits into responses with text, cut where the text ends, and counts
tokens."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from orchestrator.requests.model import ServedModel
from orchestrator.requests.sample import Sample
from orchestrator.text.sample_text import GrammarText, SampleText, Spelt
from specdec.decoding.speculation import CandidateSource
from specdec.serving.bounded_threads import BoundedThreads
from specdec.v2 import generation_pb2, model_pb2, verifier_pb2
from specdec.wire.decisions import NO_DRAFT_SERVICE, NO_DRAFTER, OFF, add_decisions, rename_reason
from specdec.wire.sources import accepted_candidates, accepted_histogram, histogram_entries, source_name

SOON_SPELT = 512
"""Maximum tokens to detokenise on the event loop: at some 20 microseconds each, they do not noticeably delay other
streams."""


ADDED = ("steps", "offered", "accepted", "queued_us")
"""Fields summed when two commits are joined. Lists are joined, decisions are added, the base stays the first commit's;
other fields are the later commit's, unless that value is 0."""


@dataclass
class Statistics:
    """Counts of speculation. Tokens past a stop string count as overrun only."""

    steps: int = 0
    offered: int = 0
    accepted: int = 0
    overrun: int = 0
    histogram: Counter[int] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    decisions: model_pb2.SpeculationDecisions = field(default_factory=model_pb2.SpeculationDecisions)

    def message(self) -> generation_pb2.SpeculationStatistics:
        return generation_pb2.SpeculationStatistics(
            steps=self.steps,
            offered=self.offered,
            accepted=self.accepted,
            overrun=self.overrun,
            accepted_histogram=histogram_entries(self.histogram),
            sources=self.sources,
            decisions=self.decisions,
        )


class SampleTranscript:
    """Turns the commits of one sample into responses."""

    def __init__(self, sample: Sample, model: ServedModel, arrived: float) -> None:
        """`arrived`: arrival of the sample's request, time.monotonic."""
        self._sample = sample
        self._arrived = arrived
        self.statistics = Statistics()
        self._text = SampleText(sample, model.tokenizer)
        self._piece = model.tokenizer.piece
        self._prompt_tokens = 0  # number of prompt tokens returned so far, if requested
        self._found: int | None = None  # cached tokens of the prompt at the first verifier
        self._undecided: verifier_pb2.Commit | None = None  # a commit that has no response yet
        self._completion_tokens = len(sample.generated)
        # The text to be checked when it is finished, if any.
        self._checked = None if sample.schema_check is None else GrammarText(sample, model.tokenizer)
        self.finish_reason: model_pb2.FinishReason.ValueType = model_pb2.FINISH_REASON_UNSPECIFIED
        """Why the text is complete; unspecified while it is not."""

    @property
    def usage(self) -> generation_pb2.Usage:
        return generation_pb2.Usage(
            prompt_tokens=len(self._sample.prompt),
            completion_tokens=self._completion_tokens,
            cached_tokens=self._found or 0,
            reasoning_tokens=self._text.reasoning_tokens,
        )

    @property
    def generated_tokens(self) -> int:
        """Number of tokens generated so far, without those in the request."""
        return self._completion_tokens - len(self._sample.generated)

    async def resume(self, threads: BoundedThreads) -> None:
        """Detokenise the text that the client already has, in a thread unless it is short; called before the first
        commit."""
        if len(self._sample.generated) > SOON_SPELT:
            await threads.run(self._spell_generated, self._sample.tenant)
        else:
            self._spell_generated()

    def _spell_generated(self) -> None:
        space = self._text.take_space(self._sample.generated) or 0
        for token in self._sample.generated[space:]:
            self._push(token)

    def _push(self, token: int) -> Spelt:
        if self._checked is not None:
            self._checked.push(token)
        return self._text.push(token)

    def score(self, scores: verifier_pb2.PromptLogprobs) -> generation_pb2.GenerateResponse:
        """Return the response with log-probabilities of the next tokens of the prompt; the last one has `finish` if
        nothing is to be generated. The first token has no log-probability and comes with the second."""
        prompt, begin = self._sample.prompt, self._prompt_tokens
        self._prompt_tokens = end = scores.first + len(scores.logprobs)
        response = generation_pb2.GenerateResponse(
            index=self._sample.index,
            prompt=(generation_pb2.PromptToken(token=t, bytes=self._piece(t)) for t in prompt[begin:end]),
            timings=generation_pb2.ChunkTimings(elapsed_us=self._elapsed_us),
        )
        for entry, logprobs in zip(response.prompt[scores.first - begin :], scores.logprobs, strict=True):
            entry.logprobs.CopyFrom(logprobs)
            entry.logprobs.ClearField("chosen_bytes")
            self._spell_top(entry.logprobs)
        if end == len(prompt) and not self._sample.max_tokens:
            self.finish_reason = model_pb2.FINISH_REASON_LENGTH
            response.finish.CopyFrom(self._finish(self.finish_reason, ""))
        return response

    @property
    def _elapsed_us(self) -> int:
        return int(1e6 * (time.monotonic() - self._arrived))

    def add_commit(self, commit: verifier_pb2.Commit) -> generation_pb2.GenerateResponse | None:
        """Add a commit to the text, cut at a stop string, and return its response; the last one has `finish`. Return
        None if only the next token decides between reasoning and answer: the commit's tokens then come with the next
        response."""
        commit = self._with_undecided(commit)
        tokens = list(commit.committed.tokens)
        reason = commit.finish_reason
        before = self._text.reasoning_tokens
        space = self._text.take_space(tokens)
        if space is None and not reason:
            self._undecided = commit
            return None
        pieces = [""] * (space or 0)
        stop, kept = "", len(tokens)
        for index, token in enumerate(tokens[len(pieces) :], len(pieces)):
            is_end = reason == model_pb2.FINISH_REASON_STOP and index == len(tokens) - 1
            spelt = self._text.end(token) if is_end else self._push(token)
            pieces.append(spelt.text)
            if spelt.stop:
                stop, kept = spelt.stop, index + 1
                reason = model_pb2.FINISH_REASON_STOP
                break
        if reason and not stop:
            spelt = self._text.finish()
            pieces[-1] += spelt.text
            if spelt.stop:
                stop, reason = spelt.stop, model_pb2.FINISH_REASON_STOP
        reasoning = self._text.reasoning_tokens - before
        self._completion_tokens += kept
        self._count(commit, kept)
        if commit.logprobs:
            self._spell_logprobs(tokens, commit.logprobs)
        response = generation_pb2.GenerateResponse(
            index=self._sample.index,
            reasoning="".join(pieces[:reasoning]),
            reasoning_tokens=reasoning,
            text="".join(pieces[reasoning:]),
            token_texts=pieces,
            tokens=tokens[:kept],
            sources=commit.sources[:kept],
            logprobs=commit.logprobs[:kept],
            timings=generation_pb2.ChunkTimings(
                elapsed_us=self._elapsed_us,
                forward_us=commit.forward_us,
                step_us=commit.step_us,
                queued_us=commit.queued_us,
            ),
            steps=commit.steps,
            offered=commit.offered,
            rejected=self._rejected(commit, ended=bool(reason)),
        )
        if reason:
            self.finish_reason = reason
            response.finish.CopyFrom(self._finish(reason, stop))
        return response

    def _with_undecided(self, commit: verifier_pb2.Commit) -> verifier_pb2.Commit:
        """Return a commit, joined with the previous one if that one has no response yet."""
        held, self._undecided = self._undecided, None
        if held is None:
            return commit
        joined = verifier_pb2.Commit()
        joined.CopyFrom(held)
        joined.MergeFrom(commit)
        joined.committed.base = held.committed.base
        for name in ADDED:
            setattr(joined, name, getattr(held, name) + getattr(commit, name))
        joined.decisions.CopyFrom(held.decisions)
        add_decisions(joined.decisions, commit.decisions)
        return joined

    def _spell_logprobs(self, tokens: list[int], logprobs: Iterable[verifier_pb2.TokenLogprobs]) -> None:
        """Enter the bytes of the tokens into their log-probabilities."""
        for token, token_logprobs in zip(tokens, logprobs, strict=True):
            token_logprobs.chosen_bytes = self._piece(token)
            self._spell_top(token_logprobs)

    def _spell_top(self, logprobs: verifier_pb2.TokenLogprobs) -> None:
        logprobs.top_bytes[:] = [self._piece(best) for best in logprobs.top_tokens]

    def _rejected(self, commit: verifier_pb2.Commit, *, ended: bool) -> Iterator[model_pb2.RejectedCandidate]:
        """Yield a commit's rejected candidates with their bytes, except those past the end of a text that has
        `ended`."""
        for candidate in commit.rejected:
            if not ended or candidate.position - candidate.depth < self._completion_tokens:
                candidate.bytes = self._piece(candidate.token)
                yield candidate

    def _count(self, commit: verifier_pb2.Commit, kept: int) -> None:
        statistics = self.statistics
        histogram = accepted_histogram(commit.sources[:kept], commit.steps)
        statistics.steps += commit.steps
        statistics.offered += commit.offered
        statistics.accepted += accepted_candidates(histogram)
        statistics.histogram += histogram
        statistics.overrun += len(commit.committed.tokens) - kept
        statistics.sources.update(source_name(source) for source in commit.sources[:kept])
        # The verifier knows only the available drafters.
        rename_reason(commit.decisions, NO_DRAFTER, self._why_no_drafter)
        add_decisions(statistics.decisions, commit.decisions)
        if self._found is None:  # after a failover, `cached_tokens` is the resumed text's count
            self._found = min(commit.cached_tokens, len(self._sample.prompt))  # it may count text that a client resumes

    @property
    def _why_no_drafter(self) -> str:
        """Why the policy names no drafter, or only drafters that the verifier may not use."""
        speculation = self._sample.speculation
        if not speculation.drafters:
            return OFF
        return NO_DRAFT_SERVICE if speculation.drafters == {CandidateSource.REMOTE} else NO_DRAFTER

    def _finish(self, reason: model_pb2.FinishReason.ValueType, stop: str) -> generation_pb2.Finish:
        """Return `finish`, with the fields known to the transcript."""
        check, checked = self._sample.schema_check, self._checked
        found = None if check is None or checked is None else check.of_text(checked.finish(stop))
        return generation_pb2.Finish(
            reason=reason,
            stop=stop,
            usage=self.usage,
            speculation=self.statistics.message(),
            schema_check=None if found is None else generation_pb2.SchemaCheck(**found._asdict()),
        )
