"""Requests are validated before they cost anything, with one violation per field."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from orchestrator.requests.model import ServedModel
from orchestrator.requests.parsing import MAX_STOP_STRINGS, MAX_STOP_TOKENS, parse
from orchestrator.tenants.file import Tenant
from specdec.decoding.speculation import ALL_DRAFTERS, OWN_DRAFTERS, CandidateSource, SpeculationOptions
from specdec.engine.model_directory import ModelDirectory
from specdec.local import DEMO
from specdec.serving.errors import InvalidRequestError, PermissionDeniedError
from specdec.serving.validation import MAX_BIASES
from specdec.text.tokenizer import Tokenizer, TooManyTokensError
from specdec.v2 import generation_pb2, model_pb2
from tests.models import CONTEXT, VOCABULARY, make
from tests.text.tokenizers import directory, word_level


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return ServedModel.of(ModelDirectory(make("llama", tmp_path_factory.mktemp("models") / "m")))


def violations(model: ServedModel, **fields: Any) -> list[tuple[str, str]]:
    request = generation_pb2.GenerateRequest(**({"tokens": generation_pb2.TokenPrompt(ids=[5])} | fields))
    with pytest.raises(InvalidRequestError) as refused:
        parse(request, model)
    return refused.value.violations


def sampling(**fields: Any) -> generation_pb2.SamplingParameters:
    return generation_pb2.SamplingParameters(**fields)


class Untouched(Tokenizer):
    """A tokenizer that must not be called."""

    def __init__(self) -> None:
        pass

    longest_token = 4
    chat_templates = None

    def added_token(self, _: str) -> None:
        """No added tokens."""

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise AssertionError("it was encoded")

    def render(self, *_: Any, **__: Any) -> str:
        raise AssertionError("it was rendered")


def turns(count: int, content: str) -> generation_pb2.ChatPrompt:
    return generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role="user", content=content)] * count)


def with_argument(value: str | float) -> generation_pb2.ChatPrompt:
    chat = turns(1, "x")
    chat.template_arguments.update({"a": value})
    return chat


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("text", {"text": "a b" * 5_000_000}),
        ("text", {"text": "é" * (2 * CONTEXT + 1)}),
        ("tokens.ids", {"tokens": generation_pb2.TokenPrompt(ids=[1] * 1_000_000)}),
        ("chat.messages", {"chat": turns(100_000, "")}),
        ("chat", {"chat": turns(3, "x" * 1_000_000)}),
        ("chat.template_arguments", {"chat": with_argument("x" * 17_000)}),
        ("generated_tokens", {"generated_tokens": [1] * 1_000_000}),
        ("stop", {"stop": ["x"] * 100_000}),
        ("stop_tokens", {"stop_tokens": [1] * 1_000_000}),
        ("tenant", {"tenant": "x" * 1_000_000}),
        ("model_fingerprint", {"model_fingerprint": "x" * 1_000_000}),
        ("n", {"n": 2**32 - 1}),
        ("sampling.logit_bias", {"sampling": sampling(logit_bias=dict.fromkeys(range(100000), math.nan))}),
        ("sampling.banned_tokens", {"sampling": sampling(banned_tokens=[1] * 1_000_000)}),
    ],
)
def test_what_cannot_fit_is_refused_unread(field: str, fields: dict[str, Any]) -> None:
    """Its size alone decides: nothing of it is encoded, rendered or compared."""
    model = ServedModel("m", Untouched(), "", CONTEXT, VOCABULARY, frozenset())
    ((found, problem),) = violations(model, **fields)
    assert found == field
    assert "at most" in problem
    assert len(problem) < 100


def test_the_first_of_many_wrong_values_is_named(model: ServedModel) -> None:
    """With all 300 named, the error exceeded gRPC's limit; 1 MB of values gave 13 MB of log."""
    biases = dict.fromkeys(range(300), math.nan)
    ((field, problem),) = violations(model, sampling=sampling(logit_bias=biases))
    assert field.startswith("sampling.logit_bias[")
    assert problem == "is nan, must be in [-100, 100]"
    ((field, problem),) = violations(model, sampling=sampling(banned_tokens=range(VOCABULARY, VOCABULARY + 100)))
    assert (field, problem) == ("sampling.banned_tokens", "is 419, must be a token id below 320")
    wrong = {"stop": [""] * MAX_STOP_STRINGS, "stop_tokens": [10**6] * MAX_STOP_TOKENS}
    assert [field for field, _ in violations(model, **wrong)] == ["stop[0]", "stop_tokens[0]"]


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_an_argument_that_json_does_not_have(model: ServedModel, number: float) -> None:
    ((field, problem),) = violations(model, chat=with_argument(number))
    assert field == "chat"
    assert "template_arguments" in problem


