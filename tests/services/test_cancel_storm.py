"""A tenant that keeps cancelling its requests opens few sessions beside another tenant's text."""

from __future__ import annotations

import time

from orchestrator.generation.generation import Generation
from orchestrator.pods.admission import CANCELLED_SECONDS, MAX_CANCELLED
from orchestrator.requests.parsing import parse
from orchestrator.text.request_timeline import SampleTimeline
from specdec.serving.timeline import Timeline
from tests.services.conftest import Directories
from tests.stack import Stack, request_of, stack, until

PROMPT = [50, 60, 70, 80, 90]


async def ask_and_leave(services: Stack) -> None:
    """Request a text, and cancel after its first token."""
    call = services.stub.Generate(request_of(PROMPT, max_tokens=250, ignore_end_token=True, tenant="storm"))
    assert await call.read()
    call.cancel()


async def test_openings_that_are_cancelled_keep_their_places_for_a_while(directories: Directories) -> None:
    async with stack(directories.target, None, target_delay=lambda: time.sleep(0.005)) as services:
        (pod,) = services.peers.verifiers
        quiet = services.stub.Generate(request_of(PROMPT, max_tokens=250, ignore_end_token=True, tenant="quiet"))
        assert await quiet.read()
        begin = time.monotonic()
        for _ in range(MAX_CANCELLED + 1):
            await ask_and_leave(services)
        assert time.monotonic() - begin >= CANCELLED_SECONDS  # the last one waited for the place of the first
        quiet.cancel()
        await until(lambda: services.idle and not pod.admission.cancelled._sessions)


async def test_a_text_that_is_read_to_its_end_keeps_nothing(directories: Directories) -> None:
    async with stack(directories.target, None) as services:
        (pod,) = services.peers.verifiers
        for stop in ((), ("a", "e", "i", "o", "u", " ")):
            await services.generate(PROMPT, max_tokens=40, ignore_end_token=True, tenant="one", stop=stop)
        assert not pod.admission.cancelled._kept


async def test_a_caller_that_leaves_with_the_last_token_has_not_cancelled(directories: Directories) -> None:
    async with stack(directories.target, None) as services:
        (pod,) = services.peers.verifiers
        request = request_of(PROMPT, max_tokens=4, ignore_end_token=True, tenant="one")
        (sample,) = parse(request, services.model).samples
        revision = services.catalog.choose(request)
        timeline = SampleTimeline(Timeline(), revision.stats.failover_events)
        responses = Generation(sample, revision, services.peers, None, timeline).run()
        async for response in responses:
            if response.HasField("finish"):
                break
        await responses.aclose()
        assert not pod.admission.cancelled._kept
