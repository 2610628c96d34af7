"""Tuning: a verifier's fitted constants, in groups, as one immutable value.

They were fitted on two CPU cores with models of 12M to 230M parameters, with steps of 1.5 to 60 ms, and not on GPUs.
Under COUPLED none changes a token; all change speed or latency. For other devices, pass another `Tuning` to `StepLoop`
and the same to `DraftModelProposer`; heads take its `draft_model`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.decoding.lookahead import Lookahead


@dataclass(frozen=True)
class ControllerTuning:
    """Adaptive speculation: duration of measurements and frequency of probes. Seconds are seconds of steps: if idle
    time counted, probes would take a larger share of the work."""

    window_seconds: float = 0.5
    """Minimum seconds in one measurement, of at least `min_steps` steps."""

    min_steps: int = 10
    """Fewer steps are inconclusive, however long they are."""

    early_stop_seconds: float = 0.1
    hopeless_ratio: float = 0.8
    """After `early_stop_seconds` and `min_steps` steps with candidates, the first mode or a probed one is abandoned if
    its rate is below `hopeless_ratio` times the best or plain rate. Steps without candidates do not count: early in a
    text there is nothing to look up, and drafts have to read the prompt."""

    warmup_seconds: float = 0.1
    """Unmeasured seconds after a change of mode: drafts must be notified and catch up with the text."""

    min_improvement: float = 1.05
    """A probed mode replaces the best one if its rate is higher by this factor."""

    first_probe_pause: float = 1.0
    longest_probe_pause: float = 30.0
    """Seconds between two probes of a mode: `first_probe_pause`, doubled after every loss up to `longest_probe_pause`.
    A probe takes about 0.6 s, 2 % of the maximum. The maximum bounds how long a mode is avoided after losing while
    other processes used the machine."""

    linger_seconds: float = 1.0
    """Wall-clock seconds that departed sessions still count: others often leave soon after. Waking the drafts for the
    last steps of a few sessions and stopping them again would cost more than it brings."""

    probe_budget: float = 0.05
    """Fraction of all tokens that probes of one mode may cost: a probe that lost much is followed by a longer pause."""


@dataclass(frozen=True)
class LatencyTuning:
    """The latency model T_v(n): a Kalman filter over the logarithms of its points. Errors and drifts are standard
    deviations of logarithms: 0.1 is about a tenth.

    The speed of a machine as a whole changes by the second; the relative cost of another row changes slowly. If only
    the points next to a step moved, a slow spell would leave behind too steep a slope, and candidates would not be
    verified although they pay.
    """

    start_error: float = 1.0
    """Error of a point measured at start-up, when other processes may have used the machine: the first steps over the
    point's number of rows outweigh it."""

    step_error: float = 0.25
    slower_step_error: float = 0.5
    """Error of a step's time; `slower_step_error` is for a slower step than expected, which may have been delayed."""

    most_slower: float = 1.0
    """Cap on log(measured / expected time) of a slower step."""

    speed_drift: float = 2.0
    """Change of all points together in a second of steps."""

    shape_drift: float = 0.05
    """Independent change of each point in a second of steps. It makes an unvisited point uncertain after a few
    seconds."""

    certain_error: float = 0.12
    """A point is not explored if the standard error of log(time of the point / time of the current step) is at most
    this. Five steps bring the error down to it."""

    optimism: float = 5.0
    """Standard errors by which an uncertain point is assumed to be cheaper than estimated. The value is high because a
    few delayed steps in a row make a point look expensive."""

    exploration_share: float = 0.01
    """Fraction of the time of all steps available for exploring."""

    first_exploration_seconds: float = 0.1
    """Exploration budget at start-up, and the cap on saved budget, in seconds."""


@dataclass(frozen=True)
class ThreadTuning:
    """The CPU threads of an engine beside drafts and other processes."""

    min_improvement: float = 0.9
    """Another number of threads is chosen if its step latency is below this fraction of the current one."""

    window_seconds: float = 0.5
    min_steps: int = 5
    """One comparison takes at least `window_seconds` of steps, and `min_steps` steps: a draft that reads committed
    tokens sometimes lengthens a single step, but hardly the sum."""

    first_probe_pause: float = 1.0
    longest_probe_pause: float = 60.0
    """Seconds of steps until all threads are tried again: `first_probe_pause`, doubled with each attempt up to
    `longest_probe_pause`."""

    linger_seconds: float = 0.05
    """Wall-clock seconds that drafts keep their core after their candidates are last used: the notice to stop has to
    reach them, and they may be in the middle of a long step over unread text. When the core was taken immediately, a
    step took thirty times as long as usual."""

    settled_seconds: float = 1.0
    """Seconds of steps with all threads, without a loss, after which the pause is reset to `first_probe_pause`."""


