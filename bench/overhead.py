"""Where the verifier's step thread spends its time, by py-spy: the model's forward pass, or the rest of a step.

    python -m bench.overhead --streams 16

Samples the running verifier a hundred times a second while streams decode. Undrafted unless --draft is given; the
verifier's own guesses are part of it, unless --speculation off.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from bench.prompts import held_out
from specdec.client import AsyncClient
from specdec.local import DEMO, Stack

TOKENS = 700
SETTLE_SECONDS = 2.0
"""Until prompts are through and the first tokens are out."""


async def decode(address: str, streams: int, speculation: Any, profile: list[str]) -> None:
    """Keep all streams busy for as long as the profiler samples."""

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


def shares(stacks: str) -> tuple[Counter[str], Counter[str]]:
    """Samples of the step thread by part, and of a step's remainder by function; from py-spy's raw format."""
    parts: Counter[str] = Counter()
    rest: Counter[str] = Counter()
    for line in stacks.splitlines():
        frames, _, count = line.rpartition(" ")
        names = [frame.partition(" (")[0] for frame in frames.split(";")]
        if "StepLoop.turn" not in names:
            continue
        outer = "StepLoop._step" if "StepLoop._step" in names else "StepLoop.turn"
        inner = [*names[names.index(outer) + 1 :], f"{outer} itself"][0]
        if inner.endswith("Engine.forward"):
            parts["forward"] += int(count)
        else:
            parts["rest of the step"] += int(count)
            rest[inner] += int(count)
    return parts, rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEMO / "target")
    parser.add_argument("--draft", default="none")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--speculation", choices=["auto", "off"], default="auto")
    parser.add_argument("--seconds", type=int, default=10)
    args = parser.parse_args()
    spy = Path(sys.executable).parent / "py-spy"
    with (
        tempfile.TemporaryDirectory() as folder,
        Stack.start(args.target, args.draft, dtype=args.dtype) as stack,
    ):
        out = Path(folder, "stacks")
        pid = str(stack.children["verifier"].process.pid)
        profile = [str(spy), "record", "--pid", pid, "--duration", str(args.seconds), "--format", "raw"]
        asyncio.run(decode(stack.address, args.streams, args.speculation, [*profile, "--idle", "--output", str(out)]))
        parts, rest = shares(out.read_text())
    step = parts["forward"] + parts["rest of the step"]
    print(f"{args.streams} streams, {sum(parts.values())} samples of the step thread")
    for name, count in parts.most_common():
        print(f"{name:24} {100 * count / sum(parts.values()):5.1f} %")
    print(f"outside the forward pass: {100 * parts['rest of the step'] / step:.1f} % of a step; of this")
    for name, count in rest.most_common(6):
        print(f"    {name:24} {100 * count / step:5.1f} %")


if __name__ == "__main__":
    main()
