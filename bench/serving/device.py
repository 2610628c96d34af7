"""Measure the host's cost per step, with simulated devices that wait as long as a GPU would compute.

    python -m bench device [--profile 8b-h100 --streams 1,8,32,64 --ways off,forced --temperatures 0,0.8]

The three services and their messages are real, and so is all of the host's work for a step; the devices of target and
draft are simulated (`bench.systems.simulated_gpu`). A draft's first guess is right at three of four positions, and side
branches hold the right token at half of the others. Above temperature 0, top-p is 0.95. Each cell has `--settle`
seconds of load, then `--seconds` that are measured. `busy` estimates the fraction of the time that the target's device
computes, from the mean rows of a step. `in time` is the fraction of drafted steps at whose end the draft's next
candidates had arrived. Stages are parts of the processor time of a loop's thread (`bench.systems.stages`).
"""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import grpc

from bench import markdown
from bench.arguments import limit, names, numbers, parser_of, whole_numbers
from bench.conditions import machine, versions
from bench.report import Report, folder, publish
from bench.systems.altered import copied
from bench.systems.processor_time import processor_seconds
from bench.systems.profiles import PROFILES, Profile
from bench.systems.stages import Seconds, between
from specdec.local import DEMO, Stack
from specdec.local.stack import PROGRAMS
from specdec.v2 import generation_pb2 as pb
from specdec.v2 import model_pb2, verifier_pb2, verifier_pb2_grpc

PROMPT_TOKENS, TOKENS = 96, 800
TOP_P = 0.95
CONNECTIONS = 8
CONTEXT = 1024
KV_TOKENS = 1 << 18
GENERATE = "/specdec.v2.GenerationService/Generate"

WAYS = ("off", "forced", "auto")

COLUMNS = (
    "streams",
    "T",
    "way",
    "tokens/s",
    "over off",
    "step, ms",
    "busy",
    "rows",
    "tokens a step",
    "in time",
    "gap, ms",
    "p99",
    "first, ms",
    "verifier, ms/1,000",
    "draft",
    "orchestrator",
)


@dataclass
class Load:
    """Streams that each request one text after another, and their output since the last `reset`."""

    streams: int
    way: str
    temperature: float
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)

    def reset(self) -> None:
        self.tokens, self.gaps, self.firsts = 0, [], []

    async def run(self, address: str) -> None:
        own = (("grpc.use_local_subchannel_pool", 1),)
        channels = [grpc.aio.insecure_channel(address, own) for _ in range(min(self.streams, CONNECTIONS))]
        try:
            async with asyncio.TaskGroup() as group:
                for stream in range(self.streams):
                    group.create_task(self._stream(channels[stream % len(channels)], stream))
        finally:
            for channel in channels:
                await channel.close()

    async def _stream(self, channel: grpc.aio.Channel, stream: int) -> None:
        dice, text = random.Random(stream), 0
        generate: Any = channel.unary_stream(GENERATE)
        while True:
            text += 1
            call = generate(self._request(dice, stream, text).SerializeToString())
            last, is_first = time.perf_counter(), True
            async for message in call:
                count = len(pb.GenerateResponse.FromString(message).tokens)
                if not count:
                    continue
                now = time.perf_counter()
                self.tokens += count
                (self.firsts if is_first else self.gaps).append(now - last)
                last, is_first = now, False

    def _request(self, dice: random.Random, stream: int, text: int) -> pb.GenerateRequest:
        prompt = [dice.randrange(300, 4000) for _ in range(PROMPT_TOKENS)]
        request = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=prompt), max_tokens=TOKENS)
        request.sampling.temperature = self.temperature
        if self.temperature:
            request.sampling.top_p = TOP_P
            request.sampling.seed = 1000 * stream + text
        if self.way == "off":
            request.speculation.off = True
        elif self.way == "forced":
            request.speculation.drafters.append(model_pb2.DRAFTER_REMOTE)
            request.speculation.forced = True
        return request


async def measured(
    stack: Stack, stages: Path, profile: Profile, load: Load, settle: float, seconds: float
) -> dict[str, Any]:
    """Return the figures of one cell; pods keep their stage times in files of the folder `stages`."""
    task = asyncio.create_task(load.run(stack.address))
    try:
        await _sleep(settle, task)
        before, used, stage_seconds = await _stats(stack), _used(stack), _stages(stages)
        load.reset()
        begin = time.perf_counter()
        await _sleep(seconds, task)
        took, tokens = time.perf_counter() - begin, load.tokens
        gaps, firsts = sorted(load.gaps), load.firsts
        after, now_used, now_stages = await _stats(stack), _used(stack), _stages(stages)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    steps = max(1, after.steps - before.steps)
    rows = (after.rows - before.rows) / steps
    committed = after.committed_tokens - before.committed_tokens
    drafted = after.drafted_steps - before.drafted_steps
    return {
        "streams": load.streams,
        "temperature": load.temperature,
        "way": load.way,
        "tokens_a_second": round(tokens / took, 1),
        "step_ms": round(1e3 * took / steps, 3),
        "busy": round(steps * profile.target.seconds(round(rows)) / took, 3),
        "rows": round(rows, 1),
        "tokens_a_step": round(committed / steps / load.streams, 2),
        "in_time": round((after.draft_ready_steps - before.draft_ready_steps) / drafted, 2) if drafted else None,
        "gap_ms": round(1e3 * median(gaps), 1) if gaps else None,
        "gap_p99_ms": round(1e3 * gaps[int(0.99 * (len(gaps) - 1))], 1) if gaps else None,
        "first_ms": round(1e3 * median(firsts), 1) if firsts else None,
        "cpu_ms_per_1000_tokens": {
            role: round(1e6 * (now_used[role] - used[role]) / max(1, tokens), 1) for role in used
        },
        "stages_us": {role: between(stage_seconds.get(role, {}), now_stages[role], steps) for role in now_stages},
    }


