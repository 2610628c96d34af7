"""Complete many prompts concurrently; a full server returns a retry delay."""

import asyncio
import sys

from specdec import AsyncClient
from specdec.client import Overloaded

PROMPTS = [f"def function_{number}(" for number in range(16)]


async def complete(client: AsyncClient, prompt: str) -> str:
    while True:
        try:
            result = await client.complete(prompt, max_tokens=24, seed=1)
        except Overloaded as full:
            await asyncio.sleep(full.retry_after or 1.0)
        else:
            return result.completions[0].text


async def main(address: str = "127.0.0.1:50050") -> None:
    async with AsyncClient(address) as client:
        for prompt, text in zip(
            PROMPTS, await asyncio.gather(*(complete(client, each) for each in PROMPTS)), strict=True
        ):
            print(f"{prompt!r}: {text!r}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