@dataclass(frozen=True)
class PrefillTuning:
    """How far prompts may lengthen a step with decoding sessions."""

    max_decode_slowdown: float = 0.7
    """Fraction by which prompts may lengthen a step; a step of `slice_seconds` in total is always allowed. If more
    sessions are in prefill than decoding, both limits rise in proportion."""

    slice_seconds: float = 0.025
    """Seconds always allowed for a step with prompts: hardly noticeable for a reader, while smaller chunks make prompts
    slower."""

    slowdown_smoothing: float = 0.5
    """Weight of the latest step with prompts in the moving average of `PrefillSlowdown`."""

    worth_a_wait: float = 1.1
    """Texts that yield sit out a step with urgent prompts if they would lengthen it by more than this factor."""

    most_waiting_steps: int = 2
    """Limit on consecutive steps in which texts of a tenant with many sessions wait for prompts of a tenant with few.
    With 1, the second of two simultaneous prompts takes three steps instead of two."""

    min_chunk_tokens: int = 8
    """Minimum progress of all prompts together in a step, in tokens."""


@dataclass(frozen=True)
class CommitTuning:
    """Send times of commits that are not awaited; awaited ones are sent immediately."""

    messages_a_second: float = 400.0
    """Approximate commits a second over all sessions if the engine computes on CPU cores. Each takes 0.1 ms of the GIL,
    which event loop and steps share, and 1.5 ms (at servicer, orchestrator and client) of the cores that compute
    steps."""

    device_messages_a_second: float = 2000.0
    """The same if the engine computes on a device: the commits then take a fifth of the GIL's time, and none of the
    device's."""

    coalesce_seconds: float = 0.025
    """Minimum seconds between two such commits of a session; hardly noticeable for a reader. With 0.01 s, one stream of
    a model with 1.5 ms steps had an eighth fewer tokens."""

    relaxed_coalesce_seconds: float = 0.25
    """The same for a request with `coalesce_commits`: there is no live reader."""


@dataclass(frozen=True)
class DraftTimingTuning:
    """Timing of a session's draft, for the step delay: initial values, and weights of the latest measurement."""

    first_acceptance: float = 0.7
    acceptance_smoothing: float = 0.05
    """`first_acceptance`: initial P(a draft's next token is accepted). `acceptance_smoothing`: weight of the latest
    outcome."""

    first_delay: float = 0.003
    """Seconds from a commit to the first message of candidates based on it."""

    first_gap: float = 0.001
    """Seconds from one message of candidates to the next."""

    smoothing: float = 0.2
    """Weight of the latest delay, gap or round trip."""

    remembered_commits: int = 16
    """Maximum commits with a remembered time: messages based on older ones are too late to be informative."""


@dataclass(frozen=True)
class DraftGainTuning:
    """The gain of a remote draft for a text, in tokens a step."""

    least_gain: float = 0.05
    """A draft with a lower gain rests: no mode would replace another for so small a gain."""

    first_gain: float = 0.25
    trial_gain: float = 0.1
    first_weight: int = 4
    """`first_gain`: initial gain for a text of an unknown tenant. `trial_gain`: minimum initial gain of a text, and
    initial gain of a draft tried again. `first_weight`: weight of an initial gain, in steps. Without any accepted
    candidate, these initial gains last for 16 and 4 steps."""

    remembered_steps: int = 64
    """Maximum number of steps averaged in the gain."""

    first_rest_steps: int = 64
    longest_rest_steps: int = 1024
    """Steps that a draft rests: `first_rest_steps`, doubled each time up to `longest_rest_steps`."""


@dataclass(frozen=True)
class NgramTuning:
    """N-grams of a session: lookups, and the confidence in n-grams of any source."""

    branches: int = 3
    depth: int = 24
    """A lookup has at most `branches` continuations, of at most `depth` tokens each."""

    min_probability: float = 0.02
    break_even_share: float = 0.5
    """Minimum path probability of a proposal in the tree: the larger of `min_probability` and `break_even_share` times
    break-even. A proposal below break-even may still pay if rows get cheaper."""

    fruitless_steps: int = 8
    max_skipped: int = 15
    """Lookups take time from the step. After every `fruitless_steps` consecutive steps without an accepted proposal,
    one more step is skipped between two lookups, up to `max_skipped`."""

    confidence_smoothing: float = 0.1
    least_rate: float = 0.01
    """`confidence_smoothing`: weight of the latest verified proposal in the estimate for its match length.
    `least_rate`: the minimum estimate."""


