"""The check of a made-up client: one use works, the others do not."""

from __future__ import annotations

from tests.clients.checks.uses import joined, same_text, server, use, weather


@use("right")
async def right() -> None:
    same_text(f" {server().answer}\n", server().answer)


@use("wrong")
def wrong() -> None:
    same_text("something else", server().answer)


@use("in one piece")
def in_one_piece() -> None:
    joined([server().answer], server().answer)


@use("no city")
def no_city() -> None:
    weather('{"city": "London", "warm": true}')


@use("exits")
def exits() -> None:
    raise SystemExit("it\nhas ended")
