"""Measure the cost of a draft: tokens a second, tokens a device-second with the draft's device counted, and capacity.

    python -m bench cost --out build/cost
    python -m bench cost --preset demo --acceptance 0.6 --latency-ms 2,4 --draft-price 0.25

SIMULATED throughout, devices included: the services run their real code (`bench/simulation`), with models of forward
passes (`devices.PRESETS`), the language, and the sharing of a device. Networks, processors, and the memory of a
co-located draft are left out.

Deployments of one target:

- plain: the target's device alone.
- draft apart: the draft keeps drafting while the target verifies, on its own devices, one per pod. Each device is paid
  for.
- co-located: the same on the target's device, which the two use in turns of half a millisecond.
- co-located, lockstep: the draft proposes for all streams, then the target verifies for all, as in engines with a local
  draft; the best of several sizes of tree.

Drafts propose whether or not it pays: the speculation controller, which falls back to plain decoding, is off. A
stream's time per token is the mean, streams / tokens a second, since several tokens come together. Capacity is the
maximum number of streams within a target latency. Writes cost.json and cost.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import track

from bench.arguments import limit, numbers, parser_of, whole_numbers
from bench.conditions import versions
from bench.report import folder, publish
from bench.simulation.cost_report import table
from bench.simulation.devices import PRESETS
from bench.simulation.language import EASY, HARD, Language
from bench.simulation.scenario import Scenario
from bench.simulation.simulate import measured

LATENCIES = (0.5, 1.1)
"""Default targets for the time per token, in steps of the target with one row: twice as fast as plain decoding, and
about as fast."""

LOCKSTEP_NODES = (2, 4, 8, 16, 32, 64)

WARM_UP = 60
"""Steps of the warm-up, prompts included."""

ALONE = 10
"""Minimum measured session-steps as a multiple of --steps, since the tokens of one step vary by a factor of two."""

RESOLUTION = 16
"""Precision of a capacity: one part in this number."""


@dataclass(frozen=True)
class Deployment:
    """A deployment, represented by the best of its `scenarios`. `drafts`: number of the draft's own devices."""

    name: str
    drafts: int
    scenarios: tuple[Scenario, ...]

    def rate(self, streams: int) -> float:
        """Return tokens a second of all streams."""
        return max(
            measured(replace(s, sessions=streams, measured=max(s.measured, ALONE * s.measured // streams))).rate
            for s in self.scenarios
        )


def deployments(plain: Scenario, drafts: Sequence[int]) -> list[Deployment]:
    shared = replace(plain, drafts=1, always=True, shared=True)
    lockstep = replace(shared, synchronous=True, lockstep=True)
    return [
        Deployment("plain", 0, (plain,)),
        *(Deployment(f"draft apart, pods: {n}", n, (replace(plain, drafts=n, always=True),)) for n in drafts),
        Deployment("co-located", 0, (shared,)),
        Deployment("co-located, lockstep", 0, tuple(replace(lockstep, nodes=nodes) for nodes in LOCKSTEP_NODES)),
    ]


def capacity(rate: Callable[[int], float], seconds: float, most: int) -> int:
    """Return the number of streams, up to `most`, that each get a token within `seconds`; 0 if not even one does.

    Time per token is assumed to grow with streams: their number is doubled until the time is too long, then bisected.
    """
    low, high = 0, 1
    while high <= seconds * rate(high):
        if high == most:
            return most
        low, high = high, min(2 * high, most)
    while high - low > 1 + low // RESOLUTION:
        middle = (low + high) // 2
        low, high = (middle, high) if middle <= seconds * rate(middle) else (low, middle)
    return low


def measure(args: argparse.Namespace) -> dict[str, Any]:
    plain = Scenario(PRESETS[args.preset], Language(args.acceptance), drafts=0, warm_up=WARM_UP, measured=args.steps)
    rows, capacities = [], []
    for deployment in deployments(plain, args.drafts):
        paid = 1.0 + args.draft_price * deployment.drafts
        about = {"deployment": deployment.name, "draft_devices": deployment.drafts, "devices_paid": paid}
        for streams in _tracked(args.streams, f"{deployment.name}: streams"):
            rate = deployment.rate(streams)
            rows.append(
                about
                | {
                    "streams": streams,
                    "tokens_per_second": rate,
                    "tokens_per_device_second": rate / paid,
                    "ms_per_token": 1000 * streams / rate,
                }
            )
        for latency in _tracked(args.latency_ms, f"{deployment.name}: capacity"):
            found = capacity(deployment.rate, latency / 1000, args.most)
            capacities.append(about | {"latency_ms": latency, "streams": found, "per_device": found / paid})
    return {"rows": rows, "capacity": capacities}


def _tracked(items: Sequence[Any], what: str) -> Iterable[Any]:
    bar = Console(stderr=True)
    return track(items, what, console=bar, transient=True, disable=not bar.is_terminal)


def parsed(given: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("cost", __doc__)
    parser.add_argument(
        "--preset", choices=list(PRESETS), default="70b", help="devices of target and draft (default: %(default)s)"
    )
    parser.add_argument(
        "--acceptance",
        type=float,
        default=0.75,
        help="probability that the draft's best token is right (default: %(default)s)",
    )
    parser.add_argument("--streams", type=whole_numbers, default=[1, 4, 16, 64], help="default: 1,4,16,64")
    parser.add_argument(
        "--drafts", type=whole_numbers, default=[1], help="number of the draft's own devices (default: 1)"
    )
    parser.add_argument(
        "--draft-price",
        type=float,
        default=1.0,
        help="price of a draft device relative to the target's (default: %(default)g)",
    )
    parser.add_argument(
        "--latency-ms",
        type=numbers,
        help="target times per token of a stream; default: 0.5 and 1.1 of a step with one row",
    )
    parser.add_argument(
        "--most", type=int, default=256, help="maximum streams in the search for capacity (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=40, help="approximate minimum number of measured target steps")
    parser.add_argument("--quick", action="store_true", help="few short runs: 1 and 8 streams, capacity up to 8")
    parser.add_argument("--out", type=folder, help="folder for the report")
    args = parser.parse_args(given)
    if args.quick:
        args.streams, args.most, args.steps = [1, 8], 8, 20
    if args.latency_ms is None:
        args.latency_ms = [1000 * part * PRESETS[args.preset].target.seconds(1) for part in LATENCIES]
    limit(parser, args, 1, "streams", "drafts", "most", "steps")
    for latency in args.latency_ms:
        if not 0 < latency < float("inf"):
            parser.error(f"--latency-ms is {latency:g}, must be above 0")
    if not 0 <= args.draft_price < float("inf"):
        parser.error(f"--draft-price is {args.draft_price:g}, must be at least 0")
    limit(parser, args, HARD, "acceptance", most=EASY)
    return args


def main(given: Sequence[str]) -> None:
    args = parsed(given)
    try:
        found = measure(args)
    except KeyboardInterrupt:
        sys.exit(130)
    asked = {name: getattr(args, name) for name in ("preset", "acceptance", "draft_price", "most", "steps")}
    hardware = asdict(PRESETS[args.preset])
    report = {"simulated": True} | asked | {"hardware": hardware} | found | {"versions": versions()}
    publish(report, args.out, "cost", table)
