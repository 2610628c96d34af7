"""`specdec generate --prompt-file`: prompts run concurrently, results keep their order, and an interrupted run
continues."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.cli.many import WAITING, as_done, in_order
from specdec.cli.prompt_file import PromptFile, PromptFileError
from specdec.cli.results_file import ResultsFile, ResultsFileError
from tests.client.fake_server import TEXT, Act, FakeServer

REFUSED = Act(tokens=0, then="abort", code=grpc.StatusCode.INVALID_ARGUMENT, details="no")


def written(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


async def start(server: FakeServer, *arguments: object) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "specdec.cli", "generate", "--address", server.address, *map(str, arguments)]
    return await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)


async def run(server: FakeServer, *arguments: object) -> tuple[int | None, str, str]:
    process = await start(server, *arguments)
    said, complained = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, said.decode(), complained.decode()


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- the file of prompts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "is not JSON: "),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"text": "\xff"}', "is not UTF-8 text"),
        (b"5", "must be an object with one of `text`, `tokens`, `messages`"),
        (b"{}", "must be an object with one of"),
        (b'{"text": "a", "tokens": [1]}', "must be an object with one of"),
        (b'{"text": 5}', "text = 5: must be a string"),
        (
            b'{"text": "a", "max_token": 5}',
            "`max_token` cannot be set on a line, must be one of add_generation_prompt, allowed_tokens, ",
        ),
        (b'{"text": "a", "n": 2}', "`n` cannot be set"),
        (b'{"text": "a", "return_prompt_token_ids": true}', "`return_prompt_token_ids` cannot be set"),
        (b'{"text": "a", "max_tokens": -1}', "max_tokens = -1: "),
        (b'{"tokens": [-1]}', "tokens = [-1]: "),
        (b'{"messages": [{"who": "user"}]}', "messages[0] = "),
        (b'{"text": "a", "rule": "exact"}', 'rule = "exact": not one of '),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(PromptFileError) as caught:
        list(PromptFile(path, {}).prompts())
    assert str(caught.value).startswith(f"{path}:3: ")
    assert said in str(caught.value)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none", "No such file"), (tmp_path, "is not a file")):
        with pytest.raises(PromptFileError, match=f"^{path}: {said}"):
            list(PromptFile(path, {}).prompts())


def test_a_line_has_the_last_word_on_options(tmp_path: Path) -> None:
    path = written(
        tmp_path / "prompts.jsonl",
        {"text": "a", "temperature": 0.5, "logit_bias": {"7": 1.0}},
        {"tokens": [1, 2], "drafters": ["ngram"]},
    )
    first, second = PromptFile(path, {"temperature": 1.0, "speculation": "off", "seed": None}).prompts()
    assert (first.line, first.text) == (1, "a")
    assert first.options == {"temperature": 0.5, "speculation": "off", "logit_bias": {7: 1.0}}
    assert second.options == {"temperature": 1.0, "tokens": [1, 2], "drafters": ["ngram"]}
    assert len({first.digest, second.digest}) == 2


@pytest.mark.parametrize(
    ("of_command", "of_line"),
    [
        ({"regex": "a+"}, {"json_schema": "{}"}),
        ({"regex": "a+", "grammar_after_token": 5}, {"choice": ["a", "b"]}),
        ({"rule": "contrastive", "alpha": 0.6, "amateur_temperature": 0.5}, {"rule": "coupled"}),
        ({"rule": "typical", "typical_delta": 0.2}, {"rule": "contrastive", "alpha": 0.6}),
        ({"lookahead": [2, 3, 2]}, {"jacobi": 4}),
    ],
)
def test_a_line_replaces_all_that_its_option_replaces(
    of_command: dict[str, Any], of_line: dict[str, Any], tmp_path: Path
) -> None:
    path = written(tmp_path / "prompts.jsonl", {"text": "a"}, {"text": "a", **of_line})
    first, second = PromptFile(path, of_command).prompts()
    assert (first.options, second.options) == (of_command, of_line)


@pytest.mark.parametrize(
    ("of_command", "of_line"),
    [
        ({"alpha": 0.2}, {"rule": "contrastive"}),
        ({"rule": "contrastive"}, {"alpha": 0.3}),
        ({"rule": "typical", "typical_epsilon": 0.2}, {"typical_delta": 0.5}),
        ({"regex": "a+"}, {"grammar_after_token": 5}),
    ],
)
def test_a_line_adds_to_what_goes_with_its_option(
    of_command: dict[str, Any], of_line: dict[str, Any], tmp_path: Path
) -> None:
    (only,) = PromptFile(written(tmp_path / "prompts.jsonl", {"text": "a", **of_line}), of_command).prompts()
    assert only.options == of_command | of_line


# --- the file of results ------------------------------------------------------------------------


def test_a_line_may_say_the_time(tmp_path: Path) -> None:
    entry = {"messages": [{"role": "user", "content": "a"}], "time": "2026-11-27T12:00:00+00:00"}
    (prompt,) = PromptFile(written(tmp_path / "in", entry), {}).prompts()
    assert prompt.options["time"].year == 2026
    assert prompt.digest
    with pytest.raises(PromptFileError, match="in:1: time = "):
        list(PromptFile(written(tmp_path / "in", entry | {"time": "2026-11-27T12:00:00"}), {}).prompts())


def test_results_go_on_where_they_broke_off(tmp_path: Path) -> None:
    """Complete lines are kept, prompts with torn lines or errors are run again, and the final file is in order."""
    file = PromptFile(written(tmp_path / "prompts.jsonl", *({"text": str(i)} for i in range(4))), {})
    one, two, three, four = file.prompts()
    out = ResultsFile(tmp_path / "out.jsonl", resume=False)
    out.append(one, {"text": "1"})
    out.append(two, {"error": {}})
    out.append(three, {"text": "3"})
    out.close()
    with (tmp_path / "out.jsonl").open("a") as torn:
        torn.write('{"line": 4, "requ')
    with pytest.raises(ResultsFileError, match="already exists; --resume"):
        ResultsFile(tmp_path / "out.jsonl", resume=False)
    out = ResultsFile(tmp_path / "out.jsonl", resume=True)
    out.check(file.prompts())
    out.begin()
    assert [each.line for each in file.prompts() if each not in out] == [2, 4]
    assert [each["line"] for each in results(tmp_path / "out.jsonl")] == [1, 3]
    out.append(two, {"text": "2"})
    out.append(four, {"text": "4"})
    out.close()
    assert [each["text"] for each in results(tmp_path / "out.jsonl")] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hello", "out.jsonl:1: is not a result of this command"),
        ('{"text": "a"}', "out.jsonl:1: is not a result of this command"),
        (
            '{"line": 1, "request": "0"}',
            "out.jsonl:1: is the result of another prompt or other options than line 1 has now",
        ),
        ('{"line": 9, "request": "0"}', "out.jsonl:1: is the result of line 9, which has no prompt now"),
    ],
)
def test_results_of_something_else_are_left_alone(tmp_path: Path, line: str, said: str) -> None:
    file = PromptFile(written(tmp_path / "prompts.jsonl", {"text": "a"}), {})
    path = tmp_path / "out.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ResultsFileError, match=said), closing(ResultsFile(path, resume=True)) as out:
        out.check(file.prompts())
    assert path.read_text() == line + "\n"


# --- all at once --------------------------------------------------------------------------------


def test_a_disk_that_is_full_is_told_and_the_run_can_go_on(tmp_path: Path) -> None:
    first, second = PromptFile(written(tmp_path / "in", {"text": "a"}, {"text": "b"}), {}).prompts()
    file = ResultsFile(tmp_path / "out", resume=False)
    file.append(first, {"text": "x"})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "out").stat().st_size + 20, before[1]))
    try:
        with pytest.raises(ResultsFileError, match="out: File too large"):
            file.append(second, {"text": "y" * 100})
        with pytest.raises(ResultsFileError, match="out: File too large"):
            file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with closing(ResultsFile(tmp_path / "out", resume=True)) as file:
        assert first in file
        assert second not in file
        file.begin()
        file.append(second, {"text": "y"})
    assert [each["text"] for each in results(tmp_path / "out")] == ["x", "y"]


def test_a_second_run_may_not_write_to_the_file(tmp_path: Path) -> None:
    first, second = PromptFile(written(tmp_path / "in", {"text": "a"}, {"text": "b"}), {}).prompts()
    out = ResultsFile(tmp_path / "out", resume=False)
    out.append(second, {"error": {}})
    out.close()
    out = ResultsFile(tmp_path / "out", resume=True)
    for _ in range(2):
        with pytest.raises(ResultsFileError, match="out: another run is writing to it"):
            ResultsFile(tmp_path / "out", resume=True)
        out.begin()  # replaces the file, without the error
    out.append(first, {"error": {}})
    out.append(second, {"text": "b"})
    assert len(out) == 1  # the failed one is not done
    out.close()
    ResultsFile(tmp_path / "out", resume=True).close()


def test_what_replaces_the_file_takes_its_place(tmp_path: Path) -> None:
    """Links and permissions stay, and a full disk keeps no unfinished copy."""
    first, second = PromptFile(written(tmp_path / "in", {"text": "a"}, {"text": "b"}), {}).prompts()
    link, file = tmp_path / "link", tmp_path / "out"
    file.touch(mode=0o600)
    link.symlink_to(file)
    with closing(ResultsFile(link, resume=True)) as out:
        out.append(second, {"text": "b"})
        out.append(first, {"text": "a"})
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600
    assert [each["line"] for each in results(file)] == [1, 2]
    out = ResultsFile(link, resume=True)
    for prompt in (second, first):
        out.append(prompt, {"text": "c" * 1000})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(ResultsFileError, match="out: File too large"):
            out.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.glob("*.new"))
    assert len(file.read_text().splitlines()) == 4


async def test_so_many_at_once_and_in_order() -> None:
    running, most, taken = 0, 0, 0
    gate = asyncio.Event()

    def numbers() -> Any:
        nonlocal taken
        while taken < 1000:
            taken += 1
            yield taken

    async def action(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if number == 1:
            await gate.wait()  # the slowest action: all later results wait for it
        else:
            await asyncio.sleep(0)
        if number == 3 * WAITING:
            gate.set()
        running -= 1
        return number

    done = []
    async with aclosing(in_order(action, numbers(), 3)) as made:
        async for number in made:
            assert taken <= number + (1 + WAITING) * 3  # bounded read-ahead in a large file
            done.append(number)
    assert done == list(range(1, 1001))
    assert most == 3


@pytest.mark.parametrize("in_turn", [in_order, as_done])
async def test_leaving_cancels_the_rest(in_turn: Any) -> None:
    cancelled = asyncio.Event()

    async def action(number: int) -> int:
        if number:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
        return number

    async with aclosing(in_turn(action, range(2), 2)) as made:
        assert await anext(made) == 0
        await asyncio.sleep(0)
    assert cancelled.is_set()


async def test_what_is_done_first_comes_first() -> None:
    gates = {number: asyncio.Event() for number in range(4)}

    async def action(number: int) -> int:
        await gates[number].wait()
        return number

    done = []
    async with aclosing(as_done(action, range(4), 2)) as made:
        for number in (1, 2, 0, 3):
            gates[number].set()
            done.append(await anext(made))
        assert [each async for each in made] == []
    assert done == [1, 2, 0, 3]


# --- the command --------------------------------------------------------------------------------


async def test_a_failing_prompt_is_an_entry_and_the_rest_goes_on(tmp_path: Path) -> None:
    named = tmp_path / "p:100"  # `:100:` is an emoji to rich
    prompts = written(named, {"text": "a"}, {"tokens": [1]}, {"messages": [{"role": "u", "content": "c"}]})
    async with FakeServer(Act(), REFUSED) as server:
        status, said, complained = await run(server, "--prompt-file", prompts, "--json", "--concurrency", 1)
    assert status == 65
    first, second, third = map(json.loads, said.splitlines())
    assert [each["line"] for each in (first, second, third)] == [1, 2, 3]
    assert first["text"] == third["text"] == TEXT
    assert (second["error"]["type"], second["error"]["message"]) == ("InvalidRequest", "no")
    assert complained == f"specdec: {prompts}:2: no\n"
    assert [call.request.WhichOneof("prompt") for call in server.calls] == ["text", "tokens", "chat"]


async def test_fail_fast_stops(tmp_path: Path) -> None:
    prompts = written(tmp_path / "p.jsonl", *[{"text": "a"}] * 9)
    async with FakeServer(Act(), REFUSED) as server:
        options = ("--prompt-file", prompts, "--json", "--concurrency", 1, "--fail-fast")
        status, said, _ = await run(server, *options)
    assert status == 65
    assert len(said.splitlines()) == 2
    assert len(server.calls) < 9


async def test_a_full_server_is_asked_again(tmp_path: Path) -> None:
    prompts = written(tmp_path / "p.jsonl", {"text": "a"})
    full = Act(tokens=0, then="abort", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
    async with FakeServer(full) as server:
        status, said, _ = await run(server, "--prompt-file", prompts)
    assert (status, said) == (0, TEXT + "\n")
    assert len(server.calls) == 2


async def test_an_interrupted_run_is_resumed(tmp_path: Path) -> None:
    prompts, out = written(tmp_path / "p.jsonl", *({"text": str(i)} for i in range(4))), tmp_path / "out.jsonl"
    options = ("--prompt-file", prompts, "--out", out, "--concurrency", 2)
    async with FakeServer(Act(), Act(), Act(then="hold"), Act(then="hold")) as server:
        process = await start(server, *options)
        async with asyncio.timeout(60):
            while len(server.calls) < 4:
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, complained = await asyncio.wait_for(process.communicate(), 30)
        assert (process.returncode, complained) == (130, b"specdec: 2 of 4 done; --resume continues\n")
        assert [each["line"] for each in results(out)] == [1, 2]
        status, said, told = await run(server, *options, "--resume")
    assert (status, said) == (0, "")
    assert "2 were already done" in told
    assert [each["line"] for each in results(out)] == [1, 2, 3, 4]
    assert all(each["text"] == TEXT for each in results(out))
    assert sorted(call.request.text for call in server.calls) == ["0", "1", "2", "2", "3", "3"]


async def test_no_result_waits_in_memory_for_an_earlier_one(tmp_path: Path) -> None:
    """When interrupted, the file has all results except the pending one; after the exit, in order."""
    prompts, out = written(tmp_path / "p.jsonl", *({"text": str(i)} for i in range(6))), tmp_path / "out.jsonl"
    async with FakeServer(Act(then="hold")) as server:
        process = await start(server, "--prompt-file", prompts, "--out", out, "--concurrency", 2)
        async with asyncio.timeout(60):
            while not out.exists() or out.read_text().count("\n") < 5:
                await asyncio.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 30) == 130
    held = int(server.calls[0].request.text) + 1
    assert [each["line"] for each in results(out)] == [line for line in range(1, 7) if line != held]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("x", "--out", "o"), "need --prompt-file"),
        (("--prompt-file", "p.jsonl", "--resume"), "--resume needs --out"),
        (("--prompt-file", "p.jsonl", "--n", "2"), "--n and --logprobs: cannot be combined with --prompt-file"),
        (("x", "--logprobs", "1"), "--logprobs needs --json"),
        (("--prompt-file", os.devnull), "is not a file"),
        (("--prompt-file", "empty.jsonl"), "empty.jsonl: contains no prompts"),
    ],
)
async def test_wrong_options_are_refused_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str
) -> None:
    (tmp_path / "empty.jsonl").touch()
    written(tmp_path / "p.jsonl", {"text": "a"})
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    async with FakeServer() as server:
        status, _, complained = await run(server, *arguments)
    assert status == 2
    assert said in complained
    assert not server.calls
