"""Measure how a tenant that floods a verifier affects another one's time to first token and completed requests.

    python -m bench fairness [--rounds 3 --seconds 20]

A quiet tenant requests a fifth of the verifier's capacity. A flooding tenant requests ten times as much, from a
separate process, since its thousand client streams would otherwise delay the quiet tenant's answers. In turns: the
quiet one alone; both, as two tenants; both under one name, which is first come, first served.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from bench.arguments import parser_of
from bench.serving.answers import Answer, completed
from bench.serving.open_loop import VERIFIER, arrivals, capacity
from specdec.client import AsyncClient
from specdec.local import DEMO, Stack

QUIET, FLOOD = "quiet", "flood"


def flood(address: str, rate: float, seconds: float, seed: int, tenant: str) -> list[Answer]:
    """Send `rate` requests a second, in this process."""

    async def ask_all() -> list[Answer]:
        async with AsyncClient(address) as client:
            return await arrivals(client, rate, seconds, seed=seed, tenant=tenant)

    return asyncio.run(ask_all())


async def measure(address: str, rounds: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:

        def flooding(rate: float, seconds: float, seed: int, tenant: str) -> Awaitable[list[Answer]]:
            return loop.run_in_executor(process, flood, address, rate, seconds, seed, tenant)

        await flooding(1.0, 1.0, 0, FLOOD)  # warm-up of the process
        await _measure(address, rounds, seconds, flooding)


async def _measure(address: str, rounds: int, seconds: float, flooding: Callable[..., Awaitable[list[Answer]]]) -> None:
    async with AsyncClient(address) as quiet:
        most = await capacity(quiet, seconds / 2)
        rate = most / 5
        print(f"capacity: {most:.1f} requests a second; quiet asks for {rate:.1f}, flood for {10 * rate:.1f}")
        found: dict[str, list[Answer]] = {"alone": [], "two tenants": [], "one name": []}
        floods: dict[str, list[Answer]] = {name: [] for name in found}
        for number in range(rounds):
            for name, other in (("alone", None), ("two tenants", FLOOD), ("one name", QUIET)):
                both: list[Awaitable[list[Answer]]] = [arrivals(quiet, rate, seconds, seed=number, tenant=QUIET)]
                if other is not None:
                    both.append(flooding(10 * rate, seconds, 1000 + number, other))
                mine, *theirs = await asyncio.gather(*both)
                found[name] += mine
                floods[name] += theirs[0] if theirs else []
    alone = np.percentile([each.first or np.inf for each in found["alone"]], 95, method="higher")
    for name, answers in found.items():
        firsts = [each.first or np.inf for each in answers]
        p50, p95 = np.percentile(firsts, [50, 95], method="higher")
        errors = Counter(each.error for each in answers if each.error)
        print(
            f"{name:12} quiet: {len(answers)} asked, {len(completed(answers))} complete {dict(errors)}; first token "
            f"median {p50:.3f} s, p95 {p95:.3f} s, {p95 / alone:.2f} of alone; flood: {len(floods[name])} asked, "
            f"{len(completed(floods[name]))} complete"
        )


def main(given: Sequence[str]) -> None:
    parser = parser_of("fairness", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args(given)
    with Stack.start(DEMO / "target", "none", dtype="float32", verifier_options=VERIFIER) as stack:
        asyncio.run(measure(stack.address, args.rounds, args.seconds))
