"""Measure bytes on the wire per committed token, by rule and direction, and how often drafts were ready.

    python -m bench wire

The services run the demo pair, one stream at a time, speculation always on (or, with `--speculation draft`, where it
pays), through a proxy that counts all bytes, HTTP/2 framing included. With `--step-ms` the target's steps last as long
as a larger model's (`bench.systems.long_steps`). A draft is ready if, at the end of a step, the verifier already has
candidates below the step's outcome: the next step then starts immediately, whatever the network's latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import grpc

from bench import markdown
from bench.arguments import limit, parser_of
from demo.prompts import held_out
from specdec.client import Client
from specdec.engine.placement import Dtype
from specdec.local import DEMO, PROGRAMS, Stack
from specdec.v2 import verifier_pb2, verifier_pb2_grpc
from testing.delay_process import DelayProcess

COLUMNS = (
    "rule",
    "T",
    "to the verifier",
    "from it",
    "to the draft",
    "from it",
    "all",
    "tokens a step",
    "draft ready",
)

Rule = Literal["coupled", "rejection", "contrastive"]
SETTINGS: list[tuple[Rule, float]] = [
    ("coupled", 0.0),
    ("coupled", 0.7),
    ("coupled", 1.0),
    ("rejection", 0.7),
    ("rejection", 1.0),
    ("contrastive", 0.0),
]


@dataclass(frozen=True)
class Count:
    """Counters so far: bytes, and steps and tokens of all sessions."""

    to_verifier: int
    from_verifier: int
    to_draft: int
    from_draft: int
    tokens: int
    steps: int
    drafted_steps: int
    draft_ready_steps: int

    def since(self, before: Count) -> Count:
        return Count(*(now - then for now, then in zip(vars(self).values(), vars(before).values(), strict=True)))


class Counted:
    """A running stack, and the counters of its traffic and steps."""

    def __init__(self, stack: Stack, proxy: DelayProcess, load: verifier_pb2_grpc.VerifierServiceStub) -> None:
        self.stack = stack
        self._proxy = proxy
        self._load = load

    @classmethod
    @contextmanager
    def start(cls, dtype: Dtype, step_ms: float) -> Iterator[Counted]:
        options = ("--kv-tokens=32768",)
        slow = ("bench.systems.pod", "verifier", "--step-ms", str(step_ms))
        programs = {**PROGRAMS, "verifier": slow} if step_ms else PROGRAMS
        with (
            DelayProcess.start() as proxy,
            Stack.start(
                DEMO / "target",
                str(DEMO / "draft"),
                dtype=dtype,
                route=proxy.to,
                verifier_options=options,
                programs=programs,
            ) as stack,
            grpc.insecure_channel(stack.addresses["verifier"]) as channel,
        ):
            yield cls(stack, proxy, verifier_pb2_grpc.VerifierServiceStub(channel))

    def count(self) -> Count:
        verifier = self._proxy.traffic(self.stack.addresses["verifier"])
        draft = self._proxy.traffic(self.stack.addresses["draft"])
        load = self._load.GetStats(verifier_pb2.GetStatsRequest())
        return Count(
            verifier.to_server,
            verifier.from_server,
            draft.to_server,
            draft.from_server,
            load.committed_tokens,
            load.steps,
            load.drafted_steps,
            load.draft_ready_steps,
        )


def main(given: Sequence[str]) -> None:
    parser = parser_of("wire", __doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--step-ms", type=float, default=0.0, help="minimum step of the target, simulated")
    parser.add_argument("--speculation", choices=["always", "draft", "auto"], default="always")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args(given)
    limit(parser, args, 1, "prompts")
    limit(parser, args, 2, "tokens")  # a text's last step is not counted as drafted
    limit(parser, args, 0, "step_ms")
    print(markdown.head(COLUMNS))
    with Counted.start(args.dtype, args.step_ms) as counted, Client(counted.stack.address) as client:
        for rule, temperature in SETTINGS:
            before = counted.count()
            for seed, prompt in enumerate(held_out(args.prompts)):
                client.complete(
                    tokens=prompt,
                    max_tokens=args.tokens,
                    temperature=temperature,
                    rule=rule,
                    seed=seed,
                    ignore_end_token=True,
                    speculation=args.speculation,
                )
            n = counted.count().since(before)
            ways = [n.to_verifier, n.from_verifier, n.to_draft, n.from_draft]
            cells = [f"{way / n.tokens:.0f}" for way in [*ways, sum(ways)]]
            in_time = f"{n.draft_ready_steps / n.drafted_steps:.2f}" if n.drafted_steps else "-"
            cells += [f"{n.tokens / n.steps:.2f}", in_time]
            print(markdown.row([rule.upper(), f"{temperature:g}", *cells]), flush=True)
