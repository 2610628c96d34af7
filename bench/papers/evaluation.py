"""An evaluation in progress: all methods take turns at answering every question, and the results are kept.

A cell is a temperature and a number of concurrent streams. In each cell all methods first warm up, then take turns at
groups of questions, one question per stream, so that a change of the machine's speed affects all of them. Each method
runs as a tenant of its own, since a verifier learns per tenant. No request finds a cached prefix, since the papers
compute every prompt.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import NamedTuple

from rich.console import Console
from rich.progress import Progress

from bench.papers.measures import diversity, equal_tokens, merged
from bench.papers.methods import PLAIN, Method
from bench.question_sets import Question
from specdec.client import AsyncClient, Completion, GenerateOptions, InvalidRequest, Message, SpecdecError

ANSWER_SECONDS = 900.0
SEEDS_A_ROUND = 1_000_000
SEEDS_A_QUESTION = 100  # a question has fewer turns


class EvaluationError(Exception):
    """Nothing can be measured; the message is the reason, in one line for the user."""


@dataclass(frozen=True)
class Settings:
    """The settings that all methods share."""

    temperatures: Sequence[float]
    streams: Sequence[int]
    tokens: int  # maximum of a turn's answer
    rounds: int
    warm_ups: int  # uncounted loads of each method at the start of each cell
    learning_seconds: float  # minimum time of uncounted loads, for adaptive methods
    form: str  # "chat", "text", or "auto": chat if the model has a template, but text for prompts to be continued
    ignore_end: bool  # every answer has `tokens` tokens
    seed: int
    model: str | None  # None: the only one served


class Cell(NamedTuple):
    """One setting in which all methods are compared."""

    temperature: float
    streams: int  # concurrent

    def __str__(self) -> str:
        return f"T = {self.temperature:g}, {self.streams} stream{'s' * (self.streams > 1)}"


class Group(NamedTuple):
    """Questions that are asked concurrently."""

    questions: list[Question]
    counted: int  # number of leading questions that count; the others only fill up the streams


@dataclass(frozen=True)
class Answered:
    """A question answered by a method in a round. Sums are over its turns."""

    method: str
    temperature: float
    streams: int
    round: int
    question: str
    category: str
    seconds: float  # wall time, from requests to whole answers
    tokens: int
    steps: int  # of the target
    offered: int  # candidates verified
    accepted: list[int]  # entry i: steps with i candidates accepted
    sources: dict[str, int]  # tokens by source
    compared: int  # tokens compared with plain decoding's; 0 if they need not be equal
    equal: int  # equal ones among those compared
    diversity: dict[str, float]  # of the answers' words, by measure

    @property
    def tokens_a_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Load:
    """A group of questions that a method has answered."""

    method: str
    temperature: float
    streams: int
    seconds: float  # until the last answer
    tokens: int


@dataclass
class _Outcome:
    """A method's answers to the turns of a question."""

    seconds: float = 0.0
    tokens: list[list[int]] = field(default_factory=list)  # by turn
    texts: list[str] = field(default_factory=list)
    steps: int = 0
    offered: int = 0
    accepted: list[int] = field(default_factory=list)
    sources: Counter[str] = field(default_factory=Counter)

    def add(self, seconds: float, completion: Completion) -> None:
        """Add the answer to the next turn."""
        speculation = completion.finish.speculation
        self.seconds += seconds
        self.tokens.append(completion.tokens)
        self.texts.append(completion.reasoning + completion.text)
        self.steps += speculation.steps
        self.offered += speculation.offered
        self.accepted = merged((self.accepted, speculation.accepted_histogram))
        self.sources.update(speculation.sources)

    @property
    def count(self) -> int:
        return sum(map(len, self.tokens))


