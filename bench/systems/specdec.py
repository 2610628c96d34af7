"""specdec as a system under test: its services, used over gRPC by the streaming client, whose work is timed as well.

`bench/speed/speed.py` describes its configurations.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from bench.systems.protocol import Record
from bench.systems.system import ANSWER_SECONDS, Answer, Configuration, Launch, Load, Setup
from specdec.client import AsyncClient, GenerateOptions
from specdec.engine.heads.kinds import kind_in
from specdec.engine.heads.medusa_files import MedusaFiles
from specdec.local import PROGRAMS, Stack

NAME = "specdec"
"""First word of its configurations' names."""
PLAIN = "specdec plain"
"""The baseline configuration."""

Window = tuple[int, int, int]
"""Size of a lookahead window: W, N, G."""


@dataclass
class Specdec:
    """A running stack. The mode of a load is its requests' `speculation`; "local 7,4,7" also sets the size of the
    lookahead window."""

    about: Mapping[str, Any]
    stack: Stack

    @classmethod
    @contextlib.contextmanager
    def start(
        cls,
        setup: Setup,
        draft: Path | None = None,
        *,
        local_draft: Path | None = None,
        verifier_options: tuple[str, ...] = (),
        draft_options: tuple[str, ...] = (),
        programs: Mapping[str, tuple[str, ...]] = PROGRAMS,
    ) -> Iterator[Specdec]:
        placed: tuple[str, ...] = () if setup.device == "cpu" else ("--device", setup.device)
        if setup.weights != "stored":
            placed += ("--weights", setup.weights)
        if setup.threads is not None:
            placed += ("--threads", str(setup.threads))
            placed += () if draft is None else ("--threads-while-drafting", str(setup.threads))
        with Stack.start(
            setup.target,
            "none" if draft is None else str(draft),
            local_draft=local_draft,
            dtype=setup.dtype,
            verifier_options=(*verifier_options, *placed),
            draft_options=draft_options,
            programs=programs,
        ) as stack:
            flags = {
                "draft": draft and draft.name,
                "local_draft": local_draft and local_draft.name,
                "dtype": setup.dtype,
                "device": setup.device,
                "weights": setup.weights,
                "verifier_options": verifier_options,
            }
            yield cls({"flags": flags}, stack)

    def run(self, load: Load, mode: str = "auto") -> Answer:
        return asyncio.run(self._run(load, mode)).checked(NAME, load)

    async def _run(self, load: Load, mode: str) -> Answer:
        speculation = _speculation(mode)
        async with AsyncClient(self.stack.address, timeout=ANSWER_SECONDS) as client:
            await client.models()  # connect before the clock starts
            record, finishes = Record(len(load.prompts)), []
            salt = uuid.uuid4().hex  # finds no cached prompt, since other systems compute every prompt of a load
            texts: list[list[int]] = [[] for _ in load.prompts]

            async def one(number: int, prompt: list[int]) -> None:
                options: GenerateOptions = {
                    **speculation,
                    "tokens": prompt,
                    "max_tokens": load.max_tokens,
                    "temperature": load.temperature,
                    "seed": number,
                    "ignore_end_token": True,
                    "tenant": mode,  # a verifier learns by tenant what pays
                    "cache_salt": salt,
                }
                async with client.generate(**options) as stream:
                    async for chunk in stream:
                        record.add(number, len(chunk.tokens))
                        texts[number] += chunk.tokens
                        if chunk.finish is not None:
                            finishes.append(chunk.finish.speculation)

            await asyncio.gather(*(one(*each) for each in enumerate(load.prompts)))
            seconds = time.perf_counter() - record.begin
        sources: Counter[str] = Counter()
        for finish in finishes:
            sources.update(finish.sources)
        steps, candidates = sum(f.steps for f in finishes), sum(f.offered for f in finishes)
        return Answer(seconds, record.arrivals, steps, candidates, sources, texts)

    def sessions(self) -> Mapping[str, int]:
        return {name: child.process.pid for name, child in self.stack.children.items()}


def _speculation(mode: str) -> GenerateOptions:
    speculation, _, window = mode.partition(" ")
    size = {"lookahead": tuple(map(int, window.split(",")))} if window else {}
    return cast("GenerateOptions", {"speculation": speculation, **size})


def launches(setup: Setup, windows: Sequence[Window] = (), heads: Sequence[Path] = ()) -> list[Launch]:
    """Return specdec's systems. Lookahead windows of these sizes are measured whether or not they pay. Each of these
    sets of heads is measured alone, with the verifier's other proposers, and (except Medusa's) in a draft service."""
    start = partial(Specdec.start, setup)
    sizes = (",".join(map(str, window)) for window in windows)
    lookahead = (
        Configuration("specdec lookahead", "local", adaptive=True),
        *(Configuration(f"specdec lookahead {size}", f"local {size}", adaptive=True) for size in sizes),
    )
    fast = partial(start, verifier_options=("--no-exact",))
    found = [
        Launch("specdec, fast numerics", fast, (Configuration(PLAIN, "off"),)),
        Launch("specdec, no draft", start, lookahead),
    ]
    if setup.device != "cpu":
        eager = partial(start, verifier_options=("--no-exact", "--no-cuda-graphs"))
        found.insert(1, Launch("specdec, no CUDA graphs", eager, (Configuration(f"{PLAIN}, no CUDA graphs", "off"),)))
    if setup.draft is not None:
        drafted = (
            Configuration("specdec drafted", "draft", adaptive=True),
            Configuration("specdec drafted + lookahead", "auto", adaptive=True),
        )
        local = Configuration("specdec local draft", "auto", adaptive=True)
        found += [
            Launch("specdec, draft service", partial(start, setup.draft), drafted),
            Launch("specdec, local draft", partial(start, local_draft=setup.draft), (local,)),
        ]
    for path in heads:
        by_heads = (
            Configuration(f"specdec {path.name} alone", "heads", adaptive=True),
            Configuration(f"specdec {path.name}", "auto", adaptive=True),
        )
        found.append(Launch(f"specdec, {path.name}", partial(start, verifier_options=("--heads", str(path))), by_heads))
        if kind_in(path) is not MedusaFiles:
            placed = () if setup.device == "cpu" else ("--device", setup.device)
            fed = partial(
                start,
                setup.target,
                verifier_options=("--features", str(path)),
                draft_options=("--heads", str(path), "--engine", "torch", *placed),
            )
            as_a_service = Configuration(f"specdec {path.name} as a service", "draft", adaptive=True)
            found.append(Launch(f"specdec, {path.name} as a service", fed, (as_a_service,)))
    return found
