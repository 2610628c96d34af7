"""Checks a verifier's messages against the request.

The checks cannot show whether the verifier chose the right tokens; the checksum shows only that the tokens arrived as
sent. Everything else in a commit must agree with the request and the text so far. A mismatch means that the pod is
broken or the message corrupted: the session is lost, as if its stream had ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from orchestrator.requests.model import ServedModel
from orchestrator.requests.sample import CommittedText, Sample
from specdec.serving.messages import finish_name, query_from
from specdec.serving.target_logprobs import places_of
from specdec.serving.validation import MAX_FEATURE_BYTES
from specdec.v2 import model_pb2, verifier_pb2
from specdec.wire.decisions import MAX_KEYS
from specdec.wire.sources import ACCEPTED

SOURCES = frozenset(model_pb2.TokenSource.values()) - {model_pb2.TOKEN_SOURCE_UNSPECIFIED}

MAX_SCORES_A_MESSAGE = 64
"""Maximum prompt tokens with log-probabilities in one message, by the contract."""

MAX_CANDIDATES_A_STEP = 1024
"""Maximum candidates of one session in one step: four times the limit of our own steps for all sessions together."""

ROUNDING = 1e-3
"""Amount by which the logarithm of a probability may exceed 0: float32 sums over a vocabulary have smaller errors."""

MAX_PREEMPTIONS = 1 << 20
MAX_QUEUED_US = 1 << 50
"""Limits on reported preemptions and microseconds: far above real values, but low enough for their sums to fit the
fields of a response."""

MAX_FED_BYTES = 64 << 20
"""Maximum bytes of features between two commits: a verifier keeps an eighth of that, and sends each kept row to a draft
once."""

LEAST_FEATURE_BYTES = 1 << 10
"""Minimum bytes that a message of features counts against MAX_FED_BYTES."""

MAX_QUERIES = 8
"""Maximum queries to a draft about one text: far more than an engine needs, even one whose bits vary from step to
step."""


class MessageCheck:
    """Checks the messages of one session. `context_tokens`: the longest text its verifier has room for."""

    def __init__(
        self, sample: Sample, model: ServedModel, context_tokens: int, keepers: Collection[object] = ()
    ) -> None:
        """`keepers`: the drafts known so far to store the text for learning."""
        self._sample = sample
        self._model = model
        self._keepers = keepers
        self._end = min(len(sample.prompt) + sample.max_tokens, context_tokens)
        self._queries: Counter[int] = Counter()  # number of queries to the draft by base; only the last base is kept
        self._features = 0  # bytes of features since the last commit

    def problem(self, message: object, text: CommittedText) -> str:
        """Return the problem with a message about a text; empty if there is none."""
        match message:
            case verifier_pb2.Commit():
                what, violation = "commit", self.commit_violation(message, text)
            case verifier_pb2.PromptLogprobs():
                what, violation = "log-probabilities of the prompt", self.scores_violation(message, text)
            case model_pb2.DraftQuery():
                what, violation = "query to the draft", self.query_violation(message, text)
            case model_pb2.Features():
                what, violation = "features", self.features_violation(message)
            case _:
                return ""
        return violation and f"invalid {what}: {violation}"

    def query_violation(self, query: model_pb2.DraftQuery, text: CommittedText) -> str:
        """Return the problem with a query to the draft; empty if there is none."""
        base = len(self._sample.prompt) + len(text.generated)
        if query.base != base:
            return f"its base is {query.base}, the text has {base} tokens"
        self._queries = Counter({base: self._queries[base] + 1})
        if self._queries[base] > MAX_QUERIES:
            return f"it is query {self._queries[base]} about one text, at most {MAX_QUERIES} are allowed"
        try:
            query_from(query, self._model.vocabulary)
        except ValueError as error:
            return str(error)
        return ""

    def features_violation(self, features: model_pb2.Features) -> str:
        """Return the problem with features for the draft; empty if there is none. The numbers are not checked: wrong
        ones only make the draft's guesses worse."""
        if features.first >= self._end:
            return f"they begin at position {features.first}, the text has at most {self._end} tokens"
        size = len(features.values)
        if not 0 < size <= MAX_FEATURE_BYTES:
            return f"they have {size} bytes, must have 1 to {MAX_FEATURE_BYTES}"
        self._features += max(size, LEAST_FEATURE_BYTES)
        if self._features > MAX_FED_BYTES:
            return f"they have {self._features} bytes without a commit, at most {MAX_FED_BYTES} are allowed"
        return ""

    def scores_violation(self, scores: verifier_pb2.PromptLogprobs, text: CommittedText) -> str:
        """Return the problem with log-probabilities of the prompt; empty if there is none."""
        count, first = len(scores.logprobs), max(1, text.scored)
        if scores.first != first:
            return f"they begin at token {scores.first} of the prompt, must begin at {first}"
        most = min(MAX_SCORES_A_MESSAGE, len(self._sample.prompt) - first)
        if not 0 < count <= most:
            return f"they cover {count} tokens, must cover 1 to {most}"
        return self._wrong_numbers(scores.logprobs, self._sample.prompt_logprobs or 0)

    def commit_violation(self, commit: verifier_pb2.Commit, text: CommittedText) -> str:
        """Return the first problem with a commit to a text; empty if there is none."""
        self._features = 0
        if text.unscored:
            return f"it comes before the log-probabilities of {text.unscored} tokens of the prompt"
        generated = len(text.generated)
        checks = (
            self._wrong_tokens,
            self._wrong_counts,
            self._wrong_end,
            self._wrong_logprobs,
            self._wrong_rejected,
            self._wrong_overruled,
            self._wrong_figures,
        )
        return next((problem for check in checks if (problem := check(commit, generated))), "")

    def _wrong_tokens(self, commit: verifier_pb2.Commit, generated: int) -> str:
        """Check that there are tokens, that they directly follow the text within its limit, and that they are in the
        vocabulary."""
        base, tokens = len(self._sample.prompt) + generated, commit.committed.tokens
        if commit.committed.base != base:
            return f"its base is {commit.committed.base}, the text has {base} tokens"
        if not tokens:
            return "it has no tokens"
        if base + len(tokens) > self._end:
            return f"it makes the text {base + len(tokens)} tokens long, must be at most {self._end}"
        if max(tokens) >= self._model.vocabulary:
            return f"it has token {max(tokens)}, the vocabulary has {self._model.vocabulary} tokens"
        return ""

    def _wrong_counts(self, commit: verifier_pb2.Commit, _: int) -> str:
        """Check steps, sources and candidates: every step ends with one of the target's own tokens, or with the end of
        the text."""
        tokens, sources = len(commit.committed.tokens), commit.sources
        if len(sources) != tokens or not SOURCES.issuperset(sources):
            return f"it has sources {list(sources[:8])} for {tokens} tokens"
        accepted = sum(source in ACCEPTED for source in sources)
        if commit.accepted != accepted:
            return f"it reports {commit.accepted} accepted candidates, its sources show {accepted}"
        ends_with_candidate = bool(commit.finish_reason) and sources[-1] in ACCEPTED
        if commit.steps != tokens - accepted + ends_with_candidate:
            return f"it has {tokens} tokens, which do not fit {commit.steps} steps with {accepted} accepted candidates"
        if not accepted <= commit.offered <= commit.steps * MAX_CANDIDATES_A_STEP:
            return f"it reports {commit.offered} verified candidates in {commit.steps} steps"
        return ""

    def _wrong_end(self, commit: verifier_pb2.Commit, generated: int) -> str:
        """Check that the text ends at an end token or a limit, and nowhere else."""
        sample, tokens = self._sample, commit.committed.tokens
        ends = [index for index, token in enumerate(tokens) if token in sample.end_tokens]
        if ends and generated + ends[0] < sample.min_tokens and sample.grammar is None:  # a grammar may end earlier
            return f"it has an end token before the minimum of {sample.min_tokens} tokens"
        if ends and ends[0] < len(tokens) - 1:
            return "it continues after an end token"
        if ends:
            wanted = model_pb2.FINISH_REASON_STOP
        elif len(sample.prompt) + generated + len(tokens) < self._end:
            wanted = model_pb2.FINISH_REASON_UNSPECIFIED
        elif self._end == len(sample.prompt) + sample.max_tokens:
            wanted = model_pb2.FINISH_REASON_LENGTH
        else:
            wanted = model_pb2.FINISH_REASON_CONTEXT
        if commit.finish_reason != wanted:
            return f"its finish reason is {finish_name(commit.finish_reason)}, must be {finish_name(wanted)}"
        return ""

    def _wrong_logprobs(self, commit: verifier_pb2.Commit, _: int) -> str:
        """Check that each token has log-probabilities if requested, with the requested number of top tokens."""
        wanted = self._sample.top_logprobs
        count, needed = len(commit.logprobs), 0 if wanted is None else len(commit.committed.tokens)
        if count != needed:
            return f"it has log-probabilities of {count} tokens, must have them of {needed}"
        return self._wrong_numbers(commit.logprobs, wanted or 0)

    def _wrong_numbers(self, found: Iterable[verifier_pb2.TokenLogprobs], wanted: int) -> str:
        """Check log-probabilities of tokens, each with `wanted` top tokens."""
        vocabulary = self._model.vocabulary
        best = min(wanted, vocabulary)
        for logprobs in found:
            if len(logprobs.top_tokens) != best or len(logprobs.top_logprobs) != best:
                return f"it has log-probabilities of {len(logprobs.top_tokens)} top tokens, {best} were requested"
            numbers = (logprobs.chosen, *logprobs.top_logprobs)
            ids = (*logprobs.top_tokens, max(1, logprobs.rank) - 1)
            if max(ids) >= vocabulary or not all(number <= ROUNDING for number in numbers):
                tokens = list(logprobs.top_tokens)
                return f"it has invalid log-probabilities {numbers} of tokens {tokens}, rank {logprobs.rank}"
        return ""

    def _wrong_rejected(self, commit: verifier_pb2.Commit, generated: int) -> str:
        """Check that rejected candidates are returned only if requested, are no more than the offered minus the
        accepted ones, and are in the vocabulary and near the committed tokens."""
        rejected, most = commit.rejected, commit.offered - commit.accepted if self._sample.rejected_candidates else 0
        if len(rejected) > most:
            return f"it has {len(rejected)} rejected candidates, at most {most} were rejected"
        end = generated + len(commit.committed.tokens)
        for found in rejected:
            if found.token >= self._model.vocabulary or found.source not in ACCEPTED:
                return f"it has the rejected candidate {found.token} of source {found.source}"
            if not generated <= found.position - found.depth <= end:
                return f"it has a rejected candidate at {found.position}, {found.depth} below the text"
        return ""

    def _wrong_overruled(self, commit: verifier_pb2.Commit, _: int) -> str:
        """Check that log-probabilities for a draft are sent only if a draft keeps the text, and are valid."""
        committed = commit.committed
        if not committed.overruled:
            return ""
        if not self._keepers:
            return "it has log-probabilities for a draft, and no draft keeps the text"
        try:
            end = committed.base + len(committed.tokens)
            places_of(committed.overruled, committed.base, end, self._model.vocabulary)
        except ValueError as error:
            return str(error)
        return ""

    def _wrong_figures(self, commit: verifier_pb2.Commit, _: int) -> str:
        """Check the ranges of the pod's figures."""
        for name in ("modes", "without", "mode_rates"):
            if (count := len(getattr(commit.decisions, name))) > MAX_KEYS:
                return f"its decisions have {count} {name}, at most {MAX_KEYS} are allowed"
        if not 0.0 <= commit.min_candidate_probability <= 1.0:
            return f"its min_candidate_probability is {commit.min_candidate_probability}"
        if commit.preemptions > MAX_PREEMPTIONS or commit.queued_us > MAX_QUEUED_US:
            return f"it reports {commit.preemptions} preemptions and {commit.queued_us} us in a queue"
        if commit.undrafted_tokens > len(commit.committed.tokens):
            return f"it reports {commit.undrafted_tokens} undrafted tokens of {len(commit.committed.tokens)}"
        if commit.cached_tokens > self._end:
            return f"it reports {commit.cached_tokens} cached tokens"
        return ""
