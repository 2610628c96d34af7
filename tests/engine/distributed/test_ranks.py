"""Processes that share a model end together, whichever ends first, whatever the others are doing then."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from specdec.engine.distributed.ranks import LOST, Ranks
from specdec.engine.engine import UnsupportedModelError
from specdec.engine.model_directory import ModelDirectoryError
from tests.ranks import launched

IDLE, BUSY = "idle", "busy"


def wait_for_ever(what: str) -> None:
    """Wait for a command, or in a collective to which the highest rank never contributes."""
    with Ranks.joined("cpu") as ranks:
        print("joined", flush=True)
        if what == BUSY and ranks.rank < ranks.degree - 1:
            try:
                dist.all_reduce(torch.ones(4))
            except RuntimeError as error:
                ranks.fail(error)
        elif ranks.rank == 0:
            signal.pause()
        else:
            next(ranks.commands())


def end_in_peace() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    with Ranks.joined("cpu") as ranks:
        print("joined", flush=True)
        if ranks.rank == 0:
            signal.sigwait([signal.SIGUSR1])
        else:
            next(ranks.commands())


def refuse_on_the_last() -> None:
    def refuse() -> None:
        if ranks.rank == ranks.degree - 1:
            raise ModelDirectoryError("no weights here")

    with Ranks.joined("cpu") as ranks:
        try:
            ranks.together(refuse)
        except ModelDirectoryError as error:
            print(error, flush=True)
        assert ranks.all(ranks.rank) == list(range(ranks.degree))
        if ranks.rank:
            ranks.await_end()


def agree_on(options: list[dict[str, Any]]) -> None:
    with Ranks.joined("cpu") as ranks:
        try:
            ranks.agree(**options[ranks.rank])
        except UnsupportedModelError as error:
            print(error, flush=True)
        assert ranks.all(ranks.rank) == [0, 1]  # both still respond
        if ranks.rank:
            ranks.await_end()


def launch() -> None:
    """Start two ranks as torchrun does: processes independent of this one."""
    os.environ |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for rank in ("0", "1"):
        if not os.fork():
            os.environ |= {"RANK": rank, "LOCAL_RANK": rank}
            break
    else:
        signal.pause()
    signal.alarm(60)  # otherwise they would stay for ever
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    with Ranks.joined("cpu") as ranks:
        print("joined", flush=True)
        if ranks.rank:
            ranks.await_end()
        signal.sigwait([signal.SIGTERM])
        print("told to end", flush=True)


def fail_at_a_command() -> None:
    with Ranks.joined("cpu") as ranks:
        if ranks.rank == 0:
            ranks.tell("do", 1)
            signal.pause()
        else:
            ranks.fail(RuntimeError(f"cannot {next(ranks.commands())}"))


@pytest.mark.parametrize("what", [IDLE, BUSY])
@pytest.mark.parametrize("killed", [0, 2])
def test_a_lost_rank_ends_all(what: str, killed: int, tmp_path: Path) -> None:
    """Every rank logs one line: rank 0 the lost rank, the others at least the loss of rank 0."""
    with launched(3, tmp_path / "logs", wait_for_ever, what) as ranks:
        for rank in range(3):
            ranks.until_said(rank, "joined")
        ranks.signal(killed, signal.SIGKILL)
        assert ranks.exit_codes() == [-signal.SIGKILL if rank == killed else LOST for rank in range(3)]
        for rank in {0, 1, 2} - {killed}:
            line = next(line for line in ranks.said(rank).splitlines() if "rank_lost" in line)
            assert f"rank={rank}" in line


def test_followers_end_with_rank_0(tmp_path: Path) -> None:
    """Normally, and not earlier, even if signalled."""
    with launched(2, tmp_path / "logs", end_in_peace) as ranks:
        for rank in range(2):
            ranks.until_said(rank, "joined")
        ranks.signal(1, signal.SIGTERM)
        ranks.signal(0, signal.SIGUSR1)
        assert ranks.exit_codes() == [0, 0]


def test_ranks_end_in_peace_when_their_launcher_is_killed(tmp_path: Path) -> None:
    with launched(1, tmp_path / "logs", launch) as launcher:
        launcher.until_said(0, "joined", times=2)
        launcher.signal(0, signal.SIGKILL)
        assert launcher.exit_codes() == [-signal.SIGKILL]
        launcher.until_said(0, "told to end", running=False)
        launcher.until_said(0, "stopped", running=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([{"dtype": "bfloat16", "device": "cpu"}] * 2, ""),
        (
            [{"dtype": None, "device": "cpu"}, {"dtype": None, "device": "cuda"}],
            "rank 1 has device cuda, rank 0 has cpu",
        ),
    ],
    ids=["the same", "another"],
)
def test_all_take_the_same_options(options: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    """Otherwise ranks would wait for each other in different operations."""
    with launched(2, tmp_path / "logs", agree_on, options) as ranks:
        assert ranks.exit_codes() == [0, 0]
        for rank in range(2):
            assert said in ranks.said(rank)
            assert bool(said) == ("same options" in ranks.said(rank))


def test_a_refusal_is_everybodys(tmp_path: Path) -> None:
    with launched(2, tmp_path / "logs", refuse_on_the_last) as ranks:
        assert ranks.exit_codes() == [0, 0]
        for rank in range(2):
            assert "rank 1: no weights here" in ranks.said(rank)


def test_a_rank_that_fails_ends_all(tmp_path: Path) -> None:
    with launched(2, tmp_path / "logs", fail_at_a_command) as ranks:
        assert ranks.exit_codes() == [LOST, LOST]
        assert "cannot ('do', 1)" in ranks.said(1)
        assert "rank_lost" in ranks.said(0)
