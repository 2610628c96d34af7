"""Measure goodput under overload: requests a second completed before their deadline, by arrival rate.

    python -m bench goodput [--seconds 20]

Requests arrive at a half, once, one and a half times and twice the verifier's capacity. Each has a deadline of
`--patience` times a lone request's duration. Goodput should not fall as the rate grows.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from bench.arguments import parser_of
from bench.serving.answers import completed
from bench.serving.open_loop import VERIFIER, arrivals, ask, capacity
from demo.prompts import held_out
from specdec.client import AsyncClient
from specdec.local import DEMO, Stack

LOADS = (0.5, 1.0, 1.5, 2.0)


async def measure(address: str, rounds: int, seconds: float, patience: float) -> None:
    async with AsyncClient(address) as client:
        most = await capacity(client, seconds / 2)
        one = min([(await ask(client, prompt, "", None)).seconds for prompt in held_out(5, tokens=64, seed=1)])
        print(f"capacity: {most:.1f} requests a second; one alone takes {one:.2f} s, each has {patience * one:.2f} s")
        good: Counter[float] = Counter()
        came: Counter[float] = Counter()
        errors: dict[float, Counter[str]] = {load: Counter() for load in LOADS}
        for number in range(rounds):
            for load in LOADS:
                answers = await arrivals(client, load * most, seconds, seed=number, timeout=patience * one)
                good[load] += len(completed(answers))
                came[load] += len(answers)
                errors[load].update(each.error for each in answers if each.error)
    peak = max(good.values())
    for load in LOADS:
        rate = good[load] / (rounds * seconds)
        print(
            f"load {load:.1f}: {came[load]} came, {good[load]} complete in time, {rate:.1f} a second, "
            f"{good[load] / peak:.2f} of the peak; {dict(errors[load])}"
        )


def main(given: Sequence[str]) -> None:
    parser = parser_of("goodput", __doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument(
        "--patience", type=float, default=20.0, help="deadline, in multiples of a request's duration alone"
    )
    args = parser.parse_args(given)
    with Stack.start(DEMO / "target", "none", dtype="float32", verifier_options=VERIFIER) as stack:
        asyncio.run(measure(stack.address, args.rounds, args.seconds, args.patience))
