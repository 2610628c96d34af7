"""The cache folder is used only if no one else can write to it, and returns only what was stored."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.doctor.places import cache
from specdec.engine import cache_folder
from specdec.engine.cpu import openmp, packed_gemm
from tests.captured_logs import captured_logs
from tests.models import make


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_entry_is_found_under_its_whole_key(folder: Path) -> None:
    cache_folder.write(b"bits", "kind", "name", 1)
    assert cache_folder.read("kind", "name", 1) == b"bits"
    assert cache_folder.read("kind", "name", 2) is None
    assert cache_folder.read("other", "name", 1) is None
    assert folder.stat().st_mode & 0o777 == 0o700


def test_other_files_in_the_folder_are_no_entries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "MAX_BYTES", 300)
    cache_folder.write(bytes(10), "kind", 0)
    (folder / "big.gguf").write_bytes(bytes(1000))
    os.utime(folder / "big.gguf", (0, 0))
    for number in range(1, 5):
        cache_folder.write(bytes(100), "kind", number)
    assert (folder / "big.gguf").exists()
    assert cache_folder.read("kind", 0) is None
    assert cache_folder.read("kind", 4) is not None
    assert cache().entries == 2


def test_other_sources_or_versions_miss(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folder.write(b"bits", "kind", 1)
    monkeypatch.setattr(cache_folder, "versions", lambda: ("another",))
    assert cache_folder.read("kind", 1) is None


@pytest.fixture
def unnamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the compilers' code folders; restore them afterwards."""
    for variable in cache_folder.COMPILERS:
        monkeypatch.setenv(variable, "")


@pytest.mark.parametrize("turned_off", [False, True])
def test_compilers_keep_their_code_where_nobody_else_can_write(
    folder: Path, unnamed: None, monkeypatch: pytest.MonkeyPatch, turned_off: bool
) -> None:
    """torch's default is a folder in the temporary directory, which any user of the machine may have created first.
    Without a cache folder the code lives as long as the process."""
    if turned_off:
        monkeypatch.setenv("SPECDEC_CACHE_DIR", "")
    cache_folder.keep_compiled_code()
    for variable, name in cache_folder.COMPILERS.items():
        found = Path(os.environ[variable])
        assert found.name == name
        assert (found.parent == folder) is not turned_off
        for each in (found, found.parent):
            assert each.stat().st_mode & 0o777 == 0o700
            assert each.stat().st_uid == os.geteuid()
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert cache_dir() == os.environ["TORCHINDUCTOR_CACHE_DIR"]


def test_a_folder_named_for_a_compiler_is_looked_at_too(
    folder: Path, unnamed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine, planted = tmp_path / "mine", tmp_path / "planted"
    mine.mkdir(mode=0o700)
    planted.mkdir()
    planted.chmod(0o777)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(mine))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(planted))
    with captured_logs() as logs:
        cache_folder.keep_compiled_code()
    assert os.environ["TRITON_CACHE_DIR"] == str(mine)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    (told,) = [entry for entry in logs if entry["event"] == "cache_not_used"]
    assert told["folder"] == str(planted)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:40] + b"x" + data[41:], lambda _: b""])
def test_a_damaged_entry_is_none(folder: Path, damage: object) -> None:
    cache_folder.write(b"some hundred bits", "kind", 1)
    (entry,) = folder.iterdir()
    entry.write_bytes(damage(entry.read_bytes()))  # type: ignore[operator]
    assert cache_folder.read("kind", 1) is None


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_to_is_not_used(folder: Path, mode: int) -> None:
    folder.mkdir()
    folder.chmod(mode)
    cache_folder.write(b"bits", "kind", 1)
    assert list(folder.iterdir()) == []


def test_a_linked_folder_is_not_used(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    cache_folder.write(b"bits", "kind", 1)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_folder_that_cannot_be_made_costs_only_time(folder: Path) -> None:
    folder.write_text("a file")
    cache_folder.write(b"bits", "kind", 1)
    assert cache_folder.read("kind", 1) is None


def test_an_empty_name_turns_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", "")
    assert cache_folder.place() is None
    cache_folder.write(b"bits", "kind", 1)
    assert cache_folder.read("kind", 1) is None


def test_the_oldest_entries_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "MAX_BYTES", 300)
    for number in range(3):
        cache_folder.write(bytes(100), "kind", number)
        for entry in folder.iterdir():
            os.utime(entry, (entry.stat().st_mtime - 100,) * 2)
    assert [cache_folder.read("kind", number) is None for number in range(3)] == [True, False, False]


