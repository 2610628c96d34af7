"""Profile the verifier's step thread with py-spy: the time of each part of the model's forward pass and of the rest of
a step, and how busy the event loop's thread is meanwhile.

    python -m bench overhead --streams 16

Samples the running verifier a hundred times a second while streams decode. There is no draft unless --draft is given;
the verifier's own proposals are included unless --speculation is off.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.arguments import limit, parser_of
from demo.prompts import held_out
from specdec.client import AsyncClient
from specdec.local import DEMO, Stack

TOKENS = 700
SETTLE_SECONDS = 2.0
"""Seconds until prompts are computed and the first tokens are out."""


async def decode(address: str, streams: int, speculation: Any, profile: list[str]) -> None:
    """Keep all streams busy while the profiler samples."""

    async def one(client: AsyncClient, number: int, prompt: list[int]) -> None:
        while True:
            async with client.generate(
                tokens=prompt,
                max_tokens=TOKENS,
                temperature=0.8,
                seed=number,
                ignore_end_token=True,
                speculation=speculation,
            ) as stream:
                async for _ in stream:
                    pass

    async with AsyncClient(address) as client:
        work = [asyncio.create_task(one(client, *each)) for each in enumerate(held_out(streams))]
        await asyncio.sleep(SETTLE_SECONDS)
        profiler = await asyncio.create_subprocess_exec(*profile, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _, errors = await profiler.communicate()
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
    if profiler.returncode:
        raise SystemExit(f"py-spy: {errors.decode().strip()}")


STEP_FUNCTIONS = (
    "verify_step",
    "VerifiedStep.commit",
    "StepLoop._complete",
    "StepLoop._plan_and_run",
    "StepLoop.step",
    "EngineWorker.turn",
)
"""Functions of the step thread, innermost first."""


@dataclass
class Shares:
    """Numbers of samples, by thread and function."""

    forward: Counter[str]  # of the step thread, by part of the forward pass
    rest: Counter[str]  # of the step thread in the rest of a step, by function
    waiting: int  # of the step thread between steps
    event_loop: int  # of the event loop's thread, while it was awake


def shares(stacks: str) -> Shares:
    """Return the samples in a profile of py-spy's raw format."""
    found = Shares(Counter(), Counter(), 0, 0)
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        names = [frame.partition(" (")[0] for frame in frames.split(";")]
        if "EngineWorker.turn" in names:
            outer = next(name for name in STEP_FUNCTIONS if name in names)
            inner = names[names.index(outer) + 1 :] or [f"{outer} itself"]
            if any(name.endswith("Engine.forward") for name in inner):
                found.forward[_part(inner)] += int(count)
            else:
                found.rest[inner[0]] += int(count)
        elif "Worker._run" in names:
            found.waiting += int(count)
        elif "BaseEventLoop._run_once" in names and names[-1] != "EpollSelector.select":
            found.event_loop += int(count)
    return found


def _part(inner: list[str]) -> str:
    """Return the part of a forward pass to which these functions belong."""
    if "Float32Head.forward" in inner:
        return "output head"
    compiled, interpreted = inner[-1] == "Decoder.__call__", "sequence.<locals>.layers" in inner
    return "layers" if compiled or interpreted else "preparation"


def main(given: Sequence[str]) -> None:
    parser = parser_of("overhead", __doc__)
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--speculation", choices=["auto", "off"], default="auto")
    parser.add_argument("--seconds", type=int, default=10)
    args = parser.parse_args(given)
    limit(parser, args, 1, "streams", "seconds")
    spy = Path(sys.executable).parent / "py-spy"
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack.start(args.target, args.draft, dtype=args.dtype) as stack,
    ):
        out = Path(folder, "stacks")
        pid = str(stack.children["verifier"].process.pid)
        profile = [str(spy), "record", "--pid", pid, "--duration", str(args.seconds), "--format", "raw"]
        asyncio.run(decode(stack.address, args.streams, args.speculation, [*profile, "--idle", "--output", str(out)]))
        found = shares(out.read_text())
    forward, rest = found.forward.total(), found.rest.total()
    step = forward + rest
    print(f"{args.streams} streams, {step + found.waiting} samples of the step thread, {step} in steps; of these")
    print(f"{'forward pass':28} {100 * forward / step:5.1f} %")
    for part, count in found.forward.most_common():
        print(f"    {part:24} {100 * count / step:5.1f} %")
    print(f"{'rest':28} {100 * rest / step:5.1f} %")
    for function, count in found.rest.most_common(6):
        print(f"    {function:24} {100 * count / step:5.1f} %")
    print(f"the event loop's thread was awake in {100 * found.event_loop / (step + found.waiting):.1f} %")