def test_whole_numbers_stay_whole(model: ServedModel) -> None:
    """Template arguments arrive as floats; "5.0" would change the prompt."""
    seen: list[Any] = []

    class Recording(Untouched):
        def render(self, *given: Any, **_: Any) -> str:
            seen.append(given[2])
            return "x"

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return [5]

    chat = turns(1, "x")
    chat.template_arguments.update({"a": 2, "b": [1.5, {"c": 3}], "d": None})
    own = ServedModel("m", Recording(), "", CONTEXT, VOCABULARY, frozenset())
    assert parse(generation_pb2.GenerateRequest(chat=chat), own).samples
    assert str(seen[0]["a"]) + str(seen[0]["b"]) == "2[1.5, {'c': 3}]"


@pytest.mark.parametrize("penalty", [1e-30, 0.0, -1.0, 0.009, 101.0, math.inf, math.nan])
def test_a_penalty_that_leaves_nothing_to_choose(model: ServedModel, penalty: float) -> None:
    ((field, problem),) = violations(model, sampling=sampling(repetition_penalty=penalty))
    assert field == "sampling.repetition_penalty"
    assert problem.endswith("must be in [0.01, 100]")


@pytest.mark.parametrize("penalty", [0.01, 1.0, 100.0])
def test_a_penalty_at_its_limits(model: ServedModel, penalty: float) -> None:
    request = generation_pb2.GenerateRequest(
        tokens=generation_pb2.TokenPrompt(ids=[5]), sampling=sampling(repetition_penalty=penalty)
    )
    assert parse(request, model).samples


def test_as_many_biases_as_may_be(model: ServedModel) -> None:
    assert MAX_BIASES > VOCABULARY
    biases = dict.fromkeys(range(VOCABULARY), 1.0)
    request = generation_pb2.GenerateRequest(
        tokens=generation_pb2.TokenPrompt(ids=[5]), sampling=sampling(logit_bias=biases)
    )
    assert len(parse(request, model).samples[0].sampling.logit_bias) == VOCABULARY


@pytest.mark.parametrize("fields", [{"text": "x" * CONTEXT}, {"tokens": generation_pb2.TokenPrompt(ids=[5] * CONTEXT)}])
def test_a_prompt_that_leaves_no_room(model: ServedModel, fields: dict[str, Any]) -> None:
    ((field, problem),) = violations(model, **fields)
    assert field == "prompt"
    assert problem.endswith(f"tokens, must have at most {CONTEXT - 1}: the context of {CONTEXT} leaves no room")


@pytest.mark.parametrize("text", ["", "a", "hello world\n" * 20, "é∞😀" * 10, " " * 100])
def test_no_text_that_fits_is_longer_than_the_longest_tokens(model: ServedModel, text: str) -> None:
    tokens = model.tokenizer.encode(text)
    assert len(text.encode()) <= len(tokens) * model.tokenizer.longest_token


def test_a_text_that_is_far_too_long_is_not_tokenised_as_a_whole(model: ServedModel) -> None:
    """A text of 5 million tokens, encoded as a whole, took 2 GB and kept most of it."""
    tokenizer = Tokenizer(ModelDirectory(Path(DEMO / "target")))
    text = "def main(x): return 1\n" * 100_000
    with pytest.raises(TooManyTokensError, match="more than 2000 tokens"):
        tokenizer.encode(text, limit=1000)
    with pytest.raises(TooManyTokensError, match="more than 512 tokens"):
        model.tokenizer.encode("x" * 10_000, limit=256)
    with pytest.raises(TooManyTokensError, match=r"^257 tokens$"):
        model.tokenizer.encode("x" * 257, limit=256)


