"""A process counts the cores available to it, under both versions of cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdec.engine.cpu_count import cores_given, threads_for, threads_left

ALL = len(os.sched_getaffinity(0))


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("100000 100000", 1), ("1000 100000", 1), ("max 100000", ALL), ("99900000 100000", ALL), ("nonsense", ALL)],
)
@pytest.mark.parametrize("place", ["a/b", "a", ""])
def test_version_2(tmp_path: Path, limit: str, cores: int, place: str) -> None:
    write(tmp_path / "self", "0::/a/b\n")
    write(tmp_path / "mount" / place / "cpu.max", limit + "\n")
    assert cores_given(tmp_path / "mount", tmp_path / "self") == cores


@pytest.mark.parametrize(("quota", "cores"), [("50000", 1), ("100000", 1), ("-1", ALL), ("", ALL)])
@pytest.mark.parametrize("controllers", ["cpu", "cpu,cpuacct"])
def test_version_1(tmp_path: Path, quota: str, cores: int, controllers: str) -> None:
    write(tmp_path / "self", f"5:memory:/other\n4:{controllers}:/a\n0::/\n")
    write(tmp_path / "mount" / controllers / "a" / "cpu.cfs_quota_us", quota)
    write(tmp_path / "mount" / controllers / "a" / "cpu.cfs_period_us", "100000")
    assert cores_given(tmp_path / "mount", tmp_path / "self") == cores


@pytest.mark.skipif(ALL < 2, reason="there is one core only")
def test_a_part_of_a_core_counts_as_one(tmp_path: Path) -> None:
    write(tmp_path / "self", "0::/\n")
    write(tmp_path / "mount" / "cpu.max", "150000 100000\n")
    assert cores_given(tmp_path / "mount", tmp_path / "self") == 2


@pytest.mark.parametrize(("limit", "left"), [("max", 60), ("1000", 60), ("130", 30), ("90", 0)])
@pytest.mark.parametrize(("membership", "place"), [("0::/a/b\n", ""), ("8:pids:/a/b\n", "pids")])
def test_threads_within_the_limits(tmp_path: Path, limit: str, left: int, membership: str, place: str) -> None:
    mount = tmp_path / "mount"
    assert threads_left(mount, tmp_path / "self") is None
    write(tmp_path / "self", membership)
    for folder, limits in (("a", ("160", "100")), ("a/b", (limit, "100"))):
        for name, text in zip(("pids.max", "pids.current"), limits, strict=True):
            write(mount / place / folder / name, text + "\n")
    assert threads_left(mount, tmp_path / "self") == left


def test_affinity_counts_where_there_are_no_cgroups(tmp_path: Path) -> None:
    assert cores_given(tmp_path, tmp_path / "none") == ALL


def test_threads_are_the_cores_of_a_process() -> None:
    cores = len(os.sched_getaffinity(0))
    assert 1 <= threads_for("cpu") <= cores
    assert threads_for("cuda:1") == 1
