"""The verifier's responses as messages."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.decoding.contrastive import DraftQuery
from specdec.decoding.logprobs import TokenLogprobs
from specdec.serving.messages import finish_name, query_message
from specdec.serving.timeline import Timeline
from specdec.v2 import model_pb2, verifier_pb2
from verifier_service.backend.result import (
    CommitDetails,
    DecisionSums,
    FeatureRows,
    PromptScores,
    VerifyResult,
    Without,
)
from verifier_service.backend.session_backend import ResponseMaker


class SessionResponses(ResponseMaker):
    """Makes the responses of one session, and records commits and queries in its timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def commit(self, result: VerifyResult, details: CommitDetails) -> verifier_pb2.VerifyResponse:
        self._timeline.add(
            steps=result.steps,
            tokens=len(result.tokens),
            offered=result.offered,
            accepted=result.accepted,
            undrafted_tokens=result.undrafted,
        )
        if result.finish:
            self._timeline.event("finish", reason=finish_name(result.finish))
        sums = DecisionSums()
        sums.add(result.decisions)
        commit = verifier_pb2.Commit(
            committed=model_pb2.Committed(
                base=result.base, tokens=result.tokens, overruled=[place.message for place in result.overruled]
            ),
            sources=result.sources,  # type: ignore[arg-type]
            logprobs=list(map(_logprobs, result.logprobs)),
            offered=result.offered,
            accepted=result.accepted,
            rejected=[
                model_pb2.RejectedCandidate(position=r.position, depth=r.depth, token=r.token, source=r.source)  # type: ignore[arg-type]
                for r in result.rejected
            ],
            finish_reason=result.finish,  # type: ignore[arg-type]
            forward_us=int(1e6 * details.forward),
            step_us=int(1e6 * details.step),
            waited_us=int(1e6 * details.waited),
            queued_us=int(1e6 * details.queued),
            cached_tokens=details.cached,
            preemptions=details.preemptions,
            steps=result.steps,
            drafting_wanted=details.outlook.drafting_wanted,
            min_candidate_probability=details.outlook.break_even,
            drafted_sessions=details.drafted_sessions,
            checksum=result.checksum,
            round_trip_us=int(1e6 * details.round_trip),
            undrafted_tokens=result.undrafted,
            decisions=decisions_message(sums, details.rates),
        )
        return verifier_pb2.VerifyResponse(commit=commit)

    def scores(self, scores: PromptScores) -> verifier_pb2.VerifyResponse:
        logprobs = (_logprobs(found, found.rank) for found in scores.logprobs)
        return verifier_pb2.VerifyResponse(
            prompt_logprobs=verifier_pb2.PromptLogprobs(first=scores.first, logprobs=logprobs)
        )

    def query(self, query: DraftQuery) -> verifier_pb2.VerifyResponse:
        self._timeline.add(draft_queries=1)
        return verifier_pb2.VerifyResponse(query=query_message(query))

    def features(self, rows: FeatureRows) -> verifier_pb2.VerifyResponse:
        values = b"".join(rows.rows)
        return verifier_pb2.VerifyResponse(
            features=model_pb2.Features(first=rows.first, values=values, session=rows.session)
        )


def _logprobs(found: TokenLogprobs, rank: int = 0) -> verifier_pb2.TokenLogprobs:
    return verifier_pb2.TokenLogprobs(
        chosen=found.chosen, top_tokens=found.top_tokens, top_logprobs=found.top_logprobs, rank=rank
    )


def decisions_message(sums: DecisionSums, rates: Mapping[str, float] | None) -> model_pb2.SpeculationDecisions:
    """Return decisions and the modes' tokens a second as a message."""
    judged = sums.without[Without.ROW_COST] or 1
    return model_pb2.SpeculationDecisions(
        modes={mode: count for mode, count in sums.modes.items() if count},
        without={reason: count for reason, count in sums.without.items() if count},
        row_us=1e6 * sums.row / judged,
        break_even=sums.break_even / judged,
        best_candidate=sums.best / judged,
        mode_rates=rates,
    )
