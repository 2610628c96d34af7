"""The plan: systems to start, their configurations, and the cells to measure."""

from __future__ import annotations

import sys
from dataclasses import replace

from bench.speed.comparison import Cell, cells, launches
from bench.speed.config import SpeedConfig, parsed
from bench.systems.specdec import PLAIN


def test_one_stream_for_each_kind_and_many_of_all() -> None:
    config = parsed(["--streams", "1,4", "--kinds", "code,chat", "--temperatures", "0,1"])
    greedy = [Cell("code", 1, 0.0), Cell("chat", 1, 0.0), Cell("mixed", 4, 0.0)]
    assert cells(config) == [*greedy, Cell("code", 1, 1.0), Cell("chat", 1, 1.0), Cell("mixed", 4, 1.0)]


def names(config: SpeedConfig) -> list[str]:
    return [configuration.name for launch in launches(config) for configuration in launch.configurations]


def test_without_a_draft_nothing_is_drafted() -> None:
    alone = parsed(["--draft", "none"])
    assert names(replace(alone, transformers=False)) == [PLAIN, "specdec lookahead"]
    others = names(replace(alone, vllm_python="python"))[2:]
    assert others == [
        "transformers generate",
        "transformers prompt lookup",
        "transformers batching",
        "vLLM",
        "vLLM n-gram",
        "vLLM served by specdec",
    ]


def test_a_draft_brings_configurations_of_every_system() -> None:
    found = names(parsed(["--vllm-python", sys.executable]))
    ours = ["specdec drafted", "specdec drafted + lookahead", "specdec local draft"]
    assert found[:5] == [PLAIN, "specdec lookahead", *ours]
    vllm = {"vLLM drafted", "vLLM served by specdec, drafted", "vLLM remote draft"}
    assert {"transformers assisted", "transformers assisted, 5", *vllm} < set(found)


def test_some_systems_alone_are_measured_beside_plain_decoding() -> None:
    found = names(parsed(["--vllm-python", sys.executable, "--only", "n-gram,bad draft"]))
    assert found == [PLAIN, "vLLM n-gram"]


def test_windows_and_bad_drafts_are_more_configurations_of_specdec() -> None:
    found = launches(parsed(["--windows", "2,2,1", "7,4,7", "--bad-drafts", "--peers", "none"]))
    modes = {configuration.name: configuration.mode for launch in found for configuration in launch.configurations}
    assert modes["specdec lookahead 2,2,1"] == "local 2,2,1"
    assert modes["specdec lookahead 7,4,7"] == "local 7,4,7"
    bad = ["draft of 1 ms a step", "draft of 5 ms a step", "draft of 50 ms a step"]
    bad += ["random draft", "draft of another tokenizer"]
    assert list(modes)[-5:] == [f"specdec {kind}" for kind in bad]
    assert all(modes[f"specdec {kind}"] == "draft" for kind in bad)
    assert len({launch.name for launch in found}) == len(found)
