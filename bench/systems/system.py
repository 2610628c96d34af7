"""Systems under test: servers that are loaded once and then measured in turns.

All systems share the same cores, and only one works at a time. Each runs in its own process sessions, so that its
processor time can be measured, also while it should be idle. Each system's module defines its launch and its measured
configurations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.systems.protocol import Arrivals

if TYPE_CHECKING:  # other systems run in environments without specdec
    from specdec.engine.placement import Dtype, Weights

LOAD_SECONDS = 900.0  # vLLM compiles
ANSWER_SECONDS = 900.0
STOP_SECONDS = 20.0


class NotServingError(Exception):
    """The system under test cannot serve, or has stopped; the message is the reason in one line."""


@dataclass(frozen=True)
class Load:
    """A load: prompts sent concurrently, each to be continued by `max_tokens`, end tokens ignored."""

    prompts: list[list[int]]
    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class Answer:
    """The answer to a load; `arrivals` holds, for each prompt, (seconds since all were sent, tokens)."""

    seconds: float  # until the last token of all prompts
    arrivals: Arrivals
    steps: int | None = None  # of the target, summed over the prompts
    candidates: int | None = None  # verified in these steps
    sources: Mapping[str, int] = field(default_factory=dict)  # number of tokens by token source
    texts: list[list[int]] | None = None

    @property
    def tokens(self) -> int:
        return sum(tokens for stream in self.arrivals for _, tokens in stream)

    @property
    def first(self) -> list[float]:
        """Seconds to each prompt's first token."""
        return [stream[0][0] for stream in self.arrivals]

    @property
    def pauses(self) -> list[float]:
        """Seconds between consecutive arrivals of the same text."""
        return [after - before for stream in self.arrivals for (before, _), (after, _) in pairwise(stream)]

    def checked(self, name: str, load: Load) -> Answer:
        """Return the answer; NotServingError unless it has all tokens of the load."""
        wanted = len(load.prompts) * load.max_tokens
        if self.tokens != wanted:
            raise NotServingError(f"{name} gave {self.tokens} tokens instead of {wanted}")
        return self


class SystemUnderTest(Protocol):
    """A system under test, loaded."""

    about: Mapping[str, Any]  # versions, flags

    def run(self, load: Load, mode: str = "") -> Answer:
        """Run a load, in this mode if the system has several."""
        ...

    def sessions(self) -> Mapping[str, int]:
        """Return the ids of its process sessions, by name."""
        ...


@dataclass(frozen=True)
class Setup:
    """The setup of all systems: the models, and the maximum load."""

    target: Path
    draft: Path | None
    dtype: Dtype
    streams: int  # maximum concurrency
    context: int  # maximum tokens of a sequence
    device: str = "cpu"  # of the target; drafts in other processes stay on the CPU
    threads: int | None = None  # of the target on the CPU; None: one per core, less one beside a draft service
    weights: Weights = "stored"  # of the target, at specdec


@dataclass(frozen=True)
class Configuration:
    """A measured configuration: a system under test in one of its modes."""

    name: str
    mode: str = ""
    one_stream: bool = False  # it takes one prompt at a time
    adaptive: bool = False  # it adapts its speculation to its load


@dataclass(frozen=True)
class Launch:
    """How to start a system under test, and the configurations that it serves."""

    name: str
    start: Callable[[], AbstractContextManager[SystemUnderTest]]
    configurations: tuple[Configuration, ...]
