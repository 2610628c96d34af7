"""The transcript adds the bytes of each token to logprobs: verifiers do not know them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.requests.model import ServedModel
from orchestrator.requests.parsing import parse
from orchestrator.text.transcript import SampleTranscript
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.bounded_threads import BoundedThreads
from specdec.v2 import generation_pb2, model_pb2, verifier_pb2
from specdec.wire.speculation import SPECULATIONS
from tests.models import END, make


def test_tokens_of_logprobs_are_spelt_whatever_the_verifier_says(tmp_path: Path) -> None:
    model = ServedModel.of(ModelDirectory(make("llama", tmp_path / "m")))
    request = parse(generation_pb2.GenerateRequest(text="abc", logprobs=2), model)
    transcript = SampleTranscript(replace(request.samples[0]), model, 0.0)
    tokens = model.tokenizer.encode("hey", special=False)
    commit = verifier_pb2.Commit(
        committed=model_pb2.Committed(tokens=tokens),
        sources=[model_pb2.TOKEN_SOURCE_PLAIN] * len(tokens),
        logprobs=[
            verifier_pb2.TokenLogprobs(
                chosen=-1.0,
                top_tokens=[each, 3],
                top_logprobs=[-1.0, -2.0],
                chosen_bytes=b"lie",
                top_bytes=[b"lie"] * 9,
            )
            for each in tokens
        ],
        steps=len(tokens),
    )
    spelt = model.tokenizer.piece
    response = transcript.add_commit(commit)
    assert response is not None
    assert b"".join(each.chosen_bytes for each in response.logprobs).strip() == b"hey"
    assert [list(each.top_bytes) for each in response.logprobs] == [[spelt(each), spelt(3)] for each in tokens]


@pytest.mark.parametrize(("found", "counted"), [(8, 8), (36, 10)])
def test_cached_tokens_are_the_prompts_alone(tmp_path: Path, found: int, counted: int) -> None:
    """A verifier counts those of the whole text, which a client may resume far behind its prompt."""
    model = ServedModel.of(ModelDirectory(make("llama", tmp_path / "m")))
    asked = generation_pb2.GenerateRequest(
        tokens=generation_pb2.TokenPrompt(ids=range(50, 60)),
        generated_tokens=[60] * 30,
        sampling=generation_pb2.SamplingParameters(seed=1),
    )
    sample = parse(asked, model).samples[0]
    transcript = SampleTranscript(sample, model, 0.0)
    transcript.add_commit(
        verifier_pb2.Commit(
            committed=model_pb2.Committed(base=30, tokens=[5]),
            sources=[model_pb2.TOKEN_SOURCE_PLAIN],
            steps=1,
            cached_tokens=found,
        )
    )
    assert (transcript.usage.prompt_tokens, transcript.usage.cached_tokens) == (10, counted)


def test_impossible_decisions_do_not_end_the_text(tmp_path: Path) -> None:
    model = ServedModel.of(ModelDirectory(make("llama", tmp_path / "m")))
    asked = generation_pb2.GenerateRequest(text="abc", speculation=SPECULATIONS["off"])
    transcript = SampleTranscript(parse(asked, model).samples[0], model, 0.0)
    lie = model_pb2.SpeculationDecisions(without={"no_drafter": 2**64 - 1, "off": 1})
    commit = verifier_pb2.Commit(
        committed=model_pb2.Committed(tokens=[5]), sources=[model_pb2.TOKEN_SOURCE_PLAIN], steps=1, decisions=lie
    )
    transcript.add_commit(commit)
    assert transcript.statistics.decisions.without == {"off": 2**64 - 1}


@pytest.mark.parametrize("ends", [False, True])
def test_rejected_candidates_are_spelt_and_end_with_the_text(tmp_path: Path, ends: bool) -> None:
    model = ServedModel.of(ModelDirectory(make("llama", tmp_path / "m")))
    asked = generation_pb2.GenerateRequest(text="abc", rejected_candidates=True, stop=["y"] if ends else [])
    sample = parse(asked, model).samples[0]
    assert sample.rejected_candidates
    transcript = SampleTranscript(sample, model, 0.0)
    tokens = model.tokenizer.encode("hey!", special=False)
    end = next(at for at, token in enumerate(tokens) if b"y" in model.tokenizer.piece(token)) + 1
    places = [(0, 0), (end, 1), (end, 0), (end + 1, 1)]  # position, depth
    commit = verifier_pb2.Commit(
        committed=model_pb2.Committed(tokens=tokens),
        sources=[model_pb2.TOKEN_SOURCE_CORRECTION] * len(tokens),
        rejected=[
            model_pb2.RejectedCandidate(position=position, depth=depth, token=tokens[0], bytes=b"lie")
            for position, depth in places
        ],
        offered=4,
        steps=len(tokens),
    )
    response = transcript.add_commit(commit)
    assert response is not None
    assert [(each.position, each.depth) for each in response.rejected] == places[: 2 if ends else 4]
    assert {each.bytes for each in response.rejected} == {model.tokenizer.piece(tokens[0])}


@pytest.mark.parametrize(
    ("speculation", "reason"),
    [("off", "off"), ("draft", "no_draft_service"), ("ngram", "no_drafter"), ("auto", "no_drafter")],
)
def test_why_a_verifier_was_told_of_no_drafter(tmp_path: Path, speculation: str, reason: str) -> None:
    model = ServedModel.of(ModelDirectory(make("llama", tmp_path / "m")))
    asked = generation_pb2.GenerateRequest(text="abc", speculation=SPECULATIONS[speculation])
    transcript = SampleTranscript(parse(asked, model).samples[0], model, 0.0)
    for _ in range(2):
        transcript.add_commit(
            verifier_pb2.Commit(
                committed=model_pb2.Committed(tokens=[5]),
                sources=[model_pb2.TOKEN_SOURCE_PLAIN],
                steps=1,
                decisions=model_pb2.SpeculationDecisions(modes={"off": 1}, without={"no_drafter": 1}),
            )
        )
    assert dict(transcript.statistics.decisions.without) == {reason: 2}


def test_decisions_of_a_texts_commits_are_summed(tmp_path: Path) -> None:
    model = ServedModel.of(ModelDirectory(make("llama", tmp_path / "m")))
    request = parse(generation_pb2.GenerateRequest(text="abc", max_tokens=2), model)
    transcript = SampleTranscript(request.samples[0], model, 0.0)
    for reason, row_us in ((0, 1000), (model_pb2.FINISH_REASON_LENGTH, 3000)):
        decisions = model_pb2.SpeculationDecisions(modes={"off": 1}, without={"row_cost": 1}, row_us=row_us)
        commit = verifier_pb2.Commit(
            committed=model_pb2.Committed(tokens=[5]),
            sources=[model_pb2.TOKEN_SOURCE_PLAIN],
            steps=1,
            finish_reason=reason,  # type: ignore[arg-type]
            decisions=decisions,
        )
        response = transcript.add_commit(commit)
    assert response is not None
    assert response.finish.speculation.decisions == model_pb2.SpeculationDecisions(
        modes={"off": 2}, without={"row_cost": 2}, row_us=2000
    )


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ('["a", "b"]', generation_pb2.SchemaCheck(ok=True)),
        ('["a", "b", "a"]', generation_pb2.SchemaCheck(ok=False, path="/2", keyword="uniqueItems")),
        ('["a", "b", "a"', generation_pb2.SchemaCheck()),
    ],
)
@pytest.mark.parametrize("resumed", [0, 6])
async def test_a_finished_text_is_checked_for_what_no_grammar_enforces(
    tmp_path: Path, text: str, check: generation_pb2.SchemaCheck, resumed: int
) -> None:
    """However the text came: in one commit or two, or in part by another orchestrator."""
    model = ServedModel.of(ModelDirectory(make("llama", tmp_path / "m")))
    tokens = model.tokenizer.encode(text, special=False)
    schema = '{"type": "array", "items": {"type": "string"}, "uniqueItems": true}'
    asked = generation_pb2.GenerateRequest(text="abc", json_schema=schema, generated_tokens=tokens[:resumed])
    asked.sampling.seed = 1
    sample = parse(asked, model).samples[0]
    assert sample.grammar is not None
    assert "uniqueItems" not in sample.grammar.json_schema
    transcript = SampleTranscript(sample, model, 0.0)
    threads = BoundedThreads("texts", 1, 1)
    await transcript.resume(threads)
    threads.close()
    ends = (model_pb2.FINISH_REASON_UNSPECIFIED, model_pb2.FINISH_REASON_LENGTH)
    for part, reason in zip((tokens[resumed:-1], tokens[-1:]), ends, strict=True):
        commit = verifier_pb2.Commit(
            committed=model_pb2.Committed(tokens=part),
            sources=[model_pb2.TOKEN_SOURCE_PLAIN] * len(part),
            steps=len(part),
            finish_reason=reason,
        )
        response = transcript.add_commit(commit)
        assert response is not None
        assert response.finish.schema_check == (check if reason else generation_pb2.SchemaCheck())
    assert response is not None
    assert response.HasField("finish")
    assert response.finish.HasField("schema_check")


SET = '{"type": "array", "items": {"type": "string"}, "uniqueItems": true}'
OPEN, AFTER = 1, 5  # tokens before the grammar applies


@pytest.mark.parametrize(
    ("fields", "before", "answer", "stop"),
    [
        ({}, "", '["a"]', ""),
        ({"include_stop": True, "show_special_tokens": True}, "", '["a"]', ""),
        ({"grammar": {"after_token": AFTER}}, 'free ["a', '["a"]', ""),
        ({"grammar": {"after_token": AFTER}, "stop": ["a["]}, "free a", '["a"]', ""),
        ({"grammar": {"after_token": AFTER, "opening_token": OPEN}}, "", '["a"]', ""),
        ({"stop": ["b"]}, "", '["a"]', "b"),
        ({"stop": ["]"], "include_stop": True}, "", '["a"', "]"),
        ({"stop": ["]"], "include_stop": True, "min_tokens": 8}, "", '["]","a"', "]"),
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("resumed", [0, 3])
async def test_only_what_the_grammar_constrains_is_checked(
    tmp_path: Path, fields: dict[str, Any], before: str, answer: str, stop: str, resumed: int
) -> None:
    """Neither the free text before the grammar nor the end of the text is part of the answer."""
    model = ServedModel.of(ModelDirectory(make("llama", tmp_path / "m")))
    grammar = model_pb2.Grammar(json_schema=SET, **fields.get("grammar", {}))
    free, fixed, last = (model.tokenizer.encode(text, special=False) for text in (before, answer, stop))
    tokens = [*free, *([AFTER] if before else []), *fixed, *(last or [END])]
    usual: dict[str, Any] = {"text": "abc", "generated_tokens": tokens[:resumed], "max_tokens": 99}
    asked = generation_pb2.GenerateRequest(**usual | fields | {"grammar": grammar})
    asked.sampling.seed = 1
    transcript = SampleTranscript(parse(asked, model).samples[0], model, 0.0)
    threads = BoundedThreads("texts", 1, 1)
    await transcript.resume(threads)
    threads.close()
    commit = verifier_pb2.Commit(
        committed=model_pb2.Committed(tokens=tokens[resumed:]),
        sources=[model_pb2.TOKEN_SOURCE_PLAIN] * len(tokens[resumed:]),
        steps=len(tokens),
        finish_reason=model_pb2.FINISH_REASON_STOP if not last else model_pb2.FINISH_REASON_LENGTH,
    )
    response = transcript.add_commit(commit)
    assert response is not None
    assert response.finish.stop == stop
    assert response.finish.schema_check == generation_pb2.SchemaCheck(ok=True)
