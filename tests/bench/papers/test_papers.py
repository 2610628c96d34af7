"""Evaluations on a fake server over real sockets: requests, comparisons, omissions, options and a whole run."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.code_pb2 import INVALID_ARGUMENT
from rich.console import Console

from bench.papers.evaluation import Evaluation, EvaluationError, Settings
from bench.papers.methods import USUAL, methods_named
from bench.papers.papers import main, parsed
from bench.question_sets import Question
from specdec.v2 import generation_pb2 as pb
from tests.client.fake_server import TEXT, TOKENS, Act, FakeServer, rich
from tests.models import make, near
from tests.stack import stack

ONE = Question("set/1", "code", ("Sort a list.",))
TWO = Question("set/2", "chat", ("What is rust?", "And how is it removed?"))
REFUSED = rich(INVALID_ARGUMENT)


def settings(**fields: Any) -> Settings:
    usual: dict[str, Any] = {
        "temperatures": [0.8],
        "streams": [1],
        "tokens": 50,
        "rounds": 1,
        "warm_ups": 1,
        "learning_seconds": 0.0,
        "form": "auto",
        "ignore_end": False,
        "seed": 7,
        "model": None,
    }
    return Settings(**(usual | fields))


async def evaluated(
    *acts: Act, methods: Sequence[str] = ("ngram",), questions: Sequence[Question] = (ONE, TWO), **fields: Any
) -> tuple[Evaluation, list[pb.GenerateRequest]]:
    """Evaluate on a fake server; return the evaluation and its requests for completions."""
    evaluation = Evaluation(settings(**fields), methods_named(methods, 0.1), questions)
    async with FakeServer(*acts) as server:
        await evaluation.run(server.address, Console(file=io.StringIO()))
    return evaluation, [call.request for call in server.calls if call.request.HasField("max_tokens")]


async def test_answers_go_into_the_history_of_the_next_turn() -> None:
    evaluation, requests = await evaluated(questions=[TWO], methods=[])
    for first, second in zip(requests[::2], requests[1::2], strict=True):
        assert [message.content for message in first.chat.messages] == ["What is rust?"]
        assert [(message.role, message.content) for message in second.chat.messages] == [
            ("user", "What is rust?"),
            ("assistant", TEXT),
            ("user", "And how is it removed?"),
        ]
    (answer,) = evaluation.kept
    assert (answer.tokens, answer.category) == (2 * len(TOKENS), "chat")
    assert sum(answer.accepted) == answer.steps == 2 * -(-len(TOKENS) // 3)


async def test_text_is_continued_where_that_is_asked() -> None:
    _, requests = await evaluated(questions=[TWO], methods=[], form="text")
    assert [request.text for request in requests[:2]] == [
        "What is rust?",
        f"What is rust?\n\n{TEXT}\n\nAnd how is it removed?",
    ]
    function = Question("human-eval/0", "human-eval", ("def f():",), continued=True)
    _, requests = await evaluated(questions=[function], methods=[])
    assert requests[0].text == "def f():"
    _, requests = await evaluated(questions=[function], methods=[], form="chat")
    assert requests[0].chat.messages[0].content == "def f():"


async def test_methods_differ_in_nothing_but_their_options() -> None:
    evaluation, requests = await evaluated(rounds=2, ignore_end=True)
    counted = requests[2:]  # after the warm-up of each method
    plain = [request for request in counted if request.speculation.off]
    ngram = [request for request in counted if not request.speculation.off]
    assert len(plain) == len(ngram) == 6
    assert all(request.speculation.forced and request.speculation.drafters for request in ngram)
    assert [request.sampling.seed for request in plain] == [request.sampling.seed for request in ngram]
    assert len({request.sampling.seed for request in plain}) == 6
    assert len({request.tenant for request in plain}) == 1
    assert {request.tenant for request in plain}.isdisjoint({request.tenant for request in ngram})
    assert len({request.cache_salt for request in requests}) == len(requests)
    for request in requests:
        assert (request.max_tokens, request.ignore_end_token, request.model) == (50, True, "fake")
        assert request.sampling.temperature == pytest.approx(0.8)
        assert request.ignore_generation_config
    assert len(evaluation.kept) == 2 * 2 * 2
    assert all(answer.equal == answer.compared == answer.tokens > 0 for answer in evaluation.kept)


async def test_methods_begin_in_turn() -> None:
    """The second method goes first in the second group of questions."""
    _, requests = await evaluated(questions=[ONE, Question("set/3", "code", ("Reverse it.",))])
    assert [request.speculation.off for request in requests] == [True, False, True, False, False, True]


async def test_streams_are_kept_busy_and_each_question_counts_once() -> None:
    evaluation, requests = await evaluated(streams=[4], methods=[])
    assert len(requests) == 2 * 2 * 3  # a warm-up and a load; in each, two questions twice, together three turns
    assert sorted(answer.question for answer in evaluation.kept) == ["set/1", "set/2"]
    assert [load.tokens for load in evaluation.loads] == [2 * 3 * len(TOKENS)]


async def test_adaptive_methods_warm_up_for_some_time() -> None:
    evaluation, requests = await evaluated(questions=[ONE], methods=["auto"], learning_seconds=0.1)
    adaptive = [request for request in requests if not request.speculation.off]
    assert len(adaptive) > 2
    assert len(evaluation.kept) == 2


async def test_rules_are_measured_where_they_are_methods() -> None:
    evaluation, _ = await evaluated(
        questions=[ONE], methods=["assisted", "rejection", "contrastive"], temperatures=[0.0, 1.0]
    )
    assert [(answer.method, answer.temperature) for answer in evaluation.kept] == [
        *(("plain", 0.0), ("assisted", 0.0), ("contrastive", 0.0)),
        *(("plain", 1.0), ("rejection", 1.0), ("contrastive", 1.0)),
    ]
    assert {answer.method for answer in evaluation.kept if answer.compared} == {"plain", "assisted"}


async def test_a_method_that_fails_is_left_out() -> None:
    """The fake's calls: the question is tokenized, plain decoding warms up, then the method's warm-up fails."""
    failing = Act(then="abort", code=grpc.StatusCode.UNAVAILABLE, details="no draft")
    evaluation, _ = await evaluated(Act(), Act(), failing, questions=[ONE], methods=["remote", "ngram"])
    assert list(evaluation.failed) == ["remote"]
    assert "T = 0.8, 1 stream, set/1: " in evaluation.failed["remote"]
    assert "no draft" in evaluation.failed["remote"]
    assert [answer.method for answer in evaluation.kept] == ["plain", "ngram"]


async def test_a_refused_method_is_left_out_and_not_its_question() -> None:
    evaluation, _ = await evaluated(Act(), Act(), REFUSED, questions=[ONE], methods=["contrastive"])
    assert list(evaluation.failed) == ["contrastive"]
    assert evaluation.skipped == {}


async def test_a_refused_question_is_left_out_of_all_rounds() -> None:
    """The method answers the first question, but refuses the second one in the first of two rounds."""
    other = Question("set/3", "code", ("Reverse it.",))
    acts = [Act()] * (2 + 2 + 2) + [REFUSED]
    evaluation, requests = await evaluated(*acts, questions=[ONE, other], rounds=2)
    assert list(evaluation.skipped) == ["set/3"]
    assert {(answer.question, answer.method, answer.round) for answer in evaluation.kept} == {
        ("set/1", method, number) for method in ("plain", "ngram") for number in (0, 1)
    }
    assert len(requests) == 2 + 4 + 2


async def test_questions_that_do_not_fit_are_left_out() -> None:
    """The fake server has a context of 1024 tokens."""
    evaluation, _ = await evaluated(methods=[], tokens=600)
    assert evaluation.skipped == {"set/2": "needs 1202 tokens with its answers, the context has 1024"}
    with pytest.raises(EvaluationError, match=r"no question fits: set/1: needs 2001 tokens"):
        await evaluated(methods=[], tokens=2000)


async def test_without_plain_decoding_there_is_nothing() -> None:
    with pytest.raises(EvaluationError, match="plain decoding fails: set/1: "):
        await evaluated(Act(), REFUSED, questions=[ONE])


async def test_models_that_are_not_served_are_refused() -> None:
    with pytest.raises(EvaluationError, match="--model: other is not served, but fake"):
        await evaluated(model="other")
    evaluation, _ = await evaluated(questions=[ONE], methods=[], model="fake")
    assert evaluation.model == "fake"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--tokens", "0"), "--tokens is 0, must be from 1 to 1000000"),
        (("--rounds", "0"), "--rounds is 0, must be from 1 to 1000"),
        (("--warm-up", "0"), "--warm-up is 0, must be from 1 to 1000"),
        (("--questions", "0"), "--questions is 0, must be from 1 to 1000000"),
        (("--seed", "-1"), "--seed is -1, must be from 0 to"),
        (("--learning", "nan"), "--learning is nan, must be from 0 to 3600"),
        (("--alpha", "0"), "--alpha is 0, must be above 0 and at most 1"),
        (("--temperatures", "0,-1"), "--temperatures is -1, must be from 0 to 100"),
        (("--temperatures", "warm"), "argument --temperatures"),
        (("--streams", "0,4"), "--streams is 0, must be from 1 to 1024"),
        (("--form", "poem"), "argument --form: invalid choice: 'poem'"),
        (("--device", "meta"), "--device meta: cpu, cuda and cuda:N are supported"),
        (("--prompts", "nowhere.jsonl"), "--prompts: nowhere.jsonl: is no file, and none of own, human-eval, mt-bench"),
        (("--categories", "code,poems"), "--prompts: poems: no prompt has this category"),
        (("--methods", "speculative"), "--methods: speculative: is none of plain, auto"),
        (("--methods", "rejection:0"), "--methods: rejection:0: N is 0, must be 1 to 128"),
        (
            ("--methods", "rejection", "--temperatures", "0"),
            "--methods: rejection needs temperature above 0, and --temperatures are 0: there, assisted is the same",
        ),
        (
            ("--methods", "assisted", "--temperatures", "1"),
            "--methods: assisted needs temperature 0, and --temperatures are 1: there, coupled is the same chain",
        ),
        (("--methods", "remote", "--draft", "none"), "--methods: remote needs a draft: give --draft"),
        (("--methods", "local_model"), "--methods: local_model needs a local draft: give --local-draft"),
        (("--methods", "heads"), "--methods: heads needs heads: give --heads"),
        (("--heads", "/nowhere"), "--heads /nowhere: there is no such file or directory"),
        (("--heads", ".", "--local-draft", "."), "--heads and --local-draft cannot be combined"),
        (("--target", "/nowhere"), "--target: "),
        (("--address", "nowhere"), "--address 'nowhere'"),
        (("--address", "h:1", "--draft", "none"), "--draft cannot be combined with --address"),
        (
            ("--address", "h:1", "--dtype", "bfloat16"),
            "--dtype cannot be combined with --address",
        ),
        (("--address", "h:1", "--target", "t"), "--target cannot be combined with --address"),
    ],
)
def test_wrong_options_are_one_sentence(given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        parsed(given)
    assert ending.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m bench papers: ")
    assert said in line


def test_usual_methods_are_those_that_are_possible() -> None:
    assert [method.name for method in parsed(["--draft", "none"]).methods] == [
        *("plain", "auto", "ngram", "lookahead:7,4,7", "jacobi")
    ]
    assert "rejection" in [method.name for method in parsed([]).methods]
    assert "rejection" in [method.name for method in parsed(["--address", "h:1"]).methods]


def test_a_quick_run_is_small() -> None:
    args = parsed(["--quick"])
    assert len(args.prompts) == 6
    assert (args.rounds, args.tokens, args.warm_up) == (1, 32, 1)


def test_an_address_without_a_server_is_one_sentence() -> None:
    with pytest.raises(SystemExit) as ending:
        main(["--address", "127.0.0.1:1", "--quick"])
    assert str(ending.value).startswith("bench papers: ")
    assert "\n" not in str(ending.value)


@pytest.mark.verify
async def test_real_services_take_all_methods(tmp_path: Path) -> None:
    """With any drafter, tokens are plain decoding's. No method is refused."""
    target = make("llama", tmp_path / "target")
    draft = near(target, tmp_path / "draft", noise=0.01)
    names = [*USUAL, "draft", "local", "lookahead", "expansion:2,1,1", "coupled:1-2", "rejection:1-2"]
    methods = methods_named(names, 0.1)
    evaluation = Evaluation(settings(temperatures=[0.0, 0.8], tokens=12), methods, [ONE])
    async with stack(target, draft) as services:
        await evaluation.run(services.address, Console(file=io.StringIO()))
    assert (evaluation.failed, evaluation.skipped, evaluation.exact) == ({}, {}, True)
    measured = [(answer.method, answer.temperature) for answer in evaluation.kept]
    assert set(measured) == {(method.name, value) for method in methods for value in (0.0, 0.8) if method.fits(value)}
    for answer in evaluation.kept:
        assert answer.equal == answer.compared, answer.method
        assert sum(answer.accepted) == answer.steps
    assert all(answer.steps == answer.tokens for answer in evaluation.kept if answer.method == "plain")


