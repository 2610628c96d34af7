"""Ports in use, unusable cache folders, and a GPU unsupported by torch."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from specdec.doctor.machine import Machine
from specdec.doctor.places import LISTENING, cache, taken_ports


def test_a_port_that_is_taken_is_told_by_its_role() -> None:
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # another program uses the port, which does as well
            other.bind(("127.0.0.1", LISTENING["verifier"]))
            other.listen()
        found = taken_ports()
    assert set(found) == {"orchestrator", "verifier", "draft"}
    listens = f"another program listens on 127.0.0.1:{LISTENING['verifier']}"
    assert found["verifier"].startswith(f"{listens}: ")
    assert found["verifier"].endswith(", by specdec up --verifier-port PORT")


def test_a_cache_folder_is_made_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(folder))
    assert cache() == (folder, "", 0, 0)
    (folder / f"kind-{0:040}").write_bytes(b"12345")
    assert cache() == (folder, "", 1, 5)


def test_a_cache_folder_that_is_not_used_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for value, why in ((str(shared), "other users can write to it"), ("", "it is turned off")):
        monkeypatch.setenv("SPECDEC_CACHE_DIR", value)
        assert cache().unusable.startswith(why)


def test_this_machine_is_described() -> None:
    found = Machine.here()
    assert 1 <= found.cores_given <= found.cores
    assert found.memory_free is not None
    assert found.memory is not None
    assert 0 < found.memory_free <= found.memory
    assert found.torch


@pytest.mark.parametrize(
    ("torch", "cuda", "advised"),
    [("CPUs", 1, True), ("CPUs", 0, False), ("CPUs", "no driver", False), ("CUDA 13.0", 1, False), ("", 1, False)],
)
def test_a_gpu_that_torch_cannot_use_is_told(torch: str, cuda: int | str, advised: bool) -> None:
    assert bool(Machine.here()._replace(torch=torch, cuda=cuda).advice) is advised
