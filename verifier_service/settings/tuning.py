"""Tuning: the numbers of a verifier that were fitted rather than derived, one frozen value in groups.

They were fitted on two CPU cores with models of 12M to 230M parameters, whose steps take 1.5 to 60 ms, and have not
been fitted on GPUs. None changes a token; all change speed or latency. Whoever measures on other devices gives
`StepLoop` another `Tuning`, and `DraftModelProposer` the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.decoding.lookahead import Lookahead


@dataclass(frozen=True)
class ControllerTuning:
    """Adaptive speculation: how long modes are measured and how often they are probed. Seconds are seconds of steps:
    idle time would make probes a larger part of the work."""

    window_seconds: float = 0.5
    """Seconds in one measurement, which has `min_steps` at least."""

    min_steps: int = 10
    """Fewer steps say nothing, however long they are."""

    early_stop_seconds: float = 0.1
    hopeless_ratio: float = 0.8
    """A new mode is given up after `early_stop_seconds` of steps with candidates if it brings less than this part of
    the best rate. Steps without candidates do not count: at the beginning of a text there is nothing to look up, and
    drafts have to read the prompt."""

    warmup_seconds: float = 0.1
    """Seconds after a change of mode that are not measured: drafts have to hear of it, and catch up with the text."""

    min_improvement: float = 1.05
    """A probed mode replaces the best one if its rate is higher by this factor."""

    first_probe_pause: float = 1.0
    longest_probe_pause: float = 30.0
    """Seconds between two probes of a mode, at first and at most; doubled each time that it loses. A probe takes about
    0.6 s, so that they cost 2 %; a mode that lost while others used the machine is not left for longer."""

    linger_seconds: float = 1.0
    """Sessions that have left count for so many seconds of the clock: often others follow. To wake the drafts for the
    last steps of a few sessions, and to stop them again, would cost more than it brings."""

    probe_budget: float = 0.05
    """Share of all tokens that probes of one mode may cost: a probe that lost much is followed by a longer pause."""


@dataclass(frozen=True)
class LatencyTuning:
    """The latency model T_v(n): a Kalman filter over the logarithms of its points. Errors and drifts are standard
    deviations of logarithms: 0.1 is about a tenth.

    Machines get slower and faster as a whole, by the second; what a row more costs in proportion changes slowly. If
    only the points next to a step moved, a slow spell would leave behind a slope that is too steep, and candidates
    would not be verified though they would pay."""

    start_error: float = 1.0
    """Error of each point that was measured at start, when others may have used the machine: the first steps over a
    number of rows outweigh it."""

    step_error: float = 0.25
    slower_step_error: float = 0.5
    """Error of the time of a step, and of one that took longer than expected: it may have been delayed."""

    most_slower: float = 1.0
    """The most by which such a step counts as slower."""

    speed_drift: float = 2.0
    """Change of all points together in a second of steps."""

    shape_drift: float = 0.05
    """Change of each point by itself in a second of steps. With it a point that no step visits is uncertain after a few
    seconds."""

    certain_error: float = 0.12
    """Error of a point, relative to the step as it would be, up to which it is not explored: that of five steps."""

    optimism: float = 5.0
    """Errors by which a point is assumed to be cheaper than estimated where it is not certain. So many, since a few
    delayed steps in a row look like one that is dear."""

    exploration_share: float = 0.01
    """Share of the time of all steps that may be spent on exploring."""

    first_exploration_seconds: float = 0.1
    """Seconds that may be spent on exploring at once, after start above all."""


@dataclass(frozen=True)
class ThreadTuning:
    """The CPU threads of an engine beside drafts and other processes."""

    min_improvement: float = 0.9
    """Fraction of the present step latency that another number of threads must stay below to be taken."""

    window_seconds: float = 0.5
    min_steps: int = 5
    """Seconds of steps, and number of steps, that one comparison sums up at least. A draft that only reads committed
    tokens now and then makes a single step long, but not the sum."""

    first_probe_pause: float = 1.0
    longest_probe_pause: float = 60.0
    """Seconds of steps until all threads are tried again, at first and at most; doubled with each attempt."""

    linger_seconds: float = 0.05
    """Seconds of the clock for which drafts keep their core when their candidates are no longer used: the message has
    to reach them, and they may be in the middle of a step over all that they had not read. Taking the core at once cost
    a step of thirty times the usual length."""

    settled_seconds: float = 1.0
    """Seconds of steps with all threads, without a loss, after which the pause is `first_probe_pause` again."""


@dataclass(frozen=True)
class PrefillTuning:
    """How far prompts may lengthen a step of sessions that decode."""

    max_decode_slowdown: float = 0.7
    """Fraction of its length by which prompts may lengthen a step; it may take `slice_seconds` in any case. If more
    sessions prefill than decode, both limits rise in proportion."""

    slice_seconds: float = 0.025
    """Seconds that a step with prompts may always take: hardly any reader notices, and small chunks make prompts
    slower."""

    slowdown_smoothing: float = 0.5
    """Weight of the latest step with prompts in the moving average of `PrefillSlowdown`."""

    worth_a_wait: float = 1.1
    """How many times as long a step with urgent prompts must be with the texts of other tenants as without them, for
    those to sit it out."""

    most_waiting_steps: int = 2
    """Steps in a row in which texts of a tenant that has much may wait for prompts of one that has less. With one, the
    second of two prompts that come at once takes three steps instead of two."""

    min_chunk_tokens: int = 8
    """Least number of tokens by which all prompts together advance in a step."""


@dataclass(frozen=True)
class CommitTuning:
    """When commits are sent that nobody waits for; those that somebody waits for are sent at once."""

    messages_a_second: float = 400.0
    """Commits a second, about, over all sessions. Each takes 0.1 ms of the interpreter, which the event loop shares
    with the steps, and 1.5 ms of the CPU cores that compute them, at servicer, orchestrator and client."""

    coalesce_seconds: float = 0.025
    """Least seconds between two of them of one session; hardly any reader notices. With 0.01 s, one stream of a model
    whose step takes 1.5 ms had an eighth fewer tokens."""

    relaxed_coalesce_seconds: float = 0.25
    """The same for a session whose request has `coalesce_commits`: nobody reads along."""


@dataclass(frozen=True)
class DraftTimingTuning:
    """Measurements of a session's draft, for the step delay: first guesses, and weights of the latest measurement."""

    first_acceptance: float = 0.7
    acceptance_smoothing: float = 0.05
    first_delay: float = 0.003
    """Seconds from a commit to the first message of candidates that know of it."""

    first_gap: float = 0.001
    """Seconds from one message of candidates to the next."""

    smoothing: float = 0.2
    remembered_commits: int = 16
    """Commits of which the time is kept: messages that start further back are too late to say anything."""


