"""Memory sizes are positive and fit the machine."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.engine.memory import (
    SHARE,
    TEXT_TOKENS,
    TEXTS,
    free_bytes,
    slots_for,
    slots_wanted,
    slots_within,
)
from specdec.engine.unsupported import UnsupportedModelError


def machine() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def kernel() -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", platform.release())[:2])


def test_there_is_memory_and_no_more_than_the_machine_has() -> None:
    assert 1 << 20 < free_bytes("cpu") <= machine()


def test_slots_take_their_share() -> None:
    slot = machine() // 100_000
    assert 512 <= slots_for(slot, 1 << 20, "cpu") <= 100_000 * SHARE
    with pytest.raises(UnsupportedModelError, match="--kv-tokens"):
        slots_for(machine() // 100, 1 << 20, "cpu")
    assert slots_for(1, 1000, "cpu") == TEXTS * 1000  # more is of little use
    assert slots_for(1, 1 << 15, "cpu") == TEXTS * TEXT_TOKENS
    assert 1 << 20 < slots_for(1, 1 << 20, "cpu") < (1 << 20) + 1000  # one text of full length
    assert slots_wanted(1 << 15, "cuda:0") == TEXTS << 15


def test_each_block_leaves_room_for_a_row_of_logits() -> None:
    slot, row = 1000, 64 * 9000
    assert slots_within(10**9, slot, 1 << 20, working=0, row_bytes=0) == 10**9 // 2 // slot
    assert slots_within(10**9, slot, 1 << 20, working=10**9 // 2, row_bytes=row) == 10**9 // 2 // (slot + 9000)
    assert slots_within(10**9, slot, 1 << 20, working=2 * 10**9, row_bytes=row) == 0


def test_what_is_promised_to_another_model_is_not_given_again() -> None:
    slot = machine() // 100_000
    first = slots_for(slot, 1 << 20, "cpu")
    second = slots_for(slot, 1 << 20, "cpu", promised=first * slot)
    assert (first + second) * slot < free_bytes("cpu")
    with pytest.raises(UnsupportedModelError, match="--kv-tokens"):
        slots_for(slot, 1 << 20, "cpu", promised=2 * machine())


FAULTS_OF_A_SECOND_USE = """
import resource
from specdec.engine.memory import keep_freed_memory
if {kept}:
    keep_freed_memory()
def use():
    return [b"x" * 50_000_000 for _ in range(3)]
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_freed_memory_is_kept() -> None:
    """A second allocation of the same size causes no page faults; without the setting, it does."""

    def faults(kept: bool) -> int:
        code = FAULTS_OF_A_SECOND_USE.format(kept=kept)
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)

    assert faults(kept=True) < 0.1 * faults(kept=False)


FAULTS_OF_FIRST_WRITES = """
import resource
import numpy as np
from specdec.engine.memory import touch
numbers = np.zeros(50_000_001, np.uint8)
numbers[12_345_678] = 7
if {touched}:
    touch(numbers.ctypes.data, numbers.nbytes)
assert numbers[12_345_678] == 7
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
numbers[::4096] = 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux" or kernel() < (5, 14), reason="Linux 5.14 is the first that can")
def test_touched_memory_is_there_at_the_first_write() -> None:
    """Its content is kept; without the touch, the first write faults on every page."""

    def faults(touched: bool) -> int:
        code = FAULTS_OF_FIRST_WRITES.format(touched=touched)
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)

    assert faults(touched=True) < 0.1 * faults(touched=False)


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")

HEAPS_OF_A_SECOND_THREAD = """
import threading
from specdec.engine.memory import set_memory_policy
if {shared}:
    set_memory_policy()
kept = []
def use():
    kept.extend(b"x" * 100_000 for _ in range(20))
thread = threading.Thread(target=use)
thread.start()
thread.join()
heap = next(line.split()[0].split("-") for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]"))
print(sum(int(heap[0], 16) <= id(each) < int(heap[1], 16) for each in kept))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators are left alone")
def test_threads_take_memory_from_where_the_main_one_does() -> None:
    """They take it from the process's heap; without the setting, they take none from there."""

    def on_the_heap(shared: bool) -> int:
        code = HEAPS_OF_A_SECOND_THREAD.format(shared=shared)
        return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout)

    assert on_the_heap(shared=True) == 20
    assert on_the_heap(shared=False) == 0


HUGE_PAGES = """
from specdec.engine.memory import set_memory_policy
set_memory_policy()
import torch
numbers = torch.ones(16 << 20)
print(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("AnonHugePages")))
"""


@pytest.mark.skipif(
    not THP.exists() or "[madvise]" not in THP.read_text(), reason="the system gives huge pages always or never"
)
def test_tensors_lie_in_huge_pages() -> None:
    """64 MiB of numbers; without the policy, none would."""
    run = subprocess.run([sys.executable, "-c", HUGE_PAGES], capture_output=True, check=True, text=True)
    assert int(run.stdout) >= 32 << 10  # kB: the system may be short of huge pages
