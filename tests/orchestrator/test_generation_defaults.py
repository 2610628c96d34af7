"""Defaults of generation_config.json apply only where a request leaves a field unset."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.requests.model import ServedModel
from orchestrator.requests.parsing import parse
from orchestrator.requests.sample import Sample, resolved
from specdec.decoding.sampling import Sampling
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.serving.errors import InvalidRequestError
from specdec.text.generation_defaults import FIELDS, GenerationDefaults
from specdec.v2 import generation_pb2, model_pb2
from tests.models import CONTEXT, make

OURS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "typical_p": 0.9, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models") / "m")


@pytest.fixture(scope="module")
def model(directory: Path) -> ServedModel:
    return ServedModel.of(ModelDirectory(directory))


def with_config(directory: Path, to: Path, **fields: Any) -> ModelDirectory:
    """Return the model with these fields in its generation_config.json."""
    shutil.copytree(directory, to)
    (to / "generation_config.json").write_text(json.dumps(fields))
    return ModelDirectory(to)


def on_the_wire(number: float) -> float:
    return float(np.float32(number))


def sample_of(model: ServedModel, **fields: Any) -> Sample:
    prompt = generation_pb2.TokenPrompt(ids=[5, 6])
    return parse(generation_pb2.GenerateRequest(tokens=prompt, **fields), model).samples[0]


def test_a_file_is_read(directory: Path, tmp_path: Path) -> None:
    found = GenerationDefaults.of(with_config(directory, tmp_path / "m", do_sample=True, max_new_tokens=7, **OURS))
    assert found.used == OURS | {"max_new_tokens": 7}
    assert found.sampling.temperature == on_the_wire(0.6)


def test_no_file_and_an_empty_one_leave_all_off(directory: Path, tmp_path: Path) -> None:
    found = GenerationDefaults.of(with_config(directory, tmp_path / "m"))
    (tmp_path / "m" / "generation_config.json").unlink()
    assert found == GenerationDefaults.of(ModelDirectory(tmp_path / "m")) == GenerationDefaults()


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({"do_sample": True}, 1.0),
        ({"do_sample": True, "temperature": 0.5}, 0.5),
        ({"do_sample": True, "temperature": None}, 1.0),
        ({"do_sample": False, "temperature": 0.5}, 0.0),
        ({"temperature": 0.5}, 0.0),
    ],
)
def test_only_do_sample_makes_it_sample(
    directory: Path, tmp_path: Path, fields: dict[str, Any], temperature: float
) -> None:
    assert GenerationDefaults.of(with_config(directory, tmp_path / "m", **fields)).sampling.temperature == temperature


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", -1, "is -1, must be a finite number of at least 0"),
        ("temperature", "warm", 'is "warm", must be a finite number'),
        ("temperature", math.nan, "is NaN, must be a finite number"),
        ("temperature", True, "is true, must be a finite number"),
        ("top_p", 0, r"is 0, must be in \(0, 1\]"),
        ("top_k", 2.5, "is 2.5, must be an integer from 0"),
        ("min_p", 1.5, r"is 1.5, must be in \[0, 1\]"),
        ("typical_p", 0, r"is 0, must be in \(0, 1\]"),
        ("repetition_penalty", 0, r"is 0, must be in \[0.01, 100\]"),
        ("max_new_tokens", 0, "is 0, must be an integer from 1"),
        ("do_sample", "yes", 'is "yes", must be true or false'),
    ],
)
def test_a_value_that_no_request_could_have_fails_the_start(
    directory: Path, tmp_path: Path, field: str, value: object, said: str
) -> None:
    broken = with_config(directory, tmp_path / "m", **{field: value})
    with pytest.raises(ModelDirectoryError, match=rf"m/generation_config.json: {field} {said}"):
        ServedModel.of(broken)


def test_what_is_not_built_is_told_and_what_changes_nothing_is_not(directory: Path, tmp_path: Path) -> None:
    found = with_config(directory, tmp_path / "m", num_beams=4, no_repeat_ngram_size=0, suppress_tokens=[3])
    assert GenerationDefaults.of(found).not_taken == ("num_beams", "suppress_tokens")


SOME = GenerationDefaults(
    Sampling(temperature=0.5, top_p=0.75, top_k=9, min_p=0.25, typical_p=0.5, repetition_penalty=1.5), 11
)


@given(
    asked=st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.0, 0.25, 1.0]),
            "top_p": st.sampled_from([0.5, 1.0]),
            "top_k": st.sampled_from([0, 3]),
            "min_p": st.sampled_from([0.0, 0.125]),
            "typical_p": st.sampled_from([0.75, 1.0]),
            "repetition_penalty": st.sampled_from([1.0, 1.25]),
            "frequency_penalty": st.sampled_from([0.0, 0.5]),
        },
    ),
    max_tokens=st.sampled_from([None, 5]),
    ignored=st.booleans(),
)
def test_what_is_asked_for_holds_even_if_it_is_neutral(
    model: ServedModel, asked: dict[str, float], max_tokens: int | None, ignored: bool
) -> None:
    parameters: Any = generation_pb2.SamplingParameters(**asked)  # type: ignore[arg-type]
    fields: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
    found = sample_of(replace(model, defaults=SOME), sampling=parameters, ignore_generation_config=ignored, **fields)
    default = Sampling() if ignored else SOME.sampling
    for name in (*FIELDS, "frequency_penalty"):
        assert getattr(found.sampling, name) == asked.get(name, getattr(default, name)), name
    silent = CONTEXT - 1 if ignored else 11
    assert found.max_tokens == (silent if max_tokens is None else max_tokens)


def test_a_resumed_text_carries_what_the_first_orchestrator_took(model: ServedModel) -> None:
    first = sample_of(replace(model, defaults=SOME))
    said = resolved(first, "")
    other = replace(model, defaults=GenerationDefaults(Sampling(temperature=2.0, top_k=1, repetition_penalty=3.0), 2))
    for elsewhere in (other, model):
        again = sample_of(elsewhere, sampling=said.sampling, max_tokens=said.max_tokens)
        assert replace(again.sampling, seed=0) == replace(first.sampling, seed=0)
        assert again.max_tokens == first.max_tokens


def test_contrastive_decoding_takes_what_it_can_use(model: ServedModel) -> None:
    found = sample_of(replace(model, defaults=SOME), rule=model_pb2.ACCEPTANCE_RULE_CONTRASTIVE)
    assert replace(found.sampling, seed=0) == Sampling(repetition_penalty=1.5)
    assert found.max_tokens == 11


def test_a_fallback_temperature_holds_where_nobody_names_one(model: ServedModel) -> None:
    def temperature(model: ServedModel, **fields: Any) -> float:
        return sample_of(model, fallback_temperature=0.5, **fields).sampling.temperature

    sampled = replace(model, defaults=SOME)
    assert temperature(model) == 0.5
    assert temperature(sampled) == SOME.sampling.temperature
    assert temperature(sampled, ignore_generation_config=True) == 0.5
    assert temperature(model, sampling=generation_pb2.SamplingParameters(temperature=0.0)) == 0.0
    assert temperature(model, rule=model_pb2.ACCEPTANCE_RULE_CONTRASTIVE) == 0.0
    with pytest.raises(InvalidRequestError, match="temperature: is -1"):
        sample_of(model, fallback_temperature=-1.0)


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.7}, 0.0),
        ({"temperature": 0}, 0.0),
        ({"do_sample": True, "temperature": 0.0}, 0.0),
        ({"top_p": 0.9}, 0.5),  # as in many published files
        ({"do_sample": None}, 0.5),
        ({}, 0.5),
    ],
)
def test_a_file_that_asks_for_greedy_decoding_is_not_silent(
    directory: Path, tmp_path: Path, fields: dict[str, Any], temperature: float
) -> None:
    model = ServedModel.of(with_config(directory, tmp_path / "m", **fields))
    assert sample_of(model, fallback_temperature=0.5).sampling.temperature == temperature
    assert sample_of(model).sampling.temperature == 0.0
    assert sample_of(model, fallback_temperature=0.5, ignore_generation_config=True).sampling.temperature == 0.5
    assert model.defaults.used.get("temperature", 0.5) == temperature


def test_the_context_bounds_the_default(model: ServedModel) -> None:
    found = sample_of(replace(model, defaults=GenerationDefaults(max_new_tokens=10**6)))
    assert found.max_tokens == sample_of(model).max_tokens


def test_orchestrators_with_other_defaults_tell_another_text_fingerprint(model: ServedModel) -> None:
    assert replace(model, defaults=SOME).text_fingerprint != model.text_fingerprint
