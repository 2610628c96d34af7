"""Measure how much of a conversation is recomputed when several verifiers share the work.

    python -m bench prefix-routing [--chats 40 --turns 6]

Chats with the same system prompt send their turns through either of two orchestrators, first with one verifier, then
with three. In a third run, one of three is killed once all chats are half way. Users think between two turns.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import grpc

from bench.arguments import limit, parser_of
from bench.serving.pods import running
from demo.prompts import held_out
from specdec.client import AsyncClient
from specdec.v2 import verifier_pb2, verifier_pb2_grpc

SYSTEM_TOKENS, USER_TOKENS, ANSWER_TOKENS = 128, 64, 48
MEMORY = 40_960
"""Tokens of KV memory of each verifier: enough for all chats, so that nothing is recomputed for lack of memory."""
THINKING_SECONDS = 2.0
"""Mean time between an answer and the next turn."""


@dataclass
class Turns:
    """Prompt tokens of all turns with the same number, and the cached part of them."""

    prompt: int = 0
    cached: int = 0


@dataclass
class Found:
    """Results of a run, with the tokens committed by each surviving verifier, half way (`committed_before`) and at the
    end."""

    turns: list[Turns]
    committed: list[int] = field(default_factory=list)
    committed_before: list[int] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)

    def cached_share(self, first: int = 1) -> float:
        """Return the share of cached prompt tokens from turn `first` to the last."""
        turns = self.turns[first - 1 :]
        return sum(turn.cached for turn in turns) / sum(turn.prompt for turn in turns)


async def committed_tokens(addresses: Sequence[str]) -> list[int]:
    """Return the number of tokens committed by each of these verifiers."""
    found = []
    for address in addresses:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
            stats = await stub.GetStats(verifier_pb2.GetStatsRequest())
            found.append(int(stats.committed_tokens))
    return found


async def converse(verifiers: int, chats: int, turns: int, *, killing: bool) -> Found:
    found, half = Found([Turns() for _ in range(turns)]), turns // 2
    system, *said = held_out(1 + chats * turns, tokens=SYSTEM_TOKENS, seed=5)
    half_way, going_on = asyncio.Barrier(chats + 1), asyncio.Barrier(chats + 1)

    with running(verifiers, drafts=0, kv_tokens=MEMORY) as pods:
        addresses = [pod.address for pod in pods["verifier"]]
        fronts = [pod.address for pod in pods["orchestrator"]]
        async with AsyncExitStack() as exits:
            clients = [await exits.enter_async_context(AsyncClient(front, timeout=600)) for front in fronts]

            async def chat(number: int) -> None:
                dice = random.Random(number)
                text = list(system)
                for turn in range(turns):
                    if turn == half:
                        await half_way.wait()
                        await going_on.wait()
                    await asyncio.sleep(dice.expovariate(1 / THINKING_SECONDS))
                    text += said[number * turns + turn][:USER_TOKENS]
                    text += await take(turn, dice.choice(clients), text)

            async def take(turn: int, client: AsyncClient, text: list[int]) -> list[int]:
                answer: list[int] = []
                begin = time.perf_counter()
                async with client.generate(
                    tokens=text, max_tokens=ANSWER_TOKENS, ignore_end_token=True, speculation="off"
                ) as chunks:
                    async for chunk in chunks:
                        if not answer:
                            found.first_tokens.append(time.perf_counter() - begin)
                        answer += chunk.tokens
                        if chunk.finish is not None:
                            found.turns[turn].prompt += chunk.finish.prompt_tokens
                            found.turns[turn].cached += chunk.finish.cached_tokens
                return answer

            async with asyncio.TaskGroup() as group:
                for number in range(chats):
                    group.create_task(chat(number))
                await half_way.wait()
                if killing:
                    pods["verifier"][0].child.process.kill()
                    del addresses[0]
                found.committed_before = await committed_tokens(addresses)
                await going_on.wait()
        found.committed = await committed_tokens(addresses)
    return found


def imbalance(tokens: Sequence[int]) -> float:
    """Return the load of the busiest verifier, divided by the mean."""
    return max(tokens) * len(tokens) / sum(tokens)


def main(given: Sequence[str]) -> None:
    parser = parser_of("prefix-routing", __doc__)
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--turns", type=int, default=6)
    args = parser.parse_args(given)
    limit(parser, args, 1, "chats")
    limit(parser, args, 4, "turns")  # two before a verifier dies and two after
    half = args.turns // 2 + 1
    alone: Found | None = None
    for verifiers, killing in ((1, False), (3, False), (3, True)):
        found = asyncio.run(converse(verifiers, args.chats, args.turns, killing=killing))
        alone = alone or found
        name = f"{verifiers} verifiers, one killed" if killing else f"{verifiers} verifiers"
        since = [after - before for after, before in zip(found.committed, found.committed_before, strict=True)]
        load = f"since its death {imbalance(since):.2f}" if killing else f"{imbalance(found.committed):.2f}"
        parts = {"all turns": 1, f"turns {half} on": half, f"turns {half + 1} on": half + 1}
        cached = {part: (found.cached_share(turn), alone.cached_share(turn)) for part, turn in parts.items()}
        shares = ", ".join(
            f"{part} {share:.3f} ({share / best:.3f} of one's)" for part, (share, best) in cached.items()
        )
        firsts = sorted(found.first_tokens)
        print(
            f"{name}: cached {shares}; load of the busiest over the mean {load}; "
            f"first token {firsts[len(firsts) // 2]:.3f} s in the median",
            flush=True,
        )