class Evaluation:
    def __init__(self, settings: Settings, methods: Sequence[Method], questions: Sequence[Question]) -> None:
        """`methods` begin with plain decoding; `questions` have different ids."""
        self.answers: list[Answered] = []
        self.loads: list[Load] = []
        self.failed: dict[str, str] = {}  # by method: why it is no longer measured
        self.skipped: dict[str, str] = {}  # by question: why it is left out altogether
        self.exact = True  # whether all answers had exact numerics
        self.model = ""  # as served
        self._settings = settings
        self._methods = methods
        self._questions = {question.id: question for question in questions}
        self._seeds = {question.id: SEEDS_A_QUESTION * at for at, question in enumerate(questions)}
        self._tenants = {method.name: uuid.uuid4().hex for method in methods}
        self._chat = False

    @property
    def kept(self) -> list[Answered]:
        """The answers to questions that were not left out."""
        return [answer for answer in self.answers if answer.question not in self.skipped]

    async def run(self, address: str, console: Console) -> None:
        """Measure everything at a deployment; EvaluationError if no served model fits the settings, plain decoding
        fails or no question is left. However the run ends, the measurements so far are kept."""
        settings = self._settings
        cells = [Cell(temperature, streams) for temperature in settings.temperatures for streams in settings.streams]
        async with AsyncClient(address, timeout=ANSWER_SECONDS, max_retries=0) as client:
            await self._choose_model(client)
            await self._skip_long_questions(client)
            with Progress(console=console, disable=not console.is_terminal) as bar:
                work = bar.add_task("questions", total=len(cells) * settings.rounds * len(self._left()))
                for cell in cells:
                    await self._warm_up(client, cell)
                    for number in range(settings.rounds):
                        for turn, group in enumerate(self._groups(cell.streams)):
                            await self._take_turns(client, cell, number, turn, group)
                            bar.advance(work, group.counted)
        if not self.kept:
            raise EvaluationError(f"no question is left: {_first(self.skipped)}")

    async def _choose_model(self, client: AsyncClient) -> None:
        models = await client.models()
        asked = self._settings.model
        names = ", ".join(model.name for model in models) or "no model"
        found = [model for model in models if asked is None or model.is_asked_as(asked)]
        if asked is not None and not found:
            raise EvaluationError(f"--model: {asked} is not served, but {names}")
        if len(found) != 1:
            raise EvaluationError(f"{names} are served: choose one with --model")
        if self._settings.form == "chat" and not found[0].chat:
            raise EvaluationError(f"--form chat: {found[0].name} has no chat template")
        self.model = asked or found[0].name
        self._chat = found[0].chat and self._settings.form != "text"

    async def _skip_long_questions(self, client: AsyncClient) -> None:
        """Leave out questions that, with all answers, may not fit into the context."""
        for question in self._left():
            needed, context = self._settings.tokens * len(question.turns), 0
            for turn in question.turns:
                if self._as_chat(question):
                    found = await client.tokenize(messages=[{"role": "user", "content": turn}], model=self.model)
                else:
                    found = await client.tokenize(turn, model=self.model)
                needed, context = needed + found.count, found.context_tokens
            if needed > context:
                self.skipped[question.id] = f"needs {needed} tokens with its answers, the context has {context}"
        if not self._left():
            raise EvaluationError(f"no question fits: {_first(self.skipped)}")

    def _left(self) -> list[Question]:
        return [question for name, question in self._questions.items() if name not in self.skipped]

    def _groups(self, streams: int) -> Iterator[Group]:
        """Yield groups of one question per stream. The first questions fill up the last group."""
        questions = self._left()
        for begin in range(0, len(questions), streams):
            filled = list(islice(cycle(questions), begin, begin + streams))
            yield Group(filled, min(streams, len(questions) - begin))

    def _possible(self, cell: Cell) -> list[Method]:
        fitting = (method for method in self._methods if method.fits(cell.temperature))
        return [method for method in fitting if method.name not in self.failed]

    async def _warm_up(self, client: AsyncClient, cell: Cell) -> None:
        """Run loads that do not count, as Spec-Bench does; adaptive methods run them for `learning_seconds` or more."""
        settings = self._settings
        for method in self._possible(cell):
            begin = time.perf_counter()
            for count, group in enumerate(cycle(self._groups(cell.streams)), 1):
                if await self._answers(client, method, cell, 0, group) is None:
                    break
                learned = not method.adaptive or time.perf_counter() - begin >= settings.learning_seconds
                if count >= settings.warm_ups and learned:
                    break

    async def _take_turns(self, client: AsyncClient, cell: Cell, number: int, turn: int, group: Group) -> None:
        """Have all methods answer a group, each time beginning with another method, and keep the results."""
        methods = self._possible(cell)
        first = turn % len(methods)
        found: dict[str, list[_Outcome]] = {}
        for method in methods[first:] + methods[:first]:
            begin = time.perf_counter()
            outcomes = await self._answers(client, method, cell, number, group)
            if outcomes is not None:
                seconds = time.perf_counter() - begin
                self.loads.append(Load(method.name, *cell, seconds, sum(outcome.count for outcome in outcomes)))
                found[method.name] = outcomes
        plain = found.get(PLAIN, [])  # empty: one of the questions was refused
        for question, outcome in zip(group.questions, plain, strict=False):
            if not outcome.count:
                self.skipped[question.id] = "plain decoding answers nothing"
        for method in methods:
            answered = zip(group.questions, found.get(method.name, []), plain, strict=False)
            for question, mine, base in islice(answered, group.counted):
                self.answers.append(_answered(method, cell, number, question, mine, base))

    async def _answers(
        self, client: AsyncClient, method: Method, cell: Cell, number: int, group: Group
    ) -> list[_Outcome] | None:
        """Return a method's answers to a group; None if the method, or one of the questions, is left out from now
        on."""
        asked = (self._ask(client, method, cell, number, question) for question in group.questions)
        found = await asyncio.gather(*asked, return_exceptions=True)
        outcomes = []
        for question, outcome in zip(group.questions, found, strict=True):
            if isinstance(outcome, _Outcome):
                outcomes.append(outcome)
            elif not isinstance(outcome, SpecdecError):
                raise outcome
            elif isinstance(outcome, InvalidRequest) and self._has_answered(method, cell):
                self.skipped[question.id] = f"{method.name}: {outcome}"
            elif method.name == PLAIN:
                raise EvaluationError(f"plain decoding fails: {question.id}: {outcome}")
            else:
                self.failed[method.name] = f"{cell}, {question.id}: {outcome}"
        return outcomes if len(outcomes) == len(group.questions) else None

    def _has_answered(self, method: Method, cell: Cell) -> bool:
        """Return whether the method has answered at this temperature, so that a refusal is due to the question."""
        return any(load.method == method.name and load.temperature == cell.temperature for load in self.loads)

    def _as_chat(self, question: Question) -> bool:
        return self._chat and (self._settings.form == "chat" or not question.continued)

    async def _ask(self, client: AsyncClient, method: Method, cell: Cell, number: int, question: Question) -> _Outcome:
        """Ask a question's turns one after the other, each with the turns and answers before it."""
        settings, outcome, messages = self._settings, _Outcome(), list[Message]()
        seed = settings.seed + SEEDS_A_ROUND * number + self._seeds[question.id]
        for turn, text in enumerate(question.turns):
            messages.append({"role": "user", "content": text})
            prompt = None
            options: GenerateOptions = {
                **method.asked(cell.temperature),
                "model": self.model,
                "max_tokens": settings.tokens,
                "ignore_end_token": settings.ignore_end,
                "ignore_generation_config": True,  # the papers' sampling
                "seed": seed + turn,
                "tenant": self._tenants[method.name],
                "cache_salt": uuid.uuid4().hex,
            }
            if self._as_chat(question):
                options["messages"] = messages
            else:
                prompt = "\n\n".join(message["content"] for message in messages)
            begin = time.perf_counter()
            (completion,) = (await client.complete(prompt, **options)).completions
            outcome.add(time.perf_counter() - begin, completion)
            self.exact &= completion.finish.exact
            messages.append({"role": "assistant", "content": completion.text})
        return outcome


def _answered(method: Method, cell: Cell, number: int, question: Question, mine: _Outcome, plain: _Outcome) -> Answered:
    compared, equal = equal_tokens(mine.tokens, plain.tokens) if method.exact else (0, 0)
    return Answered(
        method.name,
        *cell,
        round=number,
        question=question.id,
        category=question.category,
        seconds=mine.seconds,
        tokens=mine.count,
        steps=mine.steps,
        offered=mine.offered,
        accepted=mine.accepted,
        sources=dict(mine.sources),
        compared=compared,
        equal=equal,
        diversity=diversity(mine.texts),
    )


def _first(reasons: dict[str, str]) -> str:
    """Return the first reason, after its name."""
    name, reason = next(iter(reasons.items()))
    return f"{name}: {reason}"
