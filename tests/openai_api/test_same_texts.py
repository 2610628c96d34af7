"""What is asked by HTTP is what is asked by gRPC: the same texts, with drafts, at any temperature."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from demo.train import CHAT_TEMPLATE
from specdec.client import AsyncClient
from tests.openai_api.front import front
from tests.services.conftest import Directories
from tests.stack import stack, until

SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    {"temperature": 1.0, "seed": -3, "frequency_penalty": 0.5, "logit_bias": {"5": -100}},
    {"temperature": 1.0, "seed": 11, "n": 3},
]


@pytest.fixture
def chatting(directories: Directories, tmp_path: Path) -> Path:
    """A target that has a chat template."""
    target = tmp_path / "target"
    shutil.copytree(directories.target, target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": CHAT_TEMPLATE}))
    return target


def as_by_grpc(sampling: dict[str, Any]) -> dict[str, Any]:
    """The options of the gRPC client."""
    given = dict(sampling)
    if "seed" in given:
        given["seed"] %= 1 << 64
    if "logit_bias" in given:
        given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
    return given


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
async def test_texts_are_equal(directories: Directories, chatting: Path, sampling: dict[str, Any]) -> None:
    prompt: Any = [{"role": "user", "content": "the quick brown fox"}]
    async with stack(chatting, directories.near) as services, front(services.address) as http:
        async with AsyncClient(services.address) as client:
            asked = {**as_by_grpc(sampling), "max_tokens": 24}
            completions = await client.complete(tokens=[5, 6, 7, 8], **asked)
            chats = await client.complete(messages=prompt, **asked)
        for stream in (False, True):
            told: Any = {"model": services.model.name, "max_tokens": 24, "stream": stream, **sampling}
            by_http = await http.client.completions.create(prompt=[5, 6, 7, 8], **told)
            chat_by_http = await http.client.chat.completions.create(messages=prompt, **told)
            texts, chat_texts = dict.fromkeys(range(3), ""), dict.fromkeys(range(3), "")
            if stream:
                async for event in by_http:
                    for choice in event.choices:
                        texts[choice.index] += choice.text
                async for event in chat_by_http:
                    for choice in event.choices:
                        chat_texts[choice.index] += choice.delta.content or ""
            else:
                texts |= {choice.index: choice.text for choice in by_http.choices}
                chat_texts |= {choice.index: choice.message.content for choice in chat_by_http.choices}
            count = sampling.get("n", 1)
            assert [texts[index] for index in range(count)] == [each.text for each in completions.completions]
            assert [chat_texts[index] for index in range(count)] == [each.text for each in chats.completions]
        await until(lambda: services.idle)


async def test_a_caller_who_leaves_frees_all_memory(directories: Directories) -> None:
    """That of the verifier's session, and of the draft's."""
    async with stack(directories.target, directories.near) as services, front(services.address) as http:
        stream = await http.client.completions.create(
            model=services.model.name, prompt=[5, 6, 7], max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        assert not services.idle
        await stream.close()
        await until(lambda: services.idle)