@pytest.mark.verify
async def test_ctrl_c_prints_what_was_measured(tmp_path: Path) -> None:
    """Both questions are tokenized, and both methods warm up and answer the first; the next answer is held."""
    options = ("--methods", "ngram", "--temperatures", "0", "--categories", "code,prose", "--quick")
    async with FakeServer(*[Act()] * 6, Act(then="hold")) as server:
        command = (sys.executable, "-m", "bench", "papers", "--address", server.address, *options)
        process = await asyncio.create_subprocess_exec(*command, "--out", str(tmp_path), stdout=PIPE, stderr=PIPE)
        await asyncio.wait_for(server.held.wait(), 60)
        process.send_signal(signal.SIGINT)
        said, complained = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 130, complained.decode()
    assert "Traceback" not in complained.decode()
    assert said.decode().startswith("CUT OFF: results so far.")
    report = json.loads((tmp_path / "papers.json").read_text())
    assert [(answer["question"], answer["method"]) for answer in report["answers"]] == [
        ("own/code-01", "plain"),
        ("own/code-01", "ngram"),
    ]
    assert (tmp_path / "papers.png").stat().st_size


@pytest.mark.verify
@pytest.mark.timeout(600)
def test_all_methods_on_the_demo_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With any drafter, tokens are plain decoding's. No method fails."""
    methods = ["auto", "draft", "local", "remote", "ngram", "lookahead", "lookahead:3,3,3", "lookahead:7,4,7"]
    methods += ["jacobi", "assisted", "coupled:1-2", "rejection:1-2", "branches:2", "expansion:2,1,1", "contrastive"]
    main(["--quick", "--methods", *methods, "--out", str(tmp_path)])
    assert "| contrastive |" in capsys.readouterr().out
    report = json.loads((tmp_path / "papers.json").read_text())
    assert (report["failed"], report["skipped"], report["exact"]) == ({}, {}, True)
    greedy, sampled = report["cells"]
    assert len(report["questions"]) == 6
    assert len(greedy["methods"]) == 1 + len(methods) - 2
    assert len(sampled["methods"]) == 1 + len(methods) + 1
    for cell in report["cells"]:
        for name, summary in cell["methods"].items():
            assert summary["equal"] == summary["compared"], name
            assert (summary["compared"] > 0) == (name != "contrastive" and not name.startswith("rejection"))
        assert cell["methods"]["plain"]["tokens_a_step"] == 1.0
        assert cell["methods"]["remote"]["tokens_a_step"] > 1.0
        assert len(cell["methods"]["branches:2"]["conditional_acceptance"]) > 1
    assert {file.name for file in tmp_path.iterdir()} == {
        *("papers.json", "papers.md", "papers.png", "papers-acceptance.png", "papers-drafted.png", "papers-windows.png")
    }