@dataclass(frozen=True)
class DraftGainTuning:
    """What a remote draft brings to a text, in tokens a step."""

    least_gain: float = 0.05
    """A draft that brings less is left alone by its text: no mode that brings so little replaces another."""

    first_gain: float = 0.25
    trial_gain: float = 0.1
    first_weight: int = 4
    """Gain of a text whose tenant is not known, and the least that a text, and one that tries its draft again, begins
    with; and the steps that either counts for. Without an accepted candidate they last for 16 and 4 steps."""

    remembered_steps: int = 64
    """Most steps that the gain is the mean of."""

    first_rest_steps: int = 64
    longest_rest_steps: int = 1024
    """Steps for which a text leaves its draft alone, at first and at most; doubled each time."""


@dataclass(frozen=True)
class NgramTuning:
    """N-gram lookup and lookahead windows of a session."""

    branches: int = 3
    depth: int = 24
    """Most continuations of a lookup, and most tokens in each."""

    min_probability: float = 0.02
    price_share: float = 0.5
    """Least path probability of a proposal that enters the tree, and its least fraction of the break-even probability:
    it may still pay if rows get cheaper."""

    fruitless_steps: int = 8
    max_skipped: int = 15
    """Lookups take time of the step. After every `fruitless_steps` steps in a row in which no proposal was accepted,
    one step more is skipped between two lookups, up to `max_skipped`."""

    confidence_smoothing: float = 0.1
    least_rate: float = 0.01
    """Weight of the latest verified proposal in the estimate for its length of agreement, and the least estimate."""

    windows: tuple[Lookahead, ...] = (
        Lookahead(15, 5, 15),
        Lookahead(10, 5, 10),
        Lookahead(7, 5, 7),
        Lookahead(5, 4, 5),
        Lookahead(4, 3, 4),
    )
    """Sizes of windows to choose from if a request asks for none, in order of preference: larger ones bring more and
    cost more."""

    first_gain: float = 0.5
    gain_smoothing: float = 0.05
    """Tokens a step that a new window is assumed to bring until it is measured, and the weight of the latest step."""

    first_window_pause: int = 64
    longest_window_pause: int = 4096
    """Steps until a window that did not pay is tried again, at first and at most; doubled each time."""


@dataclass(frozen=True)
class DraftModelTuning:
    """The local draft model."""

    max_prefill_rows: int = 256
    """Most committed tokens that are read between two steps, over all sessions, besides two for each session, which any
    step may leave: the next step waits for them."""

    branches: int = 3
    """Most candidates for a place: the one with which the chain goes on, and the next likeliest ones."""

    max_depth: int = 16
    """Most tokens in a chain."""

    min_probability: float = 0.02
    """Least path probability of a candidate that is offered."""

    first_acceptance: float = 0.5
    first_expected_accepted: float = 1.0
    smoothing: float = 0.05
    """P(the next token of a chain is accepted) and the tokens of a chain that are, until they are measured, and the
    weight of the latest measurement."""


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
    draft_model: DraftModelTuning = field(default_factory=DraftModelTuning)

    price_smoothing: float = 0.2
    """Weight of the latest step in the moving average of the break-even probability."""

    lifetime_smoothing: float = 0.1
    """Weight of the session that has ended last in the moving average of lifetimes, from which waits are estimated."""


DEFAULTS = Tuning()
"""The tuning that holds where none is given."""
