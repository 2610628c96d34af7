"""Sessions at draft services for vLLM's texts: requested room, and handling of refusals."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, MutableMapping
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest

from draft_service.servicer import DraftServicer
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.errors import InvalidRequestError, OverloadedError, PeerLostError, ServiceError
from specdec.serving.pods import breaker
from specdec.serving.validation import MAX_DEPTH
from specdec.v2 import draft_pb2
from specdec.vllm import drafts as module
from specdec.vllm.drafts import FULL_SECONDS, Drafts, Target
from specdec.vllm.settings import VllmDraftSettings
from specdec.vllm.texts import VllmText
from specdec.wire.address import Address
from tests.captured_logs import captured_logs
from tests.models import CONTEXT
from tests.services.conftest import Directories, directories
from tests.stack import stack, until

__all__ = ["directories"]  # the fixture

DEPTH = 3
PROMPT = list(range(20, 40))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again soon after a text has lost its draft, or a draft has failed."""
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.02)
    monkeypatch.setattr(breaker, "FIRST_OPEN_SECONDS", 0.02)
    monkeypatch.setattr(breaker, "MAX_OPEN_SECONDS", 0.02)


def drafts_of(
    directories: Directories, *addresses: str, room: int = CONTEXT, depth: int = DEPTH
) -> tuple[Drafts, Callable[[], VllmText]]:
    """Return the sessions at these drafts, and a factory of texts."""
    model = ModelDirectory(directories.target)
    target = Target(model.tokenizer_fingerprint, model.vocabulary, CONTEXT, frozenset(), depth)
    settings = VllmDraftSettings(tuple(map(Address.parse, addresses)), wait=1.0)

    def text() -> VllmText:
        return VllmText(np.asarray(PROMPT, dtype=np.int32), model.vocabulary, CONTEXT, frozenset())

    return Drafts(settings, target, room), text


async def grow(drafts: Drafts, text: VllmText, tokens: int = 0, *, until_drafted: bool = True) -> None:
    """Add `tokens` tokens of the target, equal to the draft's candidates if there are any; wait for the next
    candidates."""

    def step(new: list[int]) -> bool:
        with drafts.lock:
            row = np.asarray([*text.tree.committed, *new], dtype=np.int32)
            drafts.follow(text, text.extend_to(row), proposing=True)
            return bool(text.chain(DEPTH))

    proposed = step((text.chain(tokens) + [50] * tokens)[:tokens])
    while until_drafted and not proposed:
        await asyncio.sleep(0.01)
        proposed = step([])


async def test_a_text_gets_room_bit_by_bit(directories: Directories) -> None:
    """A draft reserves memory for all tokens that a session may have."""
    opened: list[tuple[int, int]] = []

    class Recording(DraftServicer):
        def parse(self, request: Any, deadline: float | None) -> Any:
            opened.append((len(request.open.prompt_tokens), request.open.max_tokens))
            return super().parse(request, deadline)

    async with stack(directories.target, directories.target, draft_kind=Recording) as services:
        drafts, text_of = drafts_of(directories, services.drafts[0].address, room=40)
        text = text_of()
        async with asyncio.timeout(30):
            await grow(drafts, text)
            assert opened == [(len(PROMPT), 40)]
            while len(text) < CONTEXT - DEPTH - 1:
                await grow(drafts, text, DEPTH + 1)
        for (begin, room), (again, _) in pairwise(opened):
            assert begin + room - 2 * DEPTH - 2 < again <= begin + room
        last, room = opened[-1]
        assert last + room == CONTEXT  # the last session lasts to the end
        assert len(opened) >= (CONTEXT - len(PROMPT)) // 40
        drafts.forget([text])
        await until(lambda: services.idle)


async def test_more_candidates_than_half_of_the_greatest_depth_are_drafted(directories: Directories) -> None:
    async with stack(directories.target, directories.target) as services:
        drafts, text_of = drafts_of(directories, services.drafts[0].address, depth=MAX_DEPTH)
        text = text_of()
        with captured_logs() as logs:
            async with asyncio.timeout(30):
                await grow(drafts, text)
        assert not refusals(logs)
        drafts.forget([text])
        await until(lambda: services.idle)


