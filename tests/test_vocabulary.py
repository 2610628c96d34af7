"""Retired names stay out: each thing has one name, listed in docs/glossary.md."""

from __future__ import annotations

import io
import re
import subprocess
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HISTORY = ("docs/decisions/", "CHANGELOG.md", "tests/test_vocabulary.py")
"""Files about the past, or listing retired names."""

RETIRED = {
    # on the wire and in flags
    "TrunkService": "MuxService",
    "CarryRequest": "ConnectRequest",
    "trunk_pb2": "mux_pb2",
    "GetLoad": "GetStats",
    "SpeculationPolicy": "Speculation",
    "min_reach": "min_path_probability",
    "found_tokens": "cached_tokens",
    "unhurried": "coalesce_commits",
    "held_us": "base_age_us",
    "score_bytes": "logprob_bytes",
    "foreseen_outcomes": "draft_ready_steps",
    "drafted_tokens": "offered_candidates",
    "draft_rests": "draft_paused",
    "draft_works": "draft_resumed",
    "--own-draft": "--draft-model",
    "--threads-drafted": "--threads-while-drafting",
    "--shared-tokens": "--suffix-cache-tokens",
    # log events
    "way_changed": "mode_changed",
    "own_draft_failed": "local_draft_failed",
    "pod_left_alone": "breaker_opened",
    "pod_back": "breaker_closed",
    "trial_process_does_not_start": "trial_process_start_failed",
    # in code
    "AskedRow": "QueriedRow",
    "Attached": "RunningSession",
    "Chooser": "RequestSampler",
    "CommitCheck": "MessageCheck",
    "Cores": "ThreadPolicy",
    "Crowd": "BatchProfile",
    "Dearness": "PrefillSlowdown",
    "Descent": "TreeVerification",
    "DeviceRows": "GpuLogits",
    "DraftLink": "DraftSession",
    "DraftRow": "DraftDistribution",
    "DraftStream": "DraftSession",
    "FailoverEvents": "SampleTimeline",
    "Foresight": "LookaheadRows",
    "GrowthLoop": "DraftLoop",
    "GrowthPolicy": "ExpansionPolicy",
    "Guard": "SpeculationController",
    "Guesser": "SessionNgrams",
    "HostRows": "HostLogits",
    "Outbox": "ResponseQueue",
    "OwnDraft": "DraftModelProposer",
    "OwnForward": "ReferenceCheck",
    "PathPacker": "RaggedPacker",
    "LanePacker": "PaddedPacker",
    "UnitPacker": "SplitKvPacker",
    "Pacing": "DraftControl",
    "Planned": "ScheduledRows",
    "Prospect": "WaitEstimate",
    "Ranking": "Frontier",
    "Residence": "RunQueue",
    "Rhythm": "SendTimer",
    "RowClass": "InvariantRowCounts",
    "SharedTexts": "SuffixCache",
    "StepCost": "StepLatency",
    "Switches": "SampleTimeline",
    "TrunkChannel": "MuxChannel",
    "Verdict": "VerifyResult",
    "VerifierLink": "VerifierStream",
    # in benchmarks
    "SubjectError": "NotServingError",
    "WidenError": "PaddingError",
    "floor_ms": "roofline_ms",
}


def tracked(*patterns: str) -> list[str]:
    found = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in found.stdout.split() if not name.startswith(HISTORY)]


def contains_any(text: str) -> bool:
    """Return whether a retired name occurs in a text, perhaps as a part of another word."""
    return any(word in text for word in RETIRED)


def words(name: str) -> set[str]:
    """Return the names and whole strings in code, or every word of a document."""
    text = (ROOT / name).read_text()
    if not name.endswith(".py"):
        return set(re.findall(r"(?:--)?[A-Za-z_][\w-]*", text))
    found: set[str] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME:
            found.add(token.string)
        elif token.type == tokenize.STRING:
            found.add(token.string.lstrip("rbfRBF").strip("\"'"))
    return found


@pytest.mark.parametrize("pattern", ["*.py", "*.proto", "*.md"])
def test_retired_names_stay_out(pattern: str) -> None:
    files = [name for name in tracked(pattern) if not name.startswith("specdec/v2/")]
    assert files
    suspects = [name for name in files if contains_any((ROOT / name).read_text())]
    wrong = [
        f"{name}: {word} is called {RETIRED[word]}"
        for name in suspects
        for word in sorted(words(name) & RETIRED.keys())
    ]
    assert not wrong, "\n".join(wrong)


def test_a_retired_name_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.test_vocabulary.ROOT", tmp_path)
    (tmp_path / "code.py").write_text('class Guard:\n    flag = "--own-draft"\n')
    (tmp_path / "text.md").write_text("Start it with `--own-draft`, or ask `GetLoad`.\n")
    assert contains_any((tmp_path / "code.py").read_text())
    assert words("code.py") & RETIRED.keys() == {"Guard", "--own-draft"}
    assert words("text.md") & RETIRED.keys() == {"--own-draft", "GetLoad"}
