"""Sampling parameters and drafters are offered everywhere: CONTRIBUTING.md lists the places."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path

import pytest
from transformers import GenerationConfig

from specdec.client.completion import read_chunk
from specdec.decoding.sampling import NUMBERS, Sampling, sampling_violations
from specdec.openai_api import anthropic_request, responses_request
from specdec.openai_api.fields import CHAT_FIELDS, COMPLETION_FIELDS, UNSUPPORTED
from specdec.text.generation_defaults import FIELDS, NOT_TAKEN
from specdec.v2 import generation_pb2 as pb
from specdec.wire.speculation import DRAFTERS
from tests import samplings
from tests.client.fake_server import FakeServer

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "specdec" / "openai_api" / "page" / "index.html").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "client-guide.md").read_text(encoding="utf-8")

NOT_IN_MESSAGES = {"frequency_penalty", "presence_penalty"}
"""Sampling parameters that the Messages API does not accept."""

VALUES = {name: 3 if isinstance(getattr(Sampling(), name), int) else 0.5 for name in NUMBERS}
"""For each sampling parameter, a value in its range that is not neutral."""


@pytest.mark.parametrize("name", NUMBERS)
def test_clients_read_the_resolved_value(name: str) -> None:
    sampling = pb.SamplingParameters(**{name: VALUES[name]})  # type: ignore[arg-type]
    resolved = read_chunk(pb.GenerateResponse(resolved=pb.ResolvedRequest(sampling=sampling))).resolved
    assert getattr(resolved, name, None) == VALUES[name]


async def test_specdec_generate_passes_every_parameter_on() -> None:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in VALUES.items()]
    async with FakeServer() as server:
        command = [sys.executable, "-m", "specdec.cli", "generate", "hi", "--address", server.address, *options]
        process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
        _, complained = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, complained.decode()
    sampling = server.calls[0].request.sampling
    assert {name: getattr(sampling, name) for name in NUMBERS if sampling.HasField(name)} == VALUES  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NUMBERS)
def test_every_http_api_accepts_it(name: str) -> None:
    assert name in CHAT_FIELDS & COMPLETION_FIELDS
    assert name in responses_request.SAME
    assert name in anthropic_request.SAME | NOT_IN_MESSAGES
    assert name not in UNSUPPORTED


@pytest.mark.parametrize("name", [name for name in NUMBERS if isinstance(VALUES[name], float)])
def test_it_has_a_range(name: str) -> None:
    violations = sampling_violations(Sampling(**{name: math.nan}), 10, frozenset())  # type: ignore[arg-type]
    assert [field for field, _ in violations] == [f"sampling.{name}"]


@pytest.mark.parametrize("name", NUMBERS)
def test_generation_config_sets_it_if_transformers_knows_it(name: str) -> None:
    assert (name in FIELDS) == hasattr(GenerationConfig(), name)
    assert name not in NOT_TAKEN


@pytest.mark.parametrize("name", NUMBERS)
def test_property_tests_vary_it(name: str) -> None:
    assert name in samplings.VALUES


@pytest.mark.parametrize("name", DRAFTERS)
def test_people_can_choose_the_drafter(name: str) -> None:
    assert f'name="drafters" value="{name}"' in PAGE
    assert f'`"{name}"`' in GUIDE