class Full(DraftServicer):
    """Refuses every session."""

    def parse(self, request: Any, deadline: float | None) -> Any:
        raise OverloadedError("there is no room for a text here")


def refusals(logs: list[MutableMapping[str, Any]]) -> list[MutableMapping[str, Any]]:
    return [line for line in logs if line["event"] == "draft_refused"]


async def test_what_a_full_draft_refuses_another_takes(directories: Directories) -> None:
    """Even though the full one has the fewest sessions; the refusal is logged once."""
    async with (
        stack(directories.target, directories.target) as services,
        stack(directories.target, directories.target, draft_kind=Full) as others,
    ):
        full, good = others.drafts[0].address, services.drafts[0].address
        with captured_logs() as logs:
            drafts, text_of = drafts_of(directories, full, good)
            texts = [text_of() for _ in range(3)]
            begin = time.monotonic()
            await asyncio.gather(*(grow(drafts, text) for text in texts))
            assert time.monotonic() - begin < FULL_SECONDS
            assert [(line["pod"], line["why"]) for line in refusals(logs)] == [
                (full, "RESOURCE_EXHAUSTED: there is no room for a text here")
            ]
        drafts.forget(texts)


async def test_a_reason_to_refuse_is_told_once(directories: Directories) -> None:
    reasons = iter(["one", "one", "another", *["one"] * 100])
    asked: list[str] = []

    class Refusing(DraftServicer):
        def parse(self, request: Any, deadline: float | None) -> Any:
            asked.append(next(reasons))
            raise PeerLostError(asked[-1], "LOST")  # its status includes the request id, different each time

    async with stack(directories.target, directories.target, draft_kind=Refusing) as services:
        with captured_logs() as logs:
            drafts, text_of = drafts_of(directories, services.drafts[0].address)
            text = text_of()
            async with asyncio.timeout(30):
                while len(asked) < 5:  # then the fourth attempt has ended
                    await grow(drafts, text, until_drafted=False)
                    await asyncio.sleep(0.01)
            assert [line["why"] for line in refusals(logs)] == ["UNAVAILABLE: one", "UNAVAILABLE: another"]
        drafts.forget([text])


@pytest.mark.parametrize("refusal", [OverloadedError("full"), InvalidRequestError([("open", "too long")])])
async def test_a_refusal_shows_that_a_lost_draft_is_back(directories: Directories, refusal: ServiceError) -> None:
    errors = iter([PeerLostError("lost", "LOST")])

    class Recovering(DraftServicer):
        def parse(self, request: Any, deadline: float | None) -> Any:
            raise next(errors, refusal)

    async with stack(directories.target, directories.target, draft_kind=Recovering) as services:
        with captured_logs() as logs:
            drafts, text_of = drafts_of(directories, services.drafts[0].address)
            text = text_of()
            async with asyncio.timeout(30):
                while not any(line["event"] == "breaker_closed" for line in logs):
                    await grow(drafts, text, until_drafted=False)
                    await asyncio.sleep(0.01)
            assert [line["event"] for line in logs if line["event"].startswith("breaker_")] == [
                "breaker_opened",
                "breaker_closed",
            ]
        drafts.forget([text])


async def test_a_late_event_loop_is_not_the_drafts_fault() -> None:
    """The loop runs in vLLM's worker process, which may hold the GIL for seconds."""
    loop, arrived, over = asyncio.get_running_loop(), asyncio.Queue[draft_pb2.DraftResponse](), threading.Event()

    class Stream:
        async def read(self) -> draft_pb2.DraftResponse:
            return await arrived.get()

    def peer() -> None:
        while not over.wait(0.1):
            loop.call_soon_threadsafe(arrived.put_nowait, draft_pb2.DraftResponse())

    reading = asyncio.create_task(Drafts._read(cast("Drafts", None), Stream()))
    await asyncio.sleep(0)  # it waits
    sending = threading.Thread(target=peer, daemon=True)
    sending.start()
    time.sleep(module.SILENCE_SECONDS + 0.5)  # noqa: ASYNC251 (the loop is late)
    try:
        assert isinstance(await reading, draft_pb2.DraftResponse)
    finally:
        over.set()
        sending.join()
