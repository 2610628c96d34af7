"""`specdec generate` with one prompt: the options of a request, and several samples."""

from __future__ import annotations

import asyncio
import json
import sys

from tests.client.fake_server import TEXT, FakeServer


async def run(server: FakeServer, *arguments: str) -> tuple[str, str]:
    command = [sys.executable, "-m", "specdec.cli", "generate", "hi", "--address", server.address, *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    said, complained = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, complained
    return said.decode(), complained.decode()


async def test_options_become_the_request_s() -> None:
    penalties = ("--repetition-penalty", "1.5", "--frequency-penalty", "0.5", "--presence-penalty", "-0.5")
    async with FakeServer() as server:
        await run(server, *penalties, "--min-tokens", "3", "--ignore-eos")
    request, sampling = server.calls[0].request, server.calls[0].request.sampling
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, 0.5, -0.5)
    assert (request.min_tokens, request.ignore_end_token) == (3, True)


async def test_samples_have_headings() -> None:
    async with FakeServer() as server:
        said, told = await run(server, "--n", "2")
    assert said == f"--- sample 1 of 2\n{TEXT}\n--- sample 2 of 2\n{TEXT}\n"
    assert told.count("a step, ") == 2
    assert told.count("seed 1001") == 2


async def test_samples_are_objects_of_their_own() -> None:
    async with FakeServer() as server:
        said, _ = await run(server, "--n", "2", "--json", "--seed", "7")
    assert [(each["text"], each["seed"]) for each in map(json.loads, said.splitlines())] == [(TEXT, 7), (TEXT, 7)]


async def test_log_probabilities_are_in_the_json() -> None:
    async with FakeServer() as server:
        said, _ = await run(server, "--json", "--logprobs", "2")
    found = json.loads(said)
    assert len(found["logprobs"]) == len(found["tokens"])
    first = found["logprobs"][0]
    assert first["logprob"] == -0.5
    assert [each["logprob"] for each in first["top"]] == [-0.5, -2.0]
    assert first["top"][0] == {"token": found["tokens"][0], "text": first["text"], "logprob": -0.5}
