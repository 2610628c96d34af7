"""The engine benchmark: cost model, refusals and reports. Injected candidates change the speed but no token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine.device import COPIED
from bench.engine.engine import EngineBench, parsed
from bench.engine.report import table
from bench.engine.shapes import SHAPES, WORKING, Combination, Sizes, needed_bytes, roofline_seconds, sizes, split, write
from bench.engine.synthetic import candidates, decode
from bench.engine.systems import SteppedSystem
from bench.report import publish
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.engines.loading import load_engine
from specdec.engine.hf.random_weights import RandomWeights
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.placement import Placement
from tests.models import make

TINY = Sizes(held=1000, head=100, read=900, kv_token=10)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> RandomWeights:
    return RandomWeights(write(SHAPES["tiny"], tmp_path_factory.mktemp("shapes") / "tiny"))


class TestRoofline:
    def test_weights_and_every_texts_memory_are_read_once(self) -> None:
        assert roofline_seconds(TINY, Combination(tokens=1, context=50, sessions=2), 1000.0) == pytest.approx(1.9)
        assert roofline_seconds(TINY, Combination(tokens=64, context=50, sessions=2), 1000.0) == pytest.approx(1.9)

    def test_sizes_of_a_shape(self, tiny: RandomWeights, tmp_path: Path) -> None:
        products = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)  # attention, keys and values, MLP
        held = products + 5 * 64 + 2 * 320 * 64  # norms, embedding and head
        assert sizes(tiny.path, 2) == Sizes(2 * held, 2 * 320 * 64, 2 * (held - 320 * 64), kv_token=2 * 2 * 2 * 16 * 2)
        tied = sizes(write(SHAPES["tiny"] | {"tie_word_embeddings": True}, tmp_path), 4)
        assert tied.read == tied.held == 4 * (held - 320 * 64)

    def test_of_no_model(self, tmp_path: Path) -> None:
        write({"model_type": "abacus", "vocab_size": 5}, tmp_path)
        with pytest.raises(ModelDirectoryError, match=r"cannot be built as a model: .*abacus") as told:
            sizes(tmp_path, 2)
        assert "\n" not in str(told.value)

    def test_the_names_say_how_large(self, tmp_path: Path) -> None:
        read = {name: sizes(write(shape, tmp_path / name), 1) for name, shape in SHAPES.items()}
        assert 55e6 < read["60m"].held < 65e6
        assert 1.2e9 < read["llama-3.2-1b"].held < 1.3e9
        assert 8.0e9 < read["llama-3.1-8b"].held < 8.1e9
        assert read["llama-3.1-8b"].kv_token == 2 * 32 * 8 * 128

    def test_what_does_not_fit_is_said(self) -> None:
        small, large = Combination(1, 10, 1), Combination(1, 10_000, 32)
        free = needed_bytes(TINY, small, 2, vocabulary=100)
        assert free == 1000 + 200 + 11 * 10 + 800 + WORKING
        fitting, lines = split(TINY, [small, large], 2, 100, free)
        assert fitting == [small]
        (line,) = lines
        assert line.startswith("32 sessions, 10000 tokens of context, 1 tokens: left out")
        assert split(TINY, [small], 2, 100, free - 1)[0] == []


class TestCandidates:
    @given(st.lists(st.integers(0, 319), max_size=30), st.integers(0, 1000))
    def test_all_right(self, right: list[int], seed: int) -> None:
        assert candidates(right, 1.0, 320, random.Random(seed)) == right

    @given(st.lists(st.integers(0, 4), max_size=30), st.integers(0, 1000))
    def test_all_wrong_and_still_tokens(self, right: list[int], seed: int) -> None:
        found = candidates(right, 0.0, 5, random.Random(seed))
        assert all(a != b and 0 <= b < 5 for a, b in zip(right, found, strict=True))

    def test_about_so_many(self) -> None:
        """A deviation by 200 in 10,000 is five standard deviations of 40: a false alarm has probability 1e-6."""
        found = candidates([0] * 10_000, 0.8, 320, random.Random(1))
        assert abs(found.count(0) - 8000) < 200


class TestRandomWeights:
    def test_services_take_none(self, tiny: RandomWeights) -> None:
        with pytest.raises(ModelDirectoryError, match=r"no tokenizer\.json"):
            ModelDirectory(tiny.path)

    def test_none_are_exported(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """An export of random weights would later be served in place of the real weights beside it."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        directory = RandomWeights(make("llama", tmp_path / "model"))
        with pytest.raises(ModelDirectoryError, match="random weights cannot be exported"):
            load_engine(directory, Placement("onnx", kv_tokens=64), threads=(1,))
        assert not (tmp_path / "cache" / "specdec").exists()

    def test_without_a_configuration(self, tmp_path: Path) -> None:
        with pytest.raises(ModelDirectoryError, match=r"no config\.json"):
            RandomWeights(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        with pytest.raises(ModelDirectoryError, match="vocab_size"):
            RandomWeights(tmp_path)

    @pytest.mark.verify
    def test_injected_candidates_change_no_token(self, tiny: RandomWeights) -> None:
        """Both engines load the same random weights. The more candidates are right, the fewer steps a text takes."""
        prompts = [[3 + i for i in range(40)], [70 + i for i in range(25)]]
        first, again = (CpuEngine(tiny, capacity=2048, threads=(1,)) for _ in range(2))
        plain = decode(first, prompts, 60)
        half = decode(again, prompts, 60, acceptance=0.5, width=4, texts=plain.texts, seed=1)
        all_right = decode(again, prompts, 60, acceptance=1.0, width=4, texts=plain.texts)
        if again.exact:
            assert half.texts == all_right.texts == plain.texts
        assert plain.offered == plain.accepted == 0
        assert [len(text) for text in plain.texts] == [60, 60]
        assert 0 < half.accepted < half.offered
        assert all_right.accepted / all_right.offered > 0.95
        assert all_right.steps < half.steps < plain.steps


class TestReport:
    @pytest.mark.verify
    def test_a_quick_run(self, tiny: RandomWeights, tmp_path: Path) -> None:
        given = ["--quick", "--peers", "eager-dynamic,eager-static", "--threads", "1", "--repeats", "3"]
        args = parsed([*given, "--synthetic-acceptance", "0.9"])
        found = EngineBench(args, tiny).run()
        report = {"asked": vars(args), "machine": {"processor": "some"}} | found
        assert not found["left_out"]
        assert len(found["rows"]) == 3 * 4
        for row in found["rows"]:
            assert 0 < row["host_ms"] <= row["ms"]
            assert row["over_roofline"] == pytest.approx(row["ms"] / row["roofline_ms"])
        assert {row["width"] for row in found["synthetic"]} == {0, 2, 4, 8}
        publish(report, tmp_path, "engine", table)
        assert "SYNTHETIC" in (tmp_path / "engine.md").read_text()

    def test_what_was_measured_before_it_was_cut_off(
        self, tiny: RandomWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If nothing was measured, no report is written."""
        monkeypatch.setitem(COPIED, "cpu", 1 << 20)

        class CutOff(EngineBench):
            def _measure(self, system: SteppedSystem, chosen: list[Combination], bandwidth: float) -> None:
                if len(self.rows) >= rows:
                    raise KeyboardInterrupt
                super()._measure(system, chosen, bandwidth)

        args = parsed(["--quick", "--peers", "eager-dynamic", "--threads", "1", "--repeats", "3"])
        rows = 4
        found = CutOff(args, tiny).run()
        assert [row["system"] for row in found["rows"]] == ["specdec"] * 4
        report = {"asked": vars(args), "machine": {"processor": "some"}} | found
        with pytest.raises(SystemExit):
            publish(report, tmp_path, "engine", table)
        assert (tmp_path / "engine.md").read_text().startswith("CUT OFF: ")
        rows = 0
        with pytest.raises(KeyboardInterrupt):
            CutOff(args, tiny).run()

    def test_what_is_missing_shows(self) -> None:
        row = {"system": "specdec", "tokens": 1, "context": 8, "sessions": 2, "roofline_ms": 2.0, "ms": 5.0}
        other = row | {"system": "eager-static", "tokens": 4}
        rows: list[dict[str, Any]] = [r | {"host_ms": 1.0, "over_roofline": 2.5} for r in (row, other)]
        written = table(
            {
                "name": "tiny",
                "asked": {"device": "cuda", "dtype": "bfloat16", "threads": 1},
                "machine": {"processor": "some", "device": "Accelerator"},
                "sizes": vars(TINY),
                "bandwidth": 1e9,
                "rows": rows,
                "synthetic": [],
                "left_out": ["32 sessions: left out"],
            }
        )
        assert "| 2 | 8 | 1 | 2 | 5 (2.5); 1 | - |" in written
        assert "| 2 | 8 | 4 | 2 | - | 5 (2.5); 1 |" in written
        assert "on Accelerator:" in written
        assert "- 32 sessions: left out" in written
        assert "SYNTHETIC" not in written

    @pytest.mark.parametrize(
        ("given", "reason"),
        [
            (["--tokens", "0"], "--tokens is 0"),
            (["--synthetic-acceptance", "1.5"], "must be above 0 and at most 1"),
            (["--peers", "someone"], "someone is none of"),
            (["--shape", "huge"], "invalid choice"),
            (["--threads", "1025"], "--threads is 1025, must be at most 1024"),
            (["--engine", "onnx"], "invalid choice: 'onnx'"),
            (["--seconds", "nan"], "--seconds is nan, must be above 0"),
            (["--device", "abacus"], "--device abacus: cpu, cuda and cuda:N are supported"),
            (["--device", "meta"], "--device meta: cpu, cuda and cuda:N are supported"),
            (["--device", "cuda:99"], "--device cuda:99: t"),
            (["--config", "shapes/mine.json"], "--config is shapes/mine.json, must be a config.json or the directory"),
            (["--out", "/proc/reports"], "--out: /proc/reports cannot be written: No such file"),
        ],
    )
    def test_what_is_asked_is_checked(self, given: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as ending:
            parsed(given)
        assert ending.value.code == 2
        assert reason in capsys.readouterr().err