@pytest.mark.parametrize("length", [100, 9000])
def test_a_text_that_fits_is_tokenised_as_a_whole(length: int) -> None:
    """Even though it was counted in pieces before."""
    tokenizer = Tokenizer(ModelDirectory(Path(DEMO / "target")))
    text = " " * (length // 2) + "x" * (length // 2)
    tokens = tokenizer.encode(text)
    assert tokenizer.encode(text, limit=len(tokens)) == tokens


def test_a_long_text_leaves_the_interpreter_to_others() -> None:
    """Encoding in a thread must not block the event loop: its longest pause is a small part of the total time."""
    tokenizer = Tokenizer(ModelDirectory(Path(DEMO / "target")))
    text = "def main(x): return 1\n" * 100_000
    over = threading.Event()
    longest = 0.0

    def tick() -> None:
        nonlocal longest
        last = time.process_time()
        while not over.wait(0.001):
            now = time.process_time()  # CPU time: unaffected by other processes
            longest, last = max(longest, now - last), now

    ticking = threading.Thread(target=tick)
    ticking.start()
    begin = time.process_time()
    assert len(tokenizer.encode(text)) > 100_000
    seconds = time.process_time() - begin
    over.set()
    ticking.join()
    assert longest < 0.5 * seconds


@pytest.mark.parametrize(
    ("field", "most"), [("max_candidates", 128), ("max_depth", 128), ("max_branches", 16), ("max_nodes", 256)]
)
def test_more_speculation_than_any_pod_grants_is_refused(model: ServedModel, field: str, most: int) -> None:
    asked = generation_pb2.Speculation()
    setattr(asked, field, most)
    parse(generation_pb2.GenerateRequest(text="a", speculation=asked), model)
    setattr(asked, field, 100_000)
    assert violations(model, speculation=asked) == [(f"speculation.{field}", f"is 100000, must be at most {most}")]


def test_a_drawn_seed_is_a_number_of_javascript(model: ServedModel) -> None:
    """The chance that this fails for right seeds, because two are equal, is below 1e-11."""
    request = generation_pb2.GenerateRequest(tokens=generation_pb2.TokenPrompt(ids=[5]))
    seeds = [parse(request, model).seed for _ in range(64)]
    assert len(set(seeds)) == len(seeds)
    assert max(seeds) < 1 << 53


def test_fixed_widths_exclude_other_shapes(model: ServedModel) -> None:
    asked = generation_pb2.Speculation(expansion=[3, 2], max_depth=2, max_branches=3, min_path_probability=0.5)
    assert {field for field, _ in violations(model, speculation=asked)} == {
        "speculation.max_depth",
        "speculation.max_branches",
        "speculation.min_path_probability",
    }
    assert violations(model, speculation=generation_pb2.Speculation(expansion=[16, 16])) == [
        ("speculation.expansion", "makes a tree of 272 nodes, must make at most 256")
    ]
    asked = generation_pb2.Speculation(expansion=[3, 2])
    assert parse(generation_pb2.GenerateRequest(text="a", speculation=asked), model).samples[
        0
    ].speculation.expansion == (
        3,
        2,
    )


REJECTION = {"rule": model_pb2.ACCEPTANCE_RULE_REJECTION, "sampling": sampling(temperature=1)}
WINDOW = model_pb2.Lookahead(window=5, ngram=3, guesses=5)


def asked(model: ServedModel, speculation: generation_pb2.Speculation, **fields: Any) -> SpeculationOptions:
    request = generation_pb2.GenerateRequest(text="a", speculation=speculation, **fields)
    return parse(request, model).samples[0].speculation


def test_a_window_under_rejection_takes_the_place_of_the_draft(model: ServedModel) -> None:
    """Both would put a token in the one place of a draw. A request that names the draft too is refused."""
    window = generation_pb2.Speculation(lookahead=WINDOW)
    assert asked(model, window, **REJECTION).drafters == OWN_DRAFTERS
    assert asked(model, window).drafters == ALL_DRAFTERS
    assert asked(model, window, rule=model_pb2.ACCEPTANCE_RULE_REJECTION).drafters == ALL_DRAFTERS  # greedy
    window.drafters.extend([model_pb2.DRAFTER_REMOTE, model_pb2.DRAFTER_LOOKAHEAD])
    ((field, problem),) = violations(model, speculation=window, **REJECTION)
    assert field == "speculation.lookahead"
    assert "under REJECTION requires drafters without REMOTE" in problem


def test_drafters_of_a_newer_client_are_ignored_beside_others(model: ServedModel) -> None:
    newer: list[Any] = [model_pb2.DRAFTER_NGRAM, max(ALL_DRAFTERS) + 1]
    assert asked(model, generation_pb2.Speculation(drafters=newer)).drafters == {CandidateSource.NGRAM}


def test_only_who_names_neither_drafters_nor_a_window_leaves_them_to_the_verifier(model: ServedModel) -> None:
    assert asked(model, generation_pb2.Speculation(max_depth=3)).unspecified
    for speculation in (
        generation_pb2.Speculation(off=True),
        generation_pb2.Speculation(forced=True),
        generation_pb2.Speculation(jacobi=True),
        generation_pb2.Speculation(lookahead=WINDOW),
        generation_pb2.Speculation(drafters=[model_pb2.DRAFTER_NGRAM]),
    ):
        assert not asked(model, speculation).unspecified


@pytest.mark.parametrize(
    ("rule", "fields", "refused"),
    [
        ("COUPLED", {"sampling": sampling(temperature=1)}, False),
        ("REJECTION", {"sampling": sampling(temperature=1)}, True),
        ("REJECTION", {"sampling": sampling(temperature=0)}, False),  # the same as COUPLED
        (
            "REJECTION",
            {"sampling": sampling(temperature=1), "speculation": generation_pb2.Speculation(off=True)},
            False,
        ),
        ("CONTRASTIVE", {}, True),
        ("TYPICAL", {"sampling": sampling(temperature=1)}, True),
        ("TYPICAL", {"sampling": sampling(temperature=0)}, False),
    ],
)
def test_drafts_that_are_not_trusted_influence_no_token(
    model: ServedModel, rule: Any, fields: dict[str, Any], refused: bool
) -> None:
    tokens = generation_pb2.TokenPrompt(ids=[5])
    request = generation_pb2.GenerateRequest(tokens=tokens, rule=f"ACCEPTANCE_RULE_{rule}", **fields)  # type: ignore[arg-type]
    parse(request, model)
    if not refused:
        parse(request, model, untrusted_drafts=True)
        return
    with pytest.raises(InvalidRequestError, match=f"rule: is {rule}, must be COUPLED"):
        parse(request, model, untrusted_drafts=True)


def test_the_owner_of_the_key_is_the_tenant(model: ServedModel) -> None:
    owner = Tenant("acme", weight=2.0)
    request = generation_pb2.GenerateRequest(tokens=generation_pb2.TokenPrompt(ids=[5]))
    for named in ("", "acme"):
        request.tenant = named
        (sample,) = parse(request, model, owner=owner).samples
        assert (sample.tenant, sample.weight) == ("acme", 2.0)
    request.tenant = "other"
    with pytest.raises(PermissionDeniedError, match="is 'other', the API key belongs to 'acme'"):
        parse(request, model, owner=owner)
    (sample,) = parse(request, model).samples
    assert (sample.tenant, sample.weight) == ("other", 1.0)


def test_a_token_that_the_tokenizer_has_and_the_model_has_not(tmp_path: Path) -> None:
    """For example, a padding token added without a row in the model."""
    added = directory(word_level(), tmp_path / "model", pad_token="[PAD]")
    assert added.tokens["[PAD]"] == added.vocabulary
    model = ServedModel.of(added)
    assert parse(generation_pb2.GenerateRequest(text="hello world"), model).prompt_tokens == 2
    with pytest.raises(
        InvalidRequestError, match=f"text: has the token {added.vocabulary}, the model has token ids below"
    ):
        parse(generation_pb2.GenerateRequest(text="hello [PAD]"), model)
    (sample,) = parse(generation_pb2.GenerateRequest(text="hello", stop=["[PAD]"]), model).samples
    assert added.vocabulary not in sample.end_tokens  # pods would reject it, and the model never chooses it


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"max_tokens": 0}, ("max_tokens", "is 0, must be at least 1 without prompt_logprobs")),
        ({"max_tokens": 0, "prompt_logprobs": 1, "n": 2}, ("n", "is 2, must be 1 with max_tokens 0")),
        ({"max_tokens": 0, "prompt_logprobs": 1, "min_tokens": 1}, ("min_tokens", "must be at most max_tokens (0)")),
        ({"prompt_logprobs": 21}, ("prompt_logprobs", "is 21, must be at most 20")),
        (
            {"max_tokens": 0, "prompt_logprobs": 1, "generated_tokens": [5], "sampling": sampling(seed=1)},
            ("generated_tokens", "has 1 tokens, must have fewer than 0"),
        ),
    ],
)
def test_a_prompt_to_score_is_refused_by_field(
    model: ServedModel, fields: dict[str, Any], wrong: tuple[str, str]
) -> None:
    ((field, problem),) = violations(model, **fields)
    assert field == wrong[0]
    assert wrong[1] in problem


def test_a_prompt_is_scored_once_and_without_a_draft_if_nothing_follows(model: ServedModel) -> None:
    asked: dict[str, Any] = {"tokens": generation_pb2.TokenPrompt(ids=[5, 6]), "prompt_logprobs": 3}
    samples = parse(generation_pb2.GenerateRequest(**asked, n=3), model).samples
    assert [sample.prompt_logprobs for sample in samples] == [3, None, None]
    assert samples[0].speculation.remote
    contrastive = model_pb2.ACCEPTANCE_RULE_CONTRASTIVE
    (sample,) = parse(generation_pb2.GenerateRequest(**asked, max_tokens=0, rule=contrastive), model).samples
    assert (sample.max_tokens, sample.speculation.remote, sample.needs_draft) == (0, False, False)
