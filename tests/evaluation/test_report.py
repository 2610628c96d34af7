"""The report of an evaluation, as lines for people and as JSON."""

from __future__ import annotations

from dataclasses import replace

from evaluation.measurements import PLAIN, REMOTE_DRAFT, TREES, Figures
from evaluation.pools import PoolSizing
from evaluation.report import Distance, EvaluationReport
from specdec.decoding.sampling import Rule


def figures(rate: float) -> Figures:
    """Return the figures of ten seconds, with five tokens a step, of which four are accepted candidates of eight."""
    tokens = round(10 * rate)
    steps = tokens // 5
    return Figures(tokens, 10.0, steps, offered=8 * steps, accepted=4 * steps, target_busy=0.5, draft_busy=0.25)


REPORT = EvaluationReport(
    target="target  float32 on cpu",
    draft="draft  float32 on cpu",
    texts=2,
    temperatures=[0.0, 0.8],
    step_seconds={"target": [0.01] * 7, "draft": [0.002] * 7},
    spread=1.1,
    acceptance={(Rule.COUPLED, TREES[0]): figures(10.0), (Rule.REJECTION, TREES[1]): figures(10.0)},
    speed={
        1: {PLAIN: figures(50.0), REMOTE_DRAFT: figures(40.0)},
        2: {PLAIN: figures(80.0), REMOTE_DRAFT: figures(120.0)},
    },
    distance=Distance(0.0003, 0.0002),
    draft_speed=1.0,
    pools={2: PoolSizing(4, 114.0, 120.0)},
    concurrent=8,
)


def test_lines_tell_acceptance_speed_and_pools() -> None:
    lines = list(REPORT.lines())
    cells = [line.split() for line in lines]
    assert "target  target  float32 on cpu" in lines
    assert "texts   2, temperature 0, 0.8" in lines
    assert ["target", *["10.00"] * 7] in cells
    assert ["coupled", "chain", "of", "2", "50%", "5.00"] in cells
    assert ["rejection", "chain", "of", "4", "50%", "5.00"] in cells
    speeds = lines.index("Predicted tokens a second of one verifier, and the ratio to plain decoding")
    assert cells[speeds + 1] == ["streams", "plain", "remote", "draft"]
    assert cells[speeds + 2 : speeds + 4] == [["1", "50", "40", "(0.80)"], ["2", "80", "120", "(1.50)"]]
    assert "takes 0.30 ms, as measured here, and 0.2 ms of network" in lines[speeds + 4]
    assert lines[-4:] == [
        "1 stream a verifier: plain is fastest; a draft service does not help.",
        "2 streams a verifier: a draft pod for 4 verifiers (95% of the speed with one for each). "
        "8 texts at a time take 4 verifiers and 1 draft; in the chart's values:",
        "  verifiers: {main: {replicas: 4}}",
        "  drafts: {main: {replicas: 1}}",
    ]


def test_json_has_the_same_figures() -> None:
    told = REPORT.as_json()
    assert told["acceptance"][0]["acceptance"] == 0.5
    assert [(each["streams"], each["way"], each["tokens_per_second"]) for each in told["predicted"]] == [
        (1, "plain", 50.0),
        (1, "remote draft", 40.0),
        (2, "plain", 80.0),
        (2, "remote draft", 120.0),
    ]
    assert told["pools"] == {
        "2": {"verifiers": 4, "rate": 114.0, "best": 120.0, "verifier_pods": 4, "draft_pods": 1},
    }
    assert (told["pass_time_spread"], told["usable"]) == (1.1, True)


def test_there_is_no_advice_if_pass_times_varied() -> None:
    noisy = replace(REPORT, spread=3.14)
    *_, last = noisy.lines()
    assert last == (
        "pass times varied by a factor of 3.1 during the evaluation: the predictions are not usable; free the cores "
        "or lower --threads"
    )
    assert not [line for line in noisy.lines() if "fastest" in line or "replicas" in line]
    told = noisy.as_json()
    assert (told["usable"], told["pools"]) == (False, {})
