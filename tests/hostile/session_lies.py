"""Lies about a session: what is sent when, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.serving.errors import InvalidRequestError, ModelFailureError, to_status
from specdec.v2 import model_pb2, verifier_pb2
from tests.hostile.lying_verifier import Lie, LyingSession
from tests.hostile.message_lies import MAX_UINT32, MAX_UINT64

STATUSES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


async def begun(session: LyingSession, true_commits: int | None = None) -> None:
    """Relay the truth, up to and including this number of commits."""
    async for response in session.responses():
        await session.say(response)
        if session.commits >= (session.true_commits if true_commits is None else true_commits):
            return


async def for_ever(say: Callable[[], Awaitable[None]], pause: float = 0.0) -> None:
    while True:
        await say()
        await asyncio.sleep(pause)


async def says_nothing_after_its_last_word(session: LyingSession) -> None:
    """The text is over, but its last commit does not mark the end."""
    async for response in session.responses():
        if response.commit.finish_reason:
            response.commit.finish_reason = model_pb2.FINISH_REASON_UNSPECIFIED
        await session.say(response)
    await for_ever(session.progress, 0.1)


async def goes_on_past_the_end(session: LyingSession) -> None:
    """Commits past an end token, past the requested length, past the context."""
    async for response in session.responses():
        if response.commit.finish_reason:
            response.commit.finish_reason = model_pb2.FINISH_REASON_UNSPECIFIED
        await session.say(response)
    await for_ever(lambda: session.commit([9]))


async def never_commits(session: LyingSession) -> None:
    await begun(session, true_commits=0)
    await for_ever(session.progress, 0.1)


async def never_commits_again(session: LyingSession) -> None:
    await begun(session)
    await for_ever(session.progress, 0.1)


async def shows_life_without_end(session: LyingSession) -> None:
    await begun(session)
    await for_ever(session.progress)


async def commits_nothing_without_end(session: LyingSession) -> None:
    await begun(session)
    await for_ever(lambda: session.commit([]))


async def says_nothing_without_end(session: LyingSession) -> None:
    await begun(session)
    await for_ever(lambda: session.say(verifier_pb2.VerifyResponse()))


async def is_in_a_step_for_ever(session: LyingSession) -> None:
    await begun(session)
    await for_ever(lambda: session.progress(steps=MAX_UINT64, step_age_us=MAX_UINT64, step_expected_us=1), 0.1)


async def takes_every_step_to_be_long(session: LyingSession) -> None:
    """Reports a long step age, and expects an even longer one, to avoid suspicion."""
    await begun(session)
    await for_ever(lambda: session.progress(step_age_us=MAX_UINT64 // 2, step_expected_us=MAX_UINT64), 0.1)


async def opens_twice(session: LyingSession) -> None:
    async for response in session.responses():
        await session.say(response)
        if response.HasField("opened"):
            await session.say(response)


async def commits_before_it_opens(session: LyingSession) -> None:
    await session.commit([9])
    async for response in session.responses():
        await session.say(response)


async def shows_life_and_never_opens(session: LyingSession) -> None:
    await for_ever(session.progress, 0.05)


async def never_opens(session: LyingSession) -> None:
    await asyncio.Event().wait()


async def falls_silent(session: LyingSession) -> None:
    await begun(session)
    await asyncio.Event().wait()


async def cannot_be_read(session: LyingSession) -> None:
    await begun(session)
    await for_ever(lambda: session.say(b"\x12\xff\xff\xff"), 0.05)


async def ends_as_if_all_were_well(session: LyingSession) -> None:
    await begun(session)


async def says_everything_twice(session: LyingSession) -> None:
    """Begins once there is a text to spoil."""
    async for response in session.responses():
        await session.say(response)
        if session.commits >= session.true_commits:
            await session.say(response)


async def is_preempted_more_each_time(session: LyingSession) -> None:
    """Reports the maximum number of preemptions and breaks off; so does the next verifier."""
    async for response in session.responses():
        if response.HasField("commit"):
            response.commit.preemptions = MAX_UINT32
        await session.say(response)
        if session.opening.attempt <= 1 and session.commits:
            return


async def changes_its_model(session: LyingSession) -> None:
    """Each session reports another model, and breaks off."""
    async for response in session.responses():
        if response.HasField("opened"):
            response.opened.identity.model_fingerprint = f"{session.number:064}"
        await session.say(response)
        if session.commits >= session.true_commits:
            return


async def is_damaged_on_its_way(session: LyingSession) -> None:
    """Flips one bit of the response to each opening, then breaks off."""
    async for response in session.responses():
        if response.HasField("opened"):
            await session.say_damaged(response)
        else:
            await session.say(response)
        if session.commits >= session.true_commits:
            return


async def fails_inside(session: LyingSession) -> None:
    await begun(session)
    await session.end(to_status(ModelFailureError("the step failed: RuntimeError: " + "x" * 5000)))


async def fails_inside_before_it_opens(session: LyingSession) -> None:
    await session.end(to_status(ModelFailureError("the step failed: RuntimeError")))


async def finds_fault_too_late(session: LyingSession) -> None:
    await begun(session)
    violations = [(f"field[{number}]", "is not to the liar's taste") for number in range(100)]
    await session.end(to_status(InvalidRequestError(violations)))


async def finds_fault_with_everybody(session: LyingSession) -> None:
    await session.end(to_status(InvalidRequestError([("prompt_tokens", "y" * 5000)])))


def _full(seconds: int) -> grpc.Status:
    """Return a refusal with a retry delay."""
    retry = any_pb2.Any()
    retry.Pack(error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=seconds)))
    code = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code, message="full", details=[retry]))
    return status


async def is_full_for_ten_thousand_years(session: LyingSession) -> None:
    await session.end(_full(315_576_000_000))


async def was_full_in_the_past(session: LyingSession) -> None:
    await session.end(_full(-315_576_000_000))


async def is_full_beyond_all_numbers(session: LyingSession) -> None:
    await session.end(_full(2**62))


async def is_full_in_the_midst(session: LyingSession) -> None:
    await begun(session)
    await session.end(_full(2**40))


async def ends_with_every_status(session: LyingSession) -> None:
    """A different status per session; every second session ends before it has opened."""
    if session.number % 2:
        await begun(session)
    await session.abort(STATUSES[session.number // 2 % len(STATUSES)], "the liar says so")


async def ends_with_a_long_story(session: LyingSession) -> None:
    await begun(session)
    await session.abort(grpc.StatusCode.FAILED_PRECONDITION, "no " * 2000)


CONDUCTS: tuple[Lie, ...] = (
    says_nothing_after_its_last_word,
    goes_on_past_the_end,
    never_commits,
    never_commits_again,
    shows_life_without_end,
    commits_nothing_without_end,
    says_nothing_without_end,
    is_in_a_step_for_ever,
    takes_every_step_to_be_long,
    opens_twice,
    commits_before_it_opens,
    shows_life_and_never_opens,
    never_opens,
    falls_silent,
    cannot_be_read,
    ends_as_if_all_were_well,
    says_everything_twice,
    is_preempted_more_each_time,
    changes_its_model,
    is_damaged_on_its_way,
    fails_inside,
    fails_inside_before_it_opens,
    finds_fault_too_late,
    finds_fault_with_everybody,
    is_full_for_ten_thousand_years,
    was_full_in_the_past,
    is_full_beyond_all_numbers,
    is_full_in_the_midst,
    ends_with_every_status,
    ends_with_a_long_story,
)