@dataclass(frozen=True)
class WindowTuning:
    """Lookahead windows of a session, if its request names no size."""

    sizes: tuple[Lookahead, ...] = (
        Lookahead(3, 3, 3),
        Lookahead(5, 4, 5),
        Lookahead(7, 5, 7),
        Lookahead(10, 5, 10),
        Lookahead(15, 5, 15),
    )
    jacobi_sizes: tuple[Lookahead, ...] = (
        Lookahead(3, 2, 1),
        Lookahead(5, 2, 1),
        Lookahead(9, 2, 1),
        Lookahead(17, 2, 1),
    )
    """Sizes to choose from, in general and (`jacobi_sizes`) for Jacobi decoding, in the order in which they are tried:
    larger ones bring more and cost more."""

    trial_share: float = 0.02
    most_budget: float = 8.0
    """`trial_share`: share of a tenant's tokens that trials may cost. `most_budget`: maximum tokens saved for them,
    since no trial may be noticeable in a text. A window whose trial has a higher price is not tried."""

    priced_steps: int = 16
    trial_steps: int = 16
    least_trial_steps: int = 6
    """`priced_steps`: steps in the price of a trial. `trial_steps`, `least_trial_steps`: the trial's maximum and
    minimum number of steps with a full window. A window is charged for its rows and wrong candidates: if it finds
    nothing, its trial ends when they have cost the price. A trial with fewer steps than the minimum shows only that the
    cost estimate was wrong: the next trial, at the right price, decides."""

    first_pause: int = 64
    longest_pause: int = 4096
    """Steps of a text until a size that has not paid is tried again: `first_pause`, doubled each time up to
    `longest_pause`."""

    remembered_steps: int = 48
    remembered_steps_of_tenant: int = 256
    first_weight: int = 12
    """`remembered_steps`, `remembered_steps_of_tenant`: maximum steps averaged in a text's likeness and in a tenant's
    gains. `first_weight`: weight, in steps, of a text's initial likeness, 1. Windows hit in spells: with 20 remembered
    and 4 initial steps, the demo's texts closed their windows between two spells."""

    spread: float = 1.5
    """Standard deviation of a step's gain, in tokens: windows find several tokens together, or none."""

    margin: float = 0.1
    """Tokens a step by which another size must beat the open window's: a new window begins empty."""


@dataclass(frozen=True)
class DraftModelTuning:
    """The local draft model; heads also use `min_probability`, `first_acceptance`, `first_expected_accepted` and
    `smoothing`."""

    max_prefill_rows: int = 256
    """Limit on committed tokens, over all sessions, that the draft reads between two steps, since the next step waits
    for them. Two more per session are allowed: any step may leave two tokens unread."""

    branches: int = 3
    """Maximum candidates per place: the chain's own token, and the next likeliest ones."""

    max_depth: int = 16
    """Maximum tokens in a chain."""

    min_probability: float = 0.02
    """Minimum path probability of an offered candidate."""

    first_acceptance: float = 0.5
    first_expected_accepted: float = 1.0
    smoothing: float = 0.05
    """`first_acceptance`: initial P(the next token of a chain is accepted). `first_expected_accepted`: initial accepted
    tokens per chain. `smoothing`: weight of the latest measurement in both."""


@dataclass(frozen=True)
class Tuning:
    """All of a verifier's tuning."""

    controller: ControllerTuning = field(default_factory=ControllerTuning)
    latency: LatencyTuning = field(default_factory=LatencyTuning)
    threads: ThreadTuning = field(default_factory=ThreadTuning)
    prefill: PrefillTuning = field(default_factory=PrefillTuning)
    commits: CommitTuning = field(default_factory=CommitTuning)
    draft_timing: DraftTimingTuning = field(default_factory=DraftTimingTuning)
    draft_gain: DraftGainTuning = field(default_factory=DraftGainTuning)
    ngrams: NgramTuning = field(default_factory=NgramTuning)
    windows: WindowTuning = field(default_factory=WindowTuning)
    draft_model: DraftModelTuning = field(default_factory=DraftModelTuning)

    break_even_smoothing: float = 0.2
    """Weight of the latest step in the moving average of the break-even probability."""

    lifetime_smoothing: float = 0.1
    """Weight of the last session to end in the moving average of lifetimes, used to estimate waits."""


DEFAULTS = Tuning()
