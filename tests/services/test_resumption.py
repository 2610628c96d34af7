"""A text resumed at another orchestrator continues with exactly its tokens, or is refused: the second orchestrator uses
the values that the first one resolved for fields left unset."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from orchestrator.models.catalog import Catalog
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.servicer import GenerationServicer
from specdec.client import AsyncClient, Chunk, PromptChanged
from specdec.engine.model_directory import ModelDirectory
from tests.services.conftest import Directories
from tests.services.interrupted import slow_target
from tests.stack import Pod, Stack, running, stack

LATE = datetime(2025, 12, 31, 23, 59, 59, 500_000, tzinfo=UTC)
DATED = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
OTHER = "{{ messages[0].content }}!"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "what day is it?"}]}
OPTIONS: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 3}


def orchestrator(services: Stack, directory: Path, clock: datetime) -> Pod:
    """Run another orchestrator for the verifiers of a stack, with a fixed clock."""
    peers = Peers(Pods(pod.address for pod in services.verifiers))
    return Pod(GenerationServicer(Catalog.of(ServedModel.of(ModelDirectory(directory)), peers), clock=lambda: clock))


def copy_of(directory: Path, to: Path, template: str, **generation: Any) -> Path:
    """Copy the model with another chat template and other fields in generation_config.json."""
    shutil.copytree(directory, to)
    (to / "chat_template.jinja").write_text(template)
    file = to / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | generation))
    return to


@asynccontextmanager
async def two(
    directories: Directories, first: Path, second: Path, later: timedelta
) -> AsyncIterator[tuple[Pod, AsyncClient, AsyncClient]]:
    """Yield an orchestrator to kill, a client that also knows a second one, and a client of the second alone."""
    async with (
        stack(directories.target, None, target_delay=slow_target) as services,
        running(orchestrator(services, first, LATE)) as one,
        running(orchestrator(services, second, LATE + later)) as other,
        AsyncClient([one.address, other.address], timeout=60) as both,
        AsyncClient(one.address, timeout=60) as alone,
    ):
        both._rotation._turns = [one.address, other.address]
        yield one, both, alone


async def interrupted(client: AsyncClient, killed: Pod, **options: Any) -> list[Chunk]:
    """Read a stream whose orchestrator is killed after its first tokens."""
    chunks: list[Chunk] = []
    async with client.generate(**options) as stream:
        async for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 2:
                await killed.stop()
    return chunks


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.tokens]


async def test_a_change_of_date_changes_no_token(directories: Directories, tmp_path: Path) -> None:
    dated = copy_of(directories.target, tmp_path / "target", DATED)
    async with two(directories, dated, dated, timedelta(days=1)) as (one, both, alone):
        want = await alone.complete(**CHAT, **OPTIONS)
        tomorrow = await alone.complete(**CHAT, max_tokens=1, time=LATE + timedelta(days=1))
        assert want.resolved.time == LATE.replace(microsecond=0)
        assert tomorrow.resolved.prompt_digest != want.resolved.prompt_digest  # the date is in the prompt
        chunks = await interrupted(both, one, **CHAT, **OPTIONS)
    assert tokens_of(chunks) == want.completions[0].tokens
    finish = chunks[-1].finish
    assert finish is not None
    assert finish.speculation.failover_events["resumed"] == 1
    assert [chunk.resolved for chunk in chunks if chunk.resolved is not None] == [want.resolved]


@pytest.mark.verify
async def test_another_template_is_refused(directories: Directories, tmp_path: Path) -> None:
    first = copy_of(directories.target, tmp_path / "one" / "target", DATED)
    second = copy_of(directories.target, tmp_path / "other" / "target", OTHER)
    async with two(directories, first, second, timedelta()) as (one, both, _):
        with pytest.raises(PromptChanged) as refused:
            await interrupted(both, one, **CHAT, **OPTIONS)
    assert refused.value.reason == "PROMPT_CHANGED"


async def test_other_end_tokens_end_no_text_differently(directories: Directories, tmp_path: Path) -> None:
    """The end tokens of the first orchestrator apply at the second."""
    first = copy_of(directories.target, tmp_path / "one" / "target", DATED)
    async with two(directories, first, first, timedelta()) as (_, _, alone):
        plain = await alone.complete("abc", **OPTIONS | {"max_tokens": 21}, ignore_end_token=True)
    end = plain.completions[0].tokens[20]  # an end token for the second, but not for the first
    second = copy_of(directories.target, tmp_path / "other" / "target", DATED, eos_token_id=[2, end])
    async with two(directories, first, second, timedelta()) as (one, both, alone):
        want = await alone.complete("abc", **OPTIONS)
        assert end in want.completions[0].tokens[5:]
        chunks = await interrupted(both, one, prompt="abc", **OPTIONS)
    assert tokens_of(chunks) == want.completions[0].tokens


async def test_other_generation_defaults_choose_no_token_differently(directories: Directories, tmp_path: Path) -> None:
    """The defaults in the first orchestrator's generation_config.json apply at the second."""
    defaults = {"do_sample": True, "temperature": 0.8, "top_k": 20, "repetition_penalty": 1.3, "max_new_tokens": 60}
    first = copy_of(directories.target, tmp_path / "one" / "target", DATED, **defaults)
    second = copy_of(directories.target, tmp_path / "other" / "target", DATED, do_sample=True, max_new_tokens=5)
    async with two(directories, first, second, timedelta()) as (one, both, alone):
        want = await alone.complete("abc", seed=3)
        explicit = await alone.complete("abc", **OPTIONS, top_k=20, repetition_penalty=1.3)
        greedy = await alone.complete("abc", seed=3, max_tokens=60, ignore_generation_config=True)
        assert want.completions[0].tokens == explicit.completions[0].tokens != greedy.completions[0].tokens
        assert len(want.completions[0].tokens) > 5
        chunks = await interrupted(both, one, prompt="abc", seed=3)
    assert tokens_of(chunks) == want.completions[0].tokens
    assert want.resolved is not None
    assert (want.resolved.max_tokens, want.resolved.top_k) == (60, 20)
