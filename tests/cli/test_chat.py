"""`specdec chat` in a pseudo-terminal, against a fake orchestrator."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from google.rpc.code_pb2 import INVALID_ARGUMENT
from google.rpc.error_details_pb2 import ErrorInfo

from specdec.cli.conversation import Conversation, LeaveError
from tests.client import fake_server
from tests.client.fake_server import TEXT, Act, FakeServer, rich

PATIENCE = 30  # seconds


class Terminal:
    """A pseudo-terminal with its process."""

    def __init__(self, process: Process, end: int) -> None:
        self.process = process
        self._end = end
        self._seen = ""
        self._more = asyncio.Event()
        asyncio.get_running_loop().add_reader(end, self._read)

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    async def shows(self, pattern: str) -> str:
        """Wait for a pattern in new output; return the output up to its end."""
        try:
            async with asyncio.timeout(PATIENCE):
                while (found := re.search(pattern, self._seen, re.DOTALL)) is None:
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            pytest.fail(f"{pattern!r} was never shown, but {self._seen!r}; the status is {self.process.returncode}")
        shown, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return shown

    def _read(self) -> None:
        try:
            data = os.read(self._end, 65536)
        except OSError:  # the process has ended
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self._end)
        self._seen += data.decode(errors="replace")
        self._more.set()


@asynccontextmanager
async def chatting(address: str, *options: str) -> AsyncIterator[Terminal]:
    ours, theirs = pty.openpty()
    command = (sys.executable, "-m", "specdec.cli", "chat", "--address", address, *options)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=theirs, stdout=theirs, stderr=theirs, env=os.environ | {"TERM": "xterm"}, start_new_session=True
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)


def turns(server: FakeServer) -> list[tuple[str, str]]:
    """Return the messages of the last request."""
    return [(turn.role, turn.content) for turn in server.calls[-1].request.chat.messages]


async def test_a_conversation() -> None:
    async with FakeServer() as server, chatting(server.address, "--system", "be brief") as terminal:
        await terminal.shows(re.escape(f"fake at {server.address}; /help lists the commands") + ".*> ")
        terminal.type("hello\n")
        await terminal.shows(re.escape(TEXT))
        await terminal.shows(r"a step; length, seed \d+")
        assert turns(server) == [("system", "be brief"), ("user", "hello")]
        terminal.type("/seed 5\n/speculation off\n//and then?\n")
        await terminal.shows("length, seed 5.*> ")
        assert turns(server)[1:] == [("user", "hello"), ("assistant", TEXT), ("user", "/and then?")]
        assert server.calls[-1].request.speculation.off
        terminal.type("\x04")
        assert await asyncio.wait_for(terminal.process.wait(), PATIENCE) == 0


async def test_an_interruption_ends_the_answer_and_not_the_chat() -> None:
    async with FakeServer(Act(tokens=6, then="hold")) as server, chatting(server.address) as terminal:
        await terminal.shows("> ")
        terminal.type("hello\n")
        await asyncio.wait_for(server.held.wait(), PATIENCE)
        await terminal.shows("déj")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.shows("stopped.*> ")
        await asyncio.wait_for(server.freed.wait(), PATIENCE)
        terminal.type("go on\n")
        await terminal.shows("a step; length.*> ")
        assert [role for role, _ in turns(server)] == ["user", "assistant", "user"]
        assert TEXT.startswith(turns(server)[1][1])
        terminal.process.send_signal(signal.SIGINT)
        terminal.type("\n")  # readline may start to wait just after the signal
        await terminal.shows("Ctrl-D or /quit leaves")
        terminal.type("/quit\n")
        assert await asyncio.wait_for(terminal.process.wait(), PATIENCE) == 0


async def test_an_error_is_told_and_the_question_taken_back() -> None:
    refusal = rich(INVALID_ARGUMENT)
    async with FakeServer(refusal) as server, chatting(server.address) as terminal:
        await terminal.shows("> ")
        terminal.type("hello\n")
        await terminal.shows("refused.*> ")
        terminal.type("again\n")
        await terminal.shows("a step; length")
    assert turns(server) == [("user", "again")]


async def test_a_conversation_that_fills_the_context_is_told_how_to_go_on() -> None:
    too_long = rich(INVALID_ARGUMENT, ErrorInfo(domain="specdec", reason="PROMPT_TOO_LONG"))
    async with FakeServer(too_long, Act(), too_long) as server, chatting(server.address) as terminal:
        await terminal.shows("> ")
        terminal.type("long\n")
        assert "/clear" not in await terminal.shows("refused.*> ")  # nothing was said before
        terminal.type("hello\n")
        await terminal.shows("a step; length.*> ")
        terminal.type("and then?\n")
        await terminal.shows("refused; /clear forgets the conversation.*> ")


async def test_colours_tell_where_tokens_came_from() -> None:
    async with FakeServer() as server, chatting(server.address, "--colours") as terminal:
        await terminal.shows("> ")
        terminal.type("hello\n")
        shown = await terminal.shows("a step; length")
    assert "\x1b[32m" in shown  # from a draft
    assert "\x1b[36m" in shown  # the target's own


@pytest.mark.parametrize(("colours", "thinks"), [(False, 0), (True, 0), (False, 100)])
async def test_a_text_gives_the_terminal_no_orders(colours: bool, thinks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_server, "TOKENS", list(b"a\tb\x1b]0;title\x07\rc"))
    options = ["--colours"] * colours
    async with FakeServer(Act(thinks=thinks)) as server, chatting(server.address, *options) as terminal:
        await terminal.shows("> ")
        terminal.type("hello\n")
        shown = re.sub("\x1b\\[[0-9;?]*[a-z]", "", await terminal.shows("a step; length"))
    assert "a\tb\ufffd]0;title\ufffdc" in shown


@pytest.mark.parametrize("colours", [False, True])
async def test_reasoning_is_dim_and_no_part_of_the_answer(colours: bool) -> None:
    acts = [Act(thinks=8), Act()]
    async with FakeServer(*acts) as server, chatting(server.address, *["--colours"] * colours) as terminal:
        await terminal.shows("> ")
        terminal.type("hello\n")
        shown = await terminal.shows("a step; length.*> ")
        thought, answer = TEXT.encode()[:8].decode(), TEXT.encode()[8:].decode()
        dim = "".join(re.findall("\x1b\\[2m(.*?)\x1b\\[0m", shown, re.DOTALL))
        assert dim.startswith(thought)
        assert f"{thought}\n\n{answer}" in re.sub("\x1b\\[[0-9;?]*[a-z]|\r", "", shown)
        assert thought not in re.sub("\x1b\\[2m.*?\x1b\\[0m", "", shown, flags=re.DOTALL)
        terminal.type("go on\n")
        await terminal.shows("a step; length")
    assert turns(server) == [("user", "hello"), ("assistant", answer), ("user", "go on")]


async def test_a_question_whose_answer_was_cut_off_in_its_reasoning_is_kept() -> None:
    async with FakeServer(Act(tokens=6, then="hold", thinks=100)) as server, chatting(server.address) as terminal:
        await terminal.shows("> ")
        terminal.type("hello\n")
        await asyncio.wait_for(server.held.wait(), PATIENCE)
        await terminal.shows("jà")
        terminal.process.send_signal(signal.SIGINT)
        await terminal.shows("stopped.*> ")
        terminal.type("/again\n")
        await terminal.shows("a step; length")
    assert turns(server) == [("user", "hello")]


async def test_what_cannot_be_asked_is_told_before_the_first_question() -> None:
    async with FakeServer() as server, chatting(server.address, "--model", "other") as terminal:
        await terminal.shows(re.escape(f"--model other: {server.address} serves fake"))
        assert await asyncio.wait_for(terminal.process.wait(), PATIENCE) == 65


@pytest.mark.verify
async def test_a_server_that_is_not_there_is_told_before_the_first_question(unused_tcp_port: int) -> None:
    async with chatting(f"127.0.0.1:{unused_tcp_port}") as terminal:
        await terminal.shows("no server answers")
        assert await asyncio.wait_for(terminal.process.wait(), PATIENCE) == 69


async def test_a_script_hears_of_an_error_by_the_exit_status() -> None:
    command = (sys.executable, "-m", "specdec.cli", "chat", "--address", "127.0.0.1:1")
    process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, stderr=-1)
    said, complained = await asyncio.wait_for(process.communicate(b"hello\n"), PATIENCE)
    assert (process.returncode, said) == (69, b"")
    assert b"no server answers" in complained


async def test_a_file_of_questions_may_come_from_windows() -> None:
    async with FakeServer() as server:
        command = (sys.executable, "-m", "specdec.cli", "chat", "--address", server.address)
        process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, stderr=-1)
        await asyncio.wait_for(process.communicate(b"\xef\xbb\xbfhello\r\n\r\nand then?\r\n"), PATIENCE)
    assert [content for role, content in turns(server) if role == "user"] == ["hello", "and then?"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/sed 5", "/sed is not a command"),
        ("/seed -1", "whole number"),
        ("/seed five", "whole number"),
        ("/temperature hot", "must be a number"),
        ("/speculation maybe", "must be one of auto"),
        ("/speculation", "must be one of auto"),
        ("/again", "nothing was asked"),
    ],
)
def test_wrong_commands(line: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Conversation({}).command(line)


def test_commands_change_what_comes_next() -> None:
    conversation = Conversation({})
    conversation.command("/seed 7")
    conversation.command("/temperature 0.5")
    conversation.command("/speculation local")
    assert conversation.options == {"seed": 7, "temperature": 0.5, "speculation": "local"}
    conversation.command("/seed")
    conversation.command("/temperature")
    assert conversation.options == {"seed": None, "temperature": None, "speculation": "local"}
    conversation.ask("a")
    conversation.answered("b")
    assert conversation.command("/again") == ("", True)
    assert conversation.messages == [{"role": "user", "content": "a"}]
    conversation.answered("")  # a failed answer: the earlier one stays
    assert [turn["content"] for turn in conversation.turns] == ["a", "b"]
    conversation.answered("c")
    assert [turn["content"] for turn in conversation.turns] == ["a", "c"]
    conversation.ask("d")
    conversation.answered("")
    assert [turn["content"] for turn in conversation.turns] == ["a", "c"]
    assert conversation.command("/again") == ("", True)
    assert [turn["content"] for turn in conversation.messages] == ["a"]
    with pytest.raises(LeaveError):
        conversation.command("/quit")