def test_folders_are_no_entries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports of drafts lie next to the entries."""
    monkeypatch.setattr(cache_folder, "MAX_BYTES", 300)
    cache_folder.write(bytes(10), "kind", 0)
    (folder / "onnx-3").mkdir()
    os.utime(folder / "onnx-3", (0, 0))
    with captured_logs() as logged:
        for number in range(4):
            cache_folder.write(bytes(100), "kind", number)
    assert logged == []
    assert cache_folder.read("kind", 3) is not None


def test_a_full_disk_keeps_no_part_of_an_entry(folder: Path) -> None:
    cache_folder.write(b"bits", "kind", 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with captured_logs() as logged:
            cache_folder.write(bytes(1000), "kind", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [entry["event"] for entry in logged] == ["cache_not_written"]
    assert len(list(folder.iterdir())) == 1
    assert cache_folder.read("kind", 0) == b"bits"


START = """
import hashlib
import json
import sys
from pathlib import Path
import numpy as np
from specdec.engine.cpu.attention import EVERYTHING, Scratch, kernel
from specdec.engine.cpu.layers import compiled
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.model_directory import ModelDirectory

def attention(width, cuts):
    random = np.random.default_rng(0)
    query = random.standard_normal((4, 2, width), np.float32)
    keys, values = (random.standard_normal((2, 8, width), np.float32) for _ in range(2))
    out = np.zeros_like(query)
    kernel(width, width)(query, keys, values, np.arange(8), np.zeros(4, int), np.arange(4, 8), np.arange(5), EVERYTHING,
                         np.float32(0.5), np.float32(0), out, *Scratch.of(2, 8, width, width), np.asarray(cuts))
    assert out.any()
    return sum(kernel(width, width).outside._cache_hits.values()), out.tobytes().hex()

def layers():
    engine = CpuEngine(ModelDirectory(Path(sys.argv[1])), capacity=1024, threads=(1,), exact=False)
    packer = engine.packer()
    slots = np.arange(1, 151)
    rows = packer.add_rows([7 * i % 300 for i in range(150)], 0, slots)
    packer.add_path(slots, rows)
    for row in rows:
        packer.want(row)
    bits = engine.forward(packer.pack()).tobytes()
    return sum(compiled(16)._cache_hits.values()), hashlib.sha256(bits).hexdigest()

found = {"attention": attention(16, [0, 8]), "layers": layers(), "attention of a team": attention(16, [0, 3, 8])}
for width in map(int, sys.argv[2:]):
    found[f"attention {width} wide"] = attention(width, [0, 8])
print(json.dumps(found))
"""
"""A program that prints the number of functions loaded from the cache folder, and the bits of their results."""


def start(model: Path, folder: Path, *widths: int) -> dict[str, tuple[int, str]]:
    done = subprocess.run(
        [sys.executable, "-c", START, str(model), *map(str, widths)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"SPECDEC_CACHE_DIR": str(folder)},
    )
    return {name: (hits, bits) for name, (hits, bits) in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, tuple[int, str]], ...]:
    """Results of a start with an empty cache folder, and of the next one, which also computes heads of width 8."""
    root = tmp_path_factory.mktemp("starts")
    model = make("llama", root / "model")
    return start(model, root / "cache"), start(model, root / "cache", 8)


@pytest.mark.verify
def test_code_has_the_same_bits_compiled_here_and_kept(starts: tuple[dict[str, tuple[int, str]], ...]) -> None:
    """Compiled loops fix the order of their sums: no version of an inner loop may replace another."""
    first, second = (each["layers"] for each in starts)
    assert first[1] == second[1]
    if packed_gemm.AVAILABLE:
        assert (first[0], second[0]) == (0, 1)


@pytest.mark.verify
def test_kept_code_computes_the_same_bits_in_another_process(starts: tuple[dict[str, tuple[int, str]], ...]) -> None:
    """Addresses differ there: the code must refer to functions by name, with one thread and with a team."""
    first, second = starts
    hits, bits = first["attention"]
    assert hits == 0
    assert second["attention"] == (1, bits)
    if openmp.AVAILABLE:
        assert second["attention of a team"] == (1, bits)
    assert second["attention 8 wide"][0] == 0
