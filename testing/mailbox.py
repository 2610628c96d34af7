"""Response queues read synchronously, between steps of a loop whose thread is never started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.serving.response_queue import ResponseQueue
from verifier_service.backend.result import CommitDetails, PromptScores, VerifyResult


class _AtOnce:
    """An event loop that runs callbacks immediately: there is no other thread."""

    def call_soon_threadsafe(self, callback: Callable[..., None], *args: Any) -> None:
        callback(*args)


class Handed(ResponseQueue[Any]):
    """A response queue that passes each item to a function immediately; full while `takes_more` returns False."""

    def __init__(
        self,
        take: Callable[[Any], None],
        fail: Callable[[Exception], None],
        takes_more: Callable[[], bool] = lambda: True,
    ) -> None:
        self._loop = _AtOnce()  # type: ignore[assignment]
        self._take, self._fail, self._takes_more = take, fail, takes_more

    @property
    def full(self) -> bool:
        return not self._takes_more()

    def _append(self, item: Any) -> None:
        if isinstance(item, Exception):
            self._fail(item)
        else:
            self._take(item)


class Mailbox(ResponseQueue[tuple[VerifyResult, CommitDetails]]):
    """A response queue that keeps its items, and asserts that nothing follows a text's end and that prompt scores
    precede results."""

    def __init__(self) -> None:
        self._loop = _AtOnce()  # type: ignore[assignment]
        self.results: list[VerifyResult] = []
        self.details: list[CommitDetails] = []
        self.scores: list[PromptScores] = []
        self.error: Exception | None = None

    @property
    def full(self) -> bool:
        return False

    def _append(self, item: tuple[VerifyResult, CommitDetails] | PromptScores | Exception) -> None:
        assert self.error is None
        assert not self.finish
        if isinstance(item, Exception):
            self.error = item
        elif isinstance(item, PromptScores):
            assert not self.results
            self.scores.append(item)
        else:
            self.results.append(item[0])
            self.details.append(item[1])

    @property
    def finish(self) -> int:
        return self.results[-1].finish if self.results else 0
