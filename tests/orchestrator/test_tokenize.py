"""Tokenize: a prompt as the tokens that a completion would start from, with the bytes of each."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from demo.train import HOME
from orchestrator.models.catalog import Catalog
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from orchestrator.requests.model import ServedModel
from orchestrator.servicer import GenerationServicer
from specdec.client import AsyncClient, InvalidRequest, NotFound, Piece
from specdec.engine.model_directory import ModelDirectory
from specdec.text.token_bytes import ALPHABET, TokenBytes
from specdec.v2 import generation_pb2, generation_pb2_grpc
from tests.stack import served

MODEL = ServedModel.of(ModelDirectory(HOME / "target"))


@pytest.fixture
async def address() -> AsyncIterator[str]:
    """Yield the address of an orchestrator without verifiers: Tokenize needs none."""
    async with served(GenerationServicer(Catalog.of(MODEL, Peers(Pods())))) as (address, _):
        yield address


async def test_all_forms_of_a_prompt(address: str) -> None:
    async with AsyncClient(address) as client:
        text = await client.tokenize("def main(é):", pieces=True)
        again = await client.tokenize(tokens=text.ids)
        chat = await client.tokenize(messages=[{"role": "user", "content": "Hello"}])
    assert text.ids == MODEL.tokenizer.encode("def main(é):")
    assert (text.count, text.context_tokens) == (len(text.ids), MODEL.context)
    assert b"".join(piece.bytes for piece in text.pieces) == "def main(é):".encode()
    assert text.pieces[0] == Piece("def", b"def")
    assert (again.ids, again.pieces) == (text.ids, [])
    assert chat.ids == MODEL.tokenizer.encode("# Hello\n", special=False)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "text"),
        ({"tokens": [1 << 30]}, "tokens.ids[0]"),
        ({"tokens": [1], "add_special": False}, "add_special"),
        ({"prompt": "x " * MODEL.context}, "prompt"),
        ({"prompt": "x" * (MODEL.most_text + 1)}, "text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "chat"),
    ],
)
async def test_what_cannot_be_completed_is_refused_alike(address: str, prompt: dict[str, Any], field: str) -> None:
    async with AsyncClient(address) as client:
        with pytest.raises(InvalidRequest) as refused:
            await client.tokenize(**prompt)
    assert [name for name, _ in refused.value.violations] == [field]


async def test_another_model_is_not_found(address: str) -> None:
    async with AsyncClient(address) as client:
        with pytest.raises(NotFound, match="'other'"):
            await client.tokenize("x", model="other")


async def test_the_count_is_told_without_pieces(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        said = await stub.Tokenize(generation_pb2.TokenizeRequest(text="def main("))
    assert said.count == len(said.ids) > 0
    assert not said.pieces


def test_bytes_of_every_token_of_a_byte_level_vocabulary() -> None:
    """Each token's bytes equal the library's decoding, where that is valid text."""
    for token in range(1, MODEL.vocabulary):
        spelt = MODEL.tokenizer.piece(token)
        assert spelt
        assert spelt.decode(errors="replace") == MODEL.tokenizer.decode([token])
    assert sorted(ALPHABET.values()) == list(range(256))


def test_bytes_of_other_vocabularies() -> None:
    vocabulary = {"<0xE2>": 0, "\u2581the": 1, "é": 2}
    tokenizer = FastTokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    spelt = TokenBytes(tokenizer)
    assert [spelt.of(token) for token in range(5)] == [b"\xe2", b" the", "é".encode(), b"<s>", b""]
    tokenizer.decoder = decoders.Metaspace()
    assert TokenBytes(tokenizer).of(1) == b" the"


async def test_the_command_prints_a_line_a_token(address: str) -> None:
    async def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "specdec.cli", "tokenize", "def main(", "--address", address, *arguments]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    (status, said), (_, counted), (wrong, refused) = await asyncio.gather(
        run(), run("--count"), run("--chat", "--no-special")
    )
    ids = MODEL.tokenizer.encode("def main(")
    assert status == 0
    assert said.splitlines()[0].split() == [str(ids[0]), "'def'"]
    assert said.splitlines()[-1] == f"{len(ids)} tokens; the context holds {MODEL.context}"
    assert counted == f"{len(ids)}\n"
    assert wrong == 2
    assert "--no-special" in refused
