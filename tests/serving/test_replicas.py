"""Removed pods keep their channels while they are in use; each channel is closed once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from specdec.serving.pods.replicas import Replicas


class Channel:
    """Its first call of `close` waits until it is cancelled."""

    def __init__(self) -> None:
        self.calls = 0
        self.closed = False

    async def close(self) -> None:
        self.calls += 1
        if self.calls == 1:
            await asyncio.Event().wait()
        self.closed = True


@dataclass
class Pod:
    address: str
    channel: Channel = field(default_factory=Channel)
    in_use: bool = False


async def test_a_cancelled_close_leaves_the_rest_to_the_last_one() -> None:
    pods = Replicas(Pod, ["a", "b"])  # type: ignore[type-var]
    made = list(pods)
    pods.become([])
    closing = asyncio.create_task(pods.close_idle())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    made[1].channel.calls = 1  # only the first close hangs
    await pods.close()
    assert all(pod.channel.closed for pod in made)
