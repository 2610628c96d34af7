"""Simulate the services on a virtual clock, with arbitrary devices, networks and numbers of sessions.

    python -m bench simulate --preset 70b --sessions 1,16,64 --drafts 1,4 --delays 0,0.3

SIMULATED: devices, network and language are models; the services run their real code (`bench/simulation`). A delay is a
round trip between any two of the three services, in steps of the target; a verify result takes two hops to reach the
draft, and candidates two to come back.

Each row is one deployment after its warm-up. Tokens a second are of all sessions together. Further columns divide this
rate by those of the target alone (plain), of drafts that wait for each verify result (synchronous), of an idealised
schedule of the same deployment (`ideal.py`), of the upper bound (`bound.py`), and of the same deployment without delay.

Synchronous drafting is the best of several variants, picked by short trials: chains and trees of up to 64 nodes. Each
is tried with steps that wait for all sessions, and with steps over the ready ones, so that groups of them alternate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

from bench import markdown
from bench.arguments import limit, numbers, parser_of, whole_numbers
from bench.simulation.bound import bound
from bench.simulation.deployment import simulate
from bench.simulation.devices import PRESETS
from bench.simulation.ideal import ideal
from bench.simulation.language import EASY, HARD, Language
from bench.simulation.scenario import Outcome, Scenario
from specdec.engine.working_memory import MAX_STEP_CANDIDATES

CHAINS = tuple((nodes, 1) for nodes in (1, 2, 4, 8, 16))
TREES = tuple((nodes, 0) for nodes in (4, 8, 16, 32, 64))
"""(nodes, branches) of a synchronous draft's answer."""

TOO_MANY = 16 * MAX_STEP_CANDIDATES
"""Maximum candidates of all sessions together: sixteen times a step's. Longer synchronous answers are not tried."""

TRIAL, FINALISTS = 1 / 4, 3
"""Length of a trial as a fraction of the measured time; number of variants measured after trials."""

SESSION_STEPS = 600
"""Minimum number of measured session-steps, since the number of tokens per session-step varies twofold."""

measured = cache(simulate)


@dataclass(frozen=True)
class Row:
    """A row of the table: a deployment and its baselines."""

    scenario: Scenario
    trip: float  # a round trip, in steps of the target
    outcome: Outcome

    @property
    def plain(self) -> float:
        return self.scenario.sessions / self.scenario.step

    @property
    def ideal(self) -> float:
        s = self.scenario
        return ideal(s.language, s.hardware, s.sessions, s.drafts, s.delay)

    @property
    def bound(self) -> float:
        s = self.scenario
        return bound(s.language, s.hardware, s.sessions, s.drafts)

    @property
    def undelayed(self) -> float:
        return measured(replace(self.scenario, delay=0.0)).rate

    @property
    def synchronous(self) -> float:
        return measured(synchronous(self.scenario)).rate


def synchronous(scenario: Scenario, answers: Sequence[tuple[int, int]] = CHAINS + TREES) -> Scenario:
    """Return the best synchronous variant of the same deployment; `answers` are (nodes, branches), as in CHAINS."""
    lockstep_values = (False, True) if scenario.sessions > 1 else (False,)  # a single session waits for itself anyway
    variants = [
        replace(scenario, synchronous=True, lockstep=lockstep, nodes=nodes, branches=branches)
        for lockstep in lockstep_values
        for nodes, branches in answers
        if scenario.sessions * nodes <= TOO_MANY
    ]
    trial = max(1, round(TRIAL * scenario.measured))
    variants.sort(key=lambda variant: simulate(replace(variant, measured=trial)).rate, reverse=True)
    return max(variants[:FINALISTS], key=lambda variant: measured(variant).rate)


Column = tuple[str, Callable[[Row], str]]

COLUMNS: tuple[Column, ...] = (
    ("sessions", lambda row: f"{row.scenario.sessions}"),
    ("pods", lambda row: f"{row.scenario.drafts}"),
    ("delay", lambda row: f"{row.trip:g}"),
    ("tokens/s", lambda row: f"{row.outcome.rate:.0f}"),
    ("over plain", lambda row: f"{row.outcome.rate / row.plain:.2f}"),
    ("over synchronous", lambda row: f"{row.outcome.rate / row.synchronous:.2f}"),
    ("of ideal", lambda row: f"{row.outcome.rate / row.ideal:.2f}"),
    ("of bound", lambda row: f"{row.outcome.rate / row.bound:.2f}"),
    ("of no delay", lambda row: f"{row.outcome.rate / row.undelayed:.2f}"),
    ("tokens a step", lambda row: f"{row.outcome.tokens_a_step:.2f}"),
    ("candidates a step", lambda row: f"{row.outcome.candidates_a_step:.1f}"),
    ("target busy", lambda row: f"{row.outcome.busy:.2f}"),
    ("bytes a token", lambda row: f"{row.outcome.bytes_a_token:.0f}"),
)


def rows(base: Scenario, sessions: list[int], drafts: list[int], delays: list[float]) -> Iterator[Row]:
    for count, pods, trip in product(sessions, drafts, delays):
        if pods > count:
            continue  # a session uses one draft
        steps = max(base.measured, SESSION_STEPS // count)
        scenario = replace(base, sessions=count, drafts=pods, measured=steps)
        scenario = replace(scenario, delay=trip * scenario.step / 2)
        yield Row(scenario, trip, measured(scenario))


def main(given: Sequence[str]) -> None:
    parser = parser_of("simulate", __doc__)
    parser.add_argument("--preset", choices=list(PRESETS), default="70b")
    parser.add_argument("--sessions", type=whole_numbers, default=[1, 8, 64])
    parser.add_argument(
        "--drafts", type=whole_numbers, default=[1, 4], help="draft pods; numbers above that of --sessions are skipped"
    )
    parser.add_argument("--delays", type=numbers, default=[0.0, 0.3])
    parser.add_argument(
        "--acceptance", type=float, default=0.75, help="probability that the draft's best token is right"
    )
    parser.add_argument(
        "--always", action="store_true", help="speculate even if the controller finds that it does not pay"
    )
    parser.add_argument("--steps", type=int, default=60, help="approximate minimum number of measured target steps")
    parser.add_argument("--warm-up", type=int, default=30, help="steps before the measurement, including prompts")
    parser.add_argument("--quick", action="store_true", help="few short runs, to show that it works")
    args = parser.parse_args(given)
    limit(parser, args, HARD, "acceptance", most=EASY)
    if args.quick:
        args.sessions, args.drafts, args.delays = [8], [1], [0.0, 0.3]
    scenario = Scenario(
        PRESETS[args.preset],
        Language(args.acceptance),
        always=args.always,
        warm_up=args.warm_up,
        measured=args.steps,
    )
    print(f"SIMULATED: {args.preset}, the draft's best token is right {args.acceptance:.0%} of the time\n")
    print(markdown.head(name for name, _ in COLUMNS))
    for row in rows(scenario, args.sessions, args.drafts, args.delays):
        print(markdown.row(show(row) for _, show in COLUMNS), flush=True)
