"""The quality benchmark's statistics: equal sampling is within noise, different sampling is not."""

from __future__ import annotations

import random

import pytest

from bench.quality.quality import parsed
from bench.quality.report import MEASURES, Mean, Text, difference, mean, reported, table


def texts(words: int, seed: int, count: int = 20) -> list[Text]:
    """Return `count` texts for each of two prompts, drawn uniformly from a vocabulary of `words`."""
    generator = random.Random(seed)
    found = []
    for prompt in (0, 1):
        for _ in range(count):
            tokens = generator.choices(range(words), k=60)
            found.append(Text(prompt, 60, 0, {name: measure(tokens) for name, measure in MEASURES.items()}))
    return found


def test_a_mean_is_over_prompts_and_its_error_within_them() -> None:
    found = [
        Text(0, 9, 0, {"x": 1.0}),
        Text(0, 9, 0, {"x": 3.0}),
        Text(1, 9, 0, {"x": 10.0}),
        Text(1, 9, 0, {"x": 10.0}),
    ]
    assert mean(found, "x").value == 6.0
    assert mean(found, "x").error == pytest.approx(0.5)  # sqrt(2 / 2 + 0) / 2
    assert mean(found[::2], "x") == Mean(5.5, None)


def test_differences_are_told_in_standard_errors() -> None:
    assert difference(Mean(5.0, 0.3), Mean(3.0, 0.4)) == pytest.approx(4.0)
    assert difference(Mean(5.0, None), Mean(3.0, 0.4)) is None
    assert difference(Mean(5.0, 0.0), Mean(5.0, 0.0)) == 0.0


@pytest.mark.parametrize(("words", "level"), [(30, True), (27, False)])
def test_other_sampling_is_found_out(words: int, level: bool) -> None:
    """A vocabulary of 27 words instead of 30 is found beyond the noise."""
    report = reported({"naive": texts(30, 1), "speculative": texts(words, 2), "contrastive": texts(30, 3, count=1)})
    assert report["within_noise"] is level
    assert report["methods"]["contrastive"]["measures"]["entropy 1"]["error"] is None


def test_the_table_says_so() -> None:
    report = reported({"naive": texts(30, 1), "speculative": texts(10, 2), "contrastive": texts(30, 3, count=1)})
    facts = {"target": "t", "draft": "d", "temperature": 1.0, "alpha": 0.1, "prompts": ["a", "b"], "tokens": 60}
    said = table(report | facts)
    assert "NOT within noise" in said
    assert len({line.count("|") for line in said.splitlines() if line.startswith("|")}) == 1


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--texts", "0"], "--texts is 0, must be at least 1"),
        (["--temperature", "0"], "--temperature is 0"),
        (["--address", "a:1", "--draft", "d"], "--draft cannot be combined with --address"),
        (["--address", "a:1", "--dtype", "float32"], "--dtype cannot be combined with --address"),
        (["--target", "t"], "--target needs a --draft"),
    ],
)
def test_what_cannot_be_measured_is_refused(options: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed(options)
    assert what in capsys.readouterr().err