async def all_measured(
    stack: Stack, stages: Path, profile: Profile, loads: Sequence[Load], settle: float, seconds: float
) -> list[dict[str, Any]]:
    """Return the figures of a cell for each load, and print each as it comes."""
    cells = []
    for load in loads:
        cells.append(await measured(stack, stages, profile, load, settle, seconds))
        print(json.dumps(cells[-1]), flush=True)
    return cells


async def _sleep(seconds: float, task: asyncio.Task[None]) -> None:
    """Sleep; an error of the load ends the sleep and is raised."""
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if done:
        task.result()


async def _stats(stack: Stack) -> verifier_pb2.GetStatsResponse:
    async with grpc.aio.insecure_channel(stack.addresses["verifier"]) as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        stats: verifier_pb2.GetStatsResponse = await stub.GetStats(verifier_pb2.GetStatsRequest())
        return stats


def _stages(folder: Path) -> dict[str, Seconds]:
    """Return the stage times of each role so far."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def _used(stack: Stack) -> dict[str, float]:
    """Return the processor seconds that each role has used."""
    return {role: processor_seconds({child.process.pid}) for role, child in stack.children.items()}


def table(report: Report) -> str:
    cells = report["cells"]
    plain = {(each["streams"], each["temperature"]): each for each in cells if each["way"] == "off"}
    lines = [f"{report['profile']}: {report['about']}. Times: {report['source']}.", ""]
    lines.append(markdown.head(COLUMNS))
    for each in cells:
        base = plain.get((each["streams"], each["temperature"]))
        used = each["cpu_ms_per_1000_tokens"]
        row = [
            each["streams"],
            f"{each['temperature']:g}",
            each["way"],
            f"{each['tokens_a_second']:.0f}",
            f"{each['tokens_a_second'] / base['tokens_a_second']:.2f}" if base and base["tokens_a_second"] else "",
            f"{each['step_ms']:.2f}",
            f"{100 * each['busy']:.0f} %",
            f"{each['rows']:.1f}",
            f"{each['tokens_a_step']:.2f}",
            "" if each["in_time"] is None else f"{100 * each['in_time']:.0f} %",
            each["gap_ms"],
            each["gap_p99_ms"],
            "" if each["first_ms"] is None else each["first_ms"],
            *(f"{used.get(role, 0.0):.0f}" for role in ("verifier", "draft", "orchestrator")),
        ]
        lines.append(markdown.row(row))
    for role in ("verifier", "draft"):
        lines += _stage_lines(role, [each for each in cells if any(each["stages_us"].get(role, {}).values())])
    return "\n".join(lines) + "\n"


def _stage_lines(role: str, cells: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the stages of a role's worker thread, in microseconds of processor time per target step."""
    if not cells:
        return []
    heads = [f"{each['streams']}, T = {each['temperature']:g}, {each['way']}" for each in cells]
    lines = ["", f"**The {role}'s worker thread, us of processor a step of the target**", ""]
    stages = dict.fromkeys(stage for each in cells for stage in each["stages_us"][role])
    rows = [[stage, *(f"{each['stages_us'][role].get(stage, 0):.0f}" for each in cells)] for stage in stages]
    totals = ["all", *(f"{sum(each['stages_us'][role].values()):.0f}" for each in cells)]
    return [*lines, *markdown.table(["stage", *heads], [*rows, totals])]


def main(given: Sequence[str]) -> None:
    parser = parser_of("device", __doc__)
    parser.add_argument("--profile", choices=list(PROFILES), default="8b-h100")
    parser.add_argument("--streams", type=whole_numbers, default=[1, 8, 32, 64])
    parser.add_argument("--ways", type=names, default=["off", "forced"], help=f"from {','.join(WAYS)}")
    parser.add_argument("--temperatures", type=numbers, default=[0.0, 0.8])
    parser.add_argument("--settle", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--out", type=folder, help="folder for the report")
    args = parser.parse_args(given)
    limit(parser, args, 1, "streams")
    limit(parser, args, 0, "temperatures", "settle")
    limit(parser, args, 0.1, "seconds")
    if unknown := set(args.ways) - set(WAYS):
        parser.error(f"--ways: {', '.join(sorted(unknown))} is none of {', '.join(WAYS)}")
    profile = PROFILES[args.profile]
    report: Report = {
        "profile": args.profile,
        "about": profile.about,
        "source": profile.source,
        "machine": machine(),
        "versions": versions(),
    }
    pods: dict[str, tuple[str, ...]] = {role: ("bench.systems.pod", role) for role in ("verifier", "draft")}
    with tempfile.TemporaryDirectory() as scratch:
        # Ids beyond the tokenizer's mean nothing, and the weights are never read.
        changes = {"vocab_size": profile.vocabulary, "max_position_embeddings": CONTEXT}
        model = copied(DEMO / "target", Path(scratch, "target"), **changes)
        (stages := Path(scratch, "stages")).mkdir()
        simulated = ("--profile", args.profile, "--kv-tokens", str(KV_TOKENS), "--stages", str(stages))
        with Stack.start(
            model,
            str(model),
            programs={**PROGRAMS, **pods},
            verifier_options=simulated,
            draft_options=simulated,
        ) as stack:
            cells = product(args.temperatures, args.streams, args.ways)
            loads = [Load(streams, way, temperature) for temperature, streams, way in cells]
            report["cells"] = asyncio.run(all_measured(stack, stages, profile, loads, args.settle, args.seconds))
    publish(report, args.out, "device", table)
