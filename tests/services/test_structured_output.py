"""Texts with a grammar fit it, and are the same under any speculation, resumption or pod failure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
import jsonschema
import pytest

from demo.prompts import held_out
from orchestrator.models.stats import OrchestratorStats
from specdec.client import build_request
from specdec.engine.model_directory import ModelDirectory
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar, Kind
from specdec.local import DEMO
from specdec.serving.errors import GrammarPendingError
from specdec.serving.grammars import Grammars
from specdec.v2 import generation_pb2, model_pb2
from testing.schemas import random_schema
from tests.grammar.test_text_grammar import HARD, HOSTILE
from tests.models import END
from tests.services.conftest import Directories
from tests.services.test_equality import slow_target
from tests.services.test_transformers import onnx
from tests.stack import ALWAYS, OWN_DRAFTERS, Stack, long_steps, request_of, stack, until
from tests.verifier_service.fakes import Decided
from verifier_service.backend.result import Mode

PROMPT = list(range(40, 60))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["function", "class", "module"]},
        "sizes": {"type": "array", "items": {"type": "integer", "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": model_pb2.Grammar(json_schema=json.dumps(SCHEMA)),
    "regex": model_pb2.Grammar(regex="([a-z]{1,3}-){2,9}[0-9]+"),
    "lark": model_pb2.Grammar(lark='start: "[" (item (", " item)*)? "]"\nitem: /[a-z]{1,4}/ | start'),
    "choice": model_pb2.Grammar(choice=model_pb2.Choice(texts=["not at all", "not yet", "never"])),
}
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "seed": 1},
    {"temperature": 0.8, "seed": 2},
    {"temperature": 1.0, "top_p": 0.9, "frequency_penalty": 0.5, "seed": 3},
]
LOOKING = generation_pb2.Speculation(drafters=OWN_DRAFTERS, lookahead=model_pb2.Lookahead(window=4, ngram=3, guesses=2))
JACOBI = build_request(speculation="jacobi", jacobi=6).speculation


def check_fits(directories: Directories, grammar: model_pb2.Grammar, completion: generation_pb2.Completion) -> None:
    """Check that the text fits the grammar; at its length limit it may be a prefix of a text that fits."""
    field = grammar.WhichOneof("kind")
    assert field is not None
    source = tuple(grammar.choice.texts) if field == "choice" else (getattr(grammar, field),)
    compiled = GrammarCompiler.of(ModelDirectory(directories.target)).compile(Grammar(Kind(field), source))
    tokens = list(completion.tokens)
    ended = completion.finish.reason == model_pb2.FINISH_REASON_STOP
    assert ended == (tokens[-1] == END)
    text = tokens[:-1] if ended else tokens
    state = compiled.begin(text, frozenset({END}))
    assert state.permits([], END) or not ended


async def compiled(services: Stack, grammar: model_pb2.Grammar) -> None:
    """Wait until the drafts have compiled a grammar: the first one waits for a trial process to start."""
    for pod in services.drafts:
        while True:
            with contextlib.suppress(GrammarPendingError):
                await pod.service._grammars.prepare(grammar)
                break


async def all_of(services: Stack, **fields: Any) -> list[generation_pb2.Completion]:
    """Return a completion for each grammar and sampling, all at once."""
    return await asyncio.gather(
        *(
            services.generate(PROMPT, sampling=sampling, grammar=grammar, max_tokens=60, **fields)
            for grammar in GRAMMARS.values()
            for sampling in SAMPLINGS
        )
    )


def tokens_of(completions: Sequence[generation_pb2.Completion]) -> list[list[int]]:
    return [list(completion.tokens) for completion in completions]


async def test_texts_fit_and_are_equal_whoever_proposes(directories: Directories) -> None:
    patient: dict[str, Any] = {"target_delay": lambda: time.sleep(0.015), "patience_seconds": 0.3}
    async with stack(directories.target, directories.near, **patient) as services:
        plain = await all_of(services, plain=True)
        cases = [grammar for grammar in GRAMMARS.values() for _ in SAMPLINGS]
        for grammar, completion in zip(cases, plain, strict=True):
            check_fits(directories, grammar, completion)
        for grammar in GRAMMARS.values():
            await compiled(services, grammar)
        drafted = await all_of(services, speculation=ALWAYS)
        assert tokens_of(drafted) == tokens_of(plain)
        assert sum(each.finish.speculation.sources["remote_draft"] for each in drafted) > 30
        own = await all_of(services, speculation=generation_pb2.Speculation(drafters=OWN_DRAFTERS))
        assert tokens_of(own) == tokens_of(plain)
        assert sum(each.finish.speculation.sources["grammar"] for each in own) > 30
        for windows in (LOOKING, JACOBI):
            assert tokens_of(await all_of(services, speculation=windows)) == tokens_of(plain)
    async with stack(
        directories.target,
        directories.random,
        draft_model=directories.near,
        controller=Decided(Mode.LOCAL_DRAFT),
        target_delay=slow_target,
    ) as services:
        local = await all_of(services)
        assert tokens_of(local) == tokens_of(plain)
        assert sum(each.finish.speculation.sources["local_model"] for each in local) > 10


async def test_a_draft_proposes_nothing_that_is_forbidden(directories: Directories) -> None:
    """Where few tokens are allowed, a draft close to its target is nearly always right once it has compiled the
    grammar."""
    async with stack(directories.target, directories.target, target_delay=long_steps) as services:
        await compiled(services, GRAMMARS["regex"])
        completion = await services.generate(PROMPT, grammar=GRAMMARS["regex"], max_tokens=60, speculation=ALWAYS)
        assert services.draft_loop is not None
        assert completion.finish.speculation.accepted > 0
        stats = services.draft_loop.stats
        assert stats.committed > 20  # the text's end tokens never reach it
        assert stats.guessed > 0.8 * stats.committed


async def test_a_text_is_resumed_from_anywhere(directories: Directories) -> None:
    async with stack(directories.target, directories.near) as services:
        for name, grammar in GRAMMARS.items():
            fields: dict[str, Any] = {"sampling": SAMPLINGS[1], "grammar": grammar, "max_tokens": 40}
            whole = list((await services.generate(PROMPT, **fields)).tokens)
            begun = [whole[:length] for length in range(1, len(whole), 3)]
            rests = await asyncio.gather(
                *(services.generate(PROMPT, generated_tokens=tokens, **fields) for tokens in begun)
            )
            for tokens, rest in zip(begun, rests, strict=True):
                assert tokens + list(rest.tokens) == whole, name


async def test_reasoning_may_end_anywhere(directories: Directories) -> None:
    """The model itself chooses the closing token: in turn, several tokens of its plain text. Before it nothing is ruled
    out; after it, in the same step or not, the grammar holds."""
    async with stack(directories.target, directories.target, target_delay=slow_target) as services:
        fields: dict[str, Any] = {"sampling": SAMPLINGS[1], "max_tokens": 40}
        free = list((await services.generate(PROMPT, plain=True, **fields)).tokens)
        for at in range(0, 12, 3):
            marker = free[at]
            begins = free.index(marker) + 1
            fields["grammar"] = model_pb2.Grammar(regex="[0-9]{4,6}", after_token=marker)
            plain = list((await services.generate(PROMPT, plain=True, **fields)).tokens)
            assert plain[:begins] == free[:begins]
            piece = b"".join(services.model.tokenizer.piece(token) for token in plain[begins:-1])
            assert piece.isdigit()
            assert 4 <= len(piece) <= 6
            assert plain[-1] == END
            ways = (ALWAYS, generation_pb2.Speculation(drafters=OWN_DRAFTERS), LOOKING)
            guessed = await asyncio.gather(*(services.generate(PROMPT, speculation=way, **fields) for way in ways))
            assert tokens_of(guessed) == [plain] * len(ways)


async def test_other_rules_keep_to_the_grammar(directories: Directories) -> None:
    async with stack(directories.target, directories.near) as services:
        for rule, sampling in (
            (model_pb2.ACCEPTANCE_RULE_REJECTION, {"temperature": 0.9, "seed": 5}),
            (model_pb2.ACCEPTANCE_RULE_CONTRASTIVE, {"seed": 5}),
        ):
            completions = await asyncio.gather(
                *(
                    services.generate(PROMPT, sampling=sampling, grammar=grammar, max_tokens=60, rule=rule)
                    for grammar in GRAMMARS.values()
                )
            )
            for grammar, completion in zip(GRAMMARS.values(), completions, strict=True):
                check_fits(directories, grammar, completion)


async def test_bans_yield_where_the_grammar_leaves_nothing_else(directories: Directories) -> None:
    async with stack(directories.target, directories.near) as services:
        (only,) = services.model.tokenizer.encode("x", special=False)
        completion = await services.generate(
            PROMPT,
            sampling={"banned_tokens": [only]},
            grammar=model_pb2.Grammar(regex="x"),
            max_tokens=9,
            min_tokens=5,
        )
        assert list(completion.tokens) == [only, END]


async def test_a_text_moves_to_another_verifier_in_the_midst(directories: Directories) -> None:
    grammar = model_pb2.Grammar(lark='start: (/[a-z]{1,4}/ ", ")* "end"')
    fields: dict[str, Any] = {"sampling": {"temperature": 1.0, "seed": 4}, "grammar": grammar, "max_tokens": 60}
    async with stack(directories.target, directories.near, verifiers=2, target_delay=long_steps) as services:
        want = await services.generate(PROMPT, plain=True, **fields)
        request = generation_pb2.GenerateRequest(
            tokens=generation_pb2.TokenPrompt(ids=PROMPT),
            sampling=generation_pb2.SamplingParameters(**fields.pop("sampling")),
            **fields,
        )
        tokens: list[int] = []
        ended = False
        async for response in services.stub.Generate(request):
            tokens += response.tokens
            if len(tokens) < 5:
                continue
            for pod in [] if ended else services.verifiers:
                if pod.loop.pool.held:
                    await pod.stop()
                    ended = True
            if response.HasField("finish"):
                assert response.finish.speculation.failover_events["verifier_lost"] == 1
        assert tokens == list(want.tokens)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"grammar": model_pb2.Grammar()}, "grammar: is set and empty"),
    ({"json_schema": '{"type": "strin"}'}, 'json_schema: /type: is "strin", must be one of array, boolean'),
    ({"json_schema": "{}", "grammar": GRAMMARS["regex"]}, "grammar: is set together with json_schema"),
    ({"grammar": model_pb2.Grammar(regex="(")}, "grammar.regex: cannot be used: error: unclosed group"),
    ({"grammar": model_pb2.Grammar(json_schema='{"type": "strin"}')}, 'grammar.json_schema: /type: is "strin"'),
    ({"grammar": model_pb2.Grammar(json_schema='{"$ref": "#"}')}, "grammar.json_schema: matches no text"),
    ({"grammar": model_pb2.Grammar(choice=model_pb2.Choice())}, "grammar.choice: has 0 texts"),
    ({"grammar": model_pb2.Grammar(regex="a", after_token=9999)}, "grammar.after_token: is 9999"),
    ({"grammar": model_pb2.Grammar(regex="a"), "ignore_end_token": True}, "needs a token that ends the text"),
    (
        {"grammar": model_pb2.Grammar(regex="a"), "generated_tokens": [9], "sampling": {"seed": 1}},
        "generated_tokens: the text violates its grammar at token 0",
    ),
]


async def test_refusals(directories: Directories) -> None:
    async with stack(directories.target, directories.near) as services:
        for fields, problem in REFUSED:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await services.generate(PROMPT, max_tokens=9, **fields)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, problem
            assert problem in (refused.value.details() or "")


async def test_a_grammar_that_becomes_too_complex_ends_its_text_alone(directories: Directories) -> None:
    """It ends immediately, since another verifier would fail too."""
    async with stack(directories.target, directories.near, verifiers=2) as services:
        other = asyncio.create_task(services.generate(PROMPT, max_tokens=100, ignore_end_token=True))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await services.generate(
                PROMPT, max_tokens=100, min_tokens=90, grammar=model_pb2.Grammar(lark=HARD.source[0])
            )
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == "grammar: is too complex for this text"
        assert len((await other).tokens) == 100
        assert OrchestratorStats.summed(services.catalog.counts().values()).failover_events["verifier_lost"] == 0
        await until(lambda: services.idle)


async def test_the_short_form_of_a_schema(directories: Directories) -> None:
    async with stack(directories.target, directories.near) as services:
        fields: dict[str, Any] = {"sampling": SAMPLINGS[1], "max_tokens": 40}
        short = await services.generate(PROMPT, json_schema=json.dumps(SCHEMA), **fields)
        assert short.tokens == (await services.generate(PROMPT, grammar=GRAMMARS["schema"], **fields)).tokens


async def test_a_verifier_that_follows_no_grammar_is_not_asked(directories: Directories) -> None:
    """A verifier of an older version does not know the field, so it would ignore the grammar."""
    async with stack(directories.target, directories.near) as services:
        services.verifiers[0].service._grammars = Grammars(None)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await services.generate(PROMPT, max_tokens=9, grammar=GRAMMARS["regex"])
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.verify
async def test_a_thousand_schemas() -> None:
    """Random schemas and seeds on the demo pair, greedy and sampled: drafted text equals plain text, and is valid, or a
    prefix of valid text at its length limit."""
    chance = random.Random(11)
    prompts = held_out(20, tokens=40)
    requests: list[dict[str, Any]] = [
        {"json_schema": json.dumps(random_schema(chance)), "temperature": temperature, "seed": chance.getrandbits(64)}
        for _ in range(1000)
        for temperature in (0.0, 0.8)
    ]
    counts: Counter[str] = Counter()

    async with stack(DEMO / "target", DEMO / "draft", draft_engine=onnx, capacity=16384) as services:

        async def check(number: int, json_schema: str, **sampling: Any) -> None:
            fields: dict[str, Any] = {
                "sampling": sampling,
                "grammar": model_pb2.Grammar(json_schema=json_schema),
                "max_tokens": 96,
            }
            prompt = prompts[number % len(prompts)]
            drafted = await services.generate(prompt, **fields)
            plain = await services.generate(prompt, plain=True, **fields)
            assert list(drafted.tokens) == list(plain.tokens), json_schema
            if drafted.finish.reason == model_pb2.FINISH_REASON_STOP:
                jsonschema.validate(json.loads(drafted.text), json.loads(json_schema))
                counts["valid"] += 1
            else:
                compiled = compiler.compile(Grammar(Kind.JSON_SCHEMA, (json_schema,)))
                compiled.begin(drafted.tokens, services.model.end_tokens)
                counts["cut"] += 1
            for name, count in drafted.finish.speculation.sources.items():
                counts[name] += count

        compiler = GrammarCompiler.of(ModelDirectory(DEMO / "target"))
        for start in range(0, len(requests), 16):
            part = enumerate(requests[start : start + 16], start)
            await asyncio.gather(*(check(number, **request) for number, request in part))
    print(dict(counts))
    assert counts["valid"] > 1000
    assert counts["grammar"] > 10_000


@pytest.mark.verify
async def test_hostile_schemas_hold_up_nobody(directories: Directories) -> None:
    """Each schema is answered within two seconds while another stream continues."""

    async def stream(services: Stack) -> float:
        """Return the longest pause between two pieces of a text."""
        request = request_of(PROMPT, max_tokens=200, ignore_end_token=True)
        longest, last = 0.0, time.monotonic()
        async for _ in services.stub.Generate(request):
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return longest

    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        pauses = []
        for name, (kind, source, _) in HOSTILE.items():
            if name == "not built":  # a service takes it, and checks the finished text
                continue
            grammar = model_pb2.Grammar()
            setattr(grammar, kind.value, source if isinstance(source, str) else json.dumps(source))
            other, begin = asyncio.create_task(stream(services)), time.monotonic()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await services.generate(PROMPT, max_tokens=9, grammar=grammar)
            assert time.monotonic() - begin < 2
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            pauses.append(await other)
        print(f"longest pause {max(pauses):.3f} s")
        assert max(pauses) < 1
