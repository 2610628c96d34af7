"""Ranks meet where no one else can connect, or is ignored."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from specdec.engine.distributed.meeting import SECRET, Met, meet
from specdec.engine.distributed.rank_store import RankStore, Values
from specdec.engine.distributed.ranks import Ranks
from specdec.engine.engine import UnsupportedModelError
from tests.faults.pods import free_address
from tests.ranks import launched

PATIENCE = timedelta(seconds=60)
KNOWN = "a secret of many bytes"


@pytest.fixture
def several_machines(monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """Set the environment of ranks on several machines; return rank 0's address."""
    host, port = free_address().split(":")
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(int(port) - 1))
    monkeypatch.setenv(SECRET, KNOWN)
    return host, int(port)


@contextmanager
def meeting(degree: int, *, one_machine: bool) -> Iterator[list[Any]]:
    """Run the ranks' meeting in threads; yield their futures."""
    with ThreadPoolExecutor(degree) as threads:
        yield [threads.submit(meet, rank, degree, one_machine=one_machine, patience=PATIENCE) for rank in range(degree)]


def met(futures: list[Any]) -> list[Met]:
    return [future.result(60) for future in futures]


@pytest.mark.parametrize("one_machine", [True, False])
def test_ranks_meet_and_share_a_store(several_machines: tuple[str, int], one_machine: bool) -> None:
    with meeting(3, one_machine=one_machine) as ranks:
        first, *others = met(ranks)
    assert sorted(first.connections.values()) == [1, 2]
    assert [list(other.connections.values()) for other in others] == [[0], [0]]
    others[0].store.set("a", "1")
    assert first.store.get("a") == others[1].store.get("a") == b"1"
    assert [each.store.add("n", 2) for each in (first, *others)] == [2, 4, 6]
    for other in others:
        (connection,) = other.connections
        connection.send_bytes(b"here")
    assert {connection.recv_bytes() for connection in first.connections} == {b"here"}


def test_a_store_waits_and_compares() -> None:
    store = RankStore(Values(), timedelta(seconds=60))
    threading.Timer(0.05, store.set, ("late", "x")).start()
    assert store.get("late") == b"x"
    with pytest.raises(dist.DistStoreError, match="no rank has set never"):
        store.wait(["never"], timedelta(0))
    assert store.compare_set("c", "", "1") == b"1"
    assert store.compare_set("c", "2", "3") == b"1"
    assert store.compare_set("c", "1", "3") == b"3"
    assert store.compare_set("none", "2", "3") == b"2"
    assert (store.num_keys(), store.delete_key("c"), store.delete_key("c"), store.check(["c"])) == (
        2,
        True,
        False,
        False,
    )


class Executed:
    """Creates a file when unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._file),)


def test_strangers_are_turned_away(several_machines: tuple[str, int], tmp_path: Path) -> None:
    """Silent ones, and those that send pickles, before, during and instead of a rank's connection."""
    planted = pickle.dumps((Executed(tmp_path / "executed"), 1))
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(meet, 0, 3, one_machine=False, patience=PATIENCE)
        silent = [socket.create_connection(reached(several_machines)) for _ in range(20)]
        for said in (b"", planted, b"GET / HTTP/1.1\r\n\r\n", len(planted).to_bytes(4, "big") + planted):
            with socket.create_connection(several_machines) as stranger:
                stranger.recv(36)
                stranger.sendall(said)
        later = [threads.submit(meet, rank, 3, one_machine=False, patience=PATIENCE) for rank in (1, 2)]
        assert len(met([first, *later])) == 3
    for stranger in silent:
        stranger.close()
    assert not (tmp_path / "executed").exists()


def reached(address: tuple[str, int]) -> tuple[str, int]:
    """Return the address, once something listens there."""
    for _ in range(1200):
        try:
            socket.create_connection(address).close()
        except ConnectionRefusedError:
            threading.Event().wait(0.05)
        else:
            return address
    raise AssertionError("nothing listens")


def test_it_listens_at_the_given_address_alone(several_machines: tuple[str, int]) -> None:
    host, port = several_machines
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(meet, 0, 2, one_machine=False, patience=PATIENCE)
        reached(several_machines)
        assert host == "127.0.0.1"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
        met([first, threads.submit(meet, 1, 2, one_machine=False, patience=PATIENCE)])


def test_another_secret_is_told(several_machines: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(meet, 0, 2, one_machine=False, patience=PATIENCE)
        reached(several_machines)
        monkeypatch.setenv(SECRET, "another one of many bytes")
        with pytest.raises(UnsupportedModelError, match=f"has another {SECRET}: all ranks must have the same"):
            meet(1, 2, one_machine=False, patience=PATIENCE)
        monkeypatch.setenv(SECRET, KNOWN)
        met([first, threads.submit(meet, 1, 2, one_machine=False, patience=PATIENCE)])


@pytest.mark.parametrize("secret", ["", "short"])
def test_several_machines_need_a_secret(
    several_machines: tuple[str, int], monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv(SECRET, secret)
    with pytest.raises(
        UnsupportedModelError, match=f"{SECRET} has {len(secret)} bytes: .* must share a secret of at least 16"
    ):
        meet(0, 2, one_machine=False, patience=PATIENCE)


def test_a_folder_that_others_can_enter_is_no_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Another user may have created it first."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    planted = tmp_path / f"specdec-ranks-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)
    with pytest.raises(
        UnsupportedModelError, match="where the ranks of this machine meet, cannot be used: other users"
    ):
        meet(0, 2, one_machine=True, patience=PATIENCE)
    planted.rmdir()
    planted.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    with pytest.raises(UnsupportedModelError, match="cannot be used"):
        meet(0, 2, one_machine=True, patience=PATIENCE)


def tell_where_it_listens() -> None:
    with Ranks.joined("cpu") as ranks:
        print("listens", *sorted(listening()), flush=True)
        ranks.all(None)
        if ranks.rank:
            ranks.await_end()


def listening() -> set[str]:
    """Return the hosts on which this process listens, in the kernel's hex."""
    mine = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(entry))
        except FileNotFoundError:  # of the directory listing itself
            continue
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in mine}


def test_ranks_of_one_machine_listen_on_loopback_alone(tmp_path: Path) -> None:
    with launched(2, tmp_path / "logs", tell_where_it_listens) as ranks:
        for rank in range(2):
            line = ranks.until_said(rank, "listens", running=False)
            assert set(line.split()[1:]) <= {"0100007F"}, line
        assert ranks.exit_codes() == [0, 0]
