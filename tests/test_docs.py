"""Documents: links have targets (files, folders or headings), every plot is shown, names of code exist, and the code
map has every package."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[[^][]*\]\(([^()\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def tracked(pattern: str) -> list[Path]:
    found = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in found.stdout.split()]


def links(page: Path) -> list[str]:
    """Return the links into the repository."""
    found = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    return [link for link in found if not re.match(r"\w+:", link)]


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: list[str] = []
    for heading in HEADING.findall(text):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        seen = sum(re.fullmatch(rf"{re.escape(slug)}(-\d+)?", each) is not None for each in found)
        found.append(f"{slug}-{seen}" if seen else slug)
    return set(found)


def broken(page: Path) -> list[str]:
    """Return a page's broken links."""
    found = []
    for link in links(page):
        name, _, anchor = link.partition("#")
        to = page.parent / name if name else page
        if not to.exists() or (anchor and (to.suffix != ".md" or anchor not in anchors(to))):
            found.append(f"{page.name}: {link}")
    return found


def test_links_lead_somewhere() -> None:
    pages = tracked("*.md")
    assert sum(len(links(page)) for page in pages) > 250
    wrong = [each for page in pages for each in broken(page)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[a](other.md)", []),
        ("[a](other.md#two-words-yes)", []),
        ("[`a`](missing.md)", ["page.md: missing.md"]),
        ("![a](missing.png)", ["page.md: missing.png"]),
        ("[a](other.md#none)", ["page.md: other.md#none"]),
        ("[a](#here)\n\n# Here", []),
        ("`[a](missing.md)` and [a](https://example.org/missing.md)", []),
    ],
)
def test_a_broken_link_would_be_found(tmp_path: Path, text: str, wrong: list[str]) -> None:
    (tmp_path / "other.md").write_text("# Two words: *yes*!\n")
    (tmp_path / "page.md").write_text(text)
    assert broken(tmp_path / "page.md") == wrong


def test_every_plot_is_shown() -> None:
    pages = tracked("docs/*.md")
    shown = {(page.parent / link).resolve() for page in pages for link in links(page)}
    assert set(tracked("docs/plots/*")) <= shown


FOLDERS = "specdec", "draft_service", "verifier_service", "orchestrator", "bench", "proto", "testing", "demo", "tests"
SOURCES = "\n".join(
    path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".proto")
)
WORDS = frozenset(re.findall(r"\w+", SOURCES))
FOREIGN = frozenset({"OMP_NUM_THREADS", "TORCH_INDEX", "VLLM_BATCH_INVARIANT", "XDG_CACHE_HOME"})
FOREIGN |= {"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES"}
"""Names of other programs, and of the Makefile."""


PRESENT = [page for page in tracked("*.md") if "decisions" not in page.parts and page.name != "CHANGELOG.md"]
"""Pages about the present state, without history."""


@pytest.mark.parametrize("page", PRESENT, ids=lambda page: page.name)
def test_names_of_code_exist(page: Path) -> None:
    """Constants, and classes with their attributes: renames must update the pages."""
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"`([A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)`", text)) - FOREIGN
    for owner, attribute in re.findall(r"`([A-Z][a-z]\w+)\.(\w+)", text):
        named |= {owner, attribute}
    assert named <= WORDS, sorted(named - WORDS)


MAPPED = ("specdec", "verifier_service", "draft_service", "orchestrator", "evaluation")
"""Folders whose packages are all in the code map."""


def mapped() -> dict[str, list[str]]:
    """Return the folders in the tables of the code map, with the files to open first."""
    page = (ROOT / "docs/code-map.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w/]+)/` \|.*\|([^|]*)\|$", page, re.MULTILINE)
    assert len({folder for folder, _ in rows}) == len(rows), "a folder has two rows"
    return {folder: re.findall(r"`([^`]+)`", files) for folder, files in rows}


def test_the_code_map_has_every_package() -> None:
    packages = {str(path.parent.relative_to(ROOT)) for name in MAPPED for path in tracked(f"{name}/*__init__.py")}
    assert len(packages) > 40
    assert sorted(packages - mapped().keys()) == []


def test_files_in_the_code_map_exist() -> None:
    for folder, files in mapped().items():
        assert (ROOT / folder).is_dir(), folder
        assert len(files) <= 2, f"{folder}: one or two files to open first"
        assert [name for name in files if not (ROOT / folder / name).is_file()] == [], folder
