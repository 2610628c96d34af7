"""Parsing and reloading of the models file, and error messages that name what is wrong in it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import yaml

from orchestrator.models.file import ModelsFile, ModelsFileError, RevisionEntry
from specdec.serving.watched import Watched, refused
from specdec.wire.address import Address
from tests.captured_logs import captured_logs
from tests.models import make

ONE = "{directory: /a, verifiers: ['a:1']}"


def file(tmp_path: Path, text: str) -> ModelsFile:
    (tmp_path / "models.yaml").write_text(text)
    return ModelsFile(tmp_path / "models.yaml")


def test_revisions_are_read_in_their_order(tmp_path: Path) -> None:
    found = file(
        tmp_path,
        """
models:
  big:
    revisions:
      "2026-10":
        directory: /models/a
        verifiers: ["dns:///a:50051", "b:1", "b:1"]
        drafts: ["c:2"]
        share: 95
        chat_template: /templates/a.jinja
      "2026-11": {directory: /models/b, verifiers: ["d:3"], share: 0.5}
  small:
    revisions: {only: {directory: /models/c, verifiers: ["e:4"]}}
""",
    ).entries()
    addresses = {name: Address.parse(name) for name in ("dns:///a:50051", "b:1", "c:2", "d:3", "e:4")}
    assert found == (
        RevisionEntry(
            "big",
            "2026-10",
            Path("/models/a"),
            (addresses["dns:///a:50051"], addresses["b:1"]),
            (addresses["c:2"],),
            95.0,
            Path("/templates/a.jinja"),
        ),
        RevisionEntry("big", "2026-11", Path("/models/b"), (addresses["d:3"],), (), 0.5),
        RevisionEntry("small", "only", Path("/models/c"), (addresses["e:4"],), (), 1.0),
    )
    assert [each.label for each in found] == ["big@2026-10", "big@2026-11", "small@only"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must be `models:` with at least one model by name"),
        ("models: {}", "must be `models:` with at least one model by name"),
        ("models: [big]", "must be `models:` with at least one model by name"),
        (f"models: {{big: {{revisions: {{a: {ONE}}}}}}}\nlimits: 3", "must be `models:`"),
        (
            f"models: {{3: {{revisions: {{a: {ONE}}}}}}}",
            "models.'3': must be a name of 1 to 256 printable",
        ),
        (
            f"models: {{b@c: {{revisions: {{a: {ONE}}}}}}}",
            "models.'b@c': must be a name of 1 to 256 printable characters without @",
        ),
        ("models: {big: 3}", "models.'big': must have only `revisions:`"),
        ("models: {big: {revisions: {}}}", "models.'big': must have only `revisions:`"),
        (f"models: {{big: {{revisions: {{1.0: {ONE}}}}}}}", "revisions.'1.0': must be a name, in quotes"),
        (f"models: {{big: {{revisions: {{'a b': {ONE}}}}}}}", "revisions.'a b': must be a name, in quotes"),
        (
            "models: {big: {revisions: {a: 3}}}",
            "revisions.a: must be a mapping with directory, verifiers, drafts, share",
        ),
        ("models: {big: {revisions: {a: {dir: /a}}}}", "revisions.a: 'dir' must be one of directory, verifiers"),
        ("models: {big: {revisions: {a: {verifiers: ['a:1']}}}}", "a: directory: must be the path"),
        ("models: {big: {revisions: {a: {directory: /a}}}}", "a: verifiers: must be a list of addresses"),
        (
            "models: {big: {revisions: {a: {directory: /a, verifiers: []}}}}",
            "verifiers: must be a list of at least one",
        ),
        (
            "models: {big: {revisions: {a: {directory: /a, verifiers: 'a:1'}}}}",
            "verifiers: must be a list of addresses",
        ),
        ("models: {big: {revisions: {a: {directory: /a, verifiers: [a]}}}}", "verifiers[0]: 'a': the port is missing"),
        ("models: {big: {revisions: {a: {directory: /a, verifiers: [1]}}}}", "verifiers[0]: must be an address"),
        (
            "models: {big: {revisions: {a: {directory: /a, verifiers: ['a:1'], drafts: [http://b:1]}}}}",
            "drafts[0]: 'http://b:1': the scheme http: is not supported",
        ),
        (
            "models: {big: {revisions: {a: {directory: /a, verifiers: ['a:1'], chat_template: 5}}}}",
            "chat_template: must be the path of a Jinja file",
        ),
        (
            "models: {big: {revisions: {a: {directory: /a, verifiers: ['a:1'], share: -1}}}}",
            "share: is -1, must be a number from 0 to 1e+06",
        ),
        (
            "models: {big: {revisions: {a: {directory: /a, verifiers: ['a:1'], share: 0}}}}",
            "revisions: all have a share of 0, at least one must have more",
        ),
        (f"models: {{big: {{revisions: {{a: {ONE}, b: {ONE}}}}}}}", "revisions.a: share: is missing"),
        (f"models: {{big: {{revisions: {{a: {ONE}, a: {ONE}}}}}}}", "a is given twice"),
        (f"models: {{big: {{revisions: {{2026-02-30: {ONE}}}}}}}", "day is out of range"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ModelsFileError) as refused:
        file(tmp_path, text).entries()
    assert str(refused.value).startswith(f"--models {tmp_path}/models.yaml: ")
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def written(tmp_path: Path, **directories: Path) -> None:
    """Write a file with a revision for each directory, atomically, as Kubernetes does."""
    revisions = {
        name: {"directory": str(directory), "verifiers": ["a:1"], "share": 1} for name, directory in directories.items()
    }
    (tmp_path / "new").write_text(yaml.safe_dump({"models": {"big": {"revisions": revisions}}}, sort_keys=False))
    os.replace(tmp_path / "new", tmp_path / "models.yaml")


def test_a_directory_is_read_once(tmp_path: Path) -> None:
    target = make("llama", tmp_path / "target")
    written(tmp_path, a=target)
    watched = Watched(ModelsFile(tmp_path / "models.yaml"))
    (before,) = watched.contents
    assert (before.model.name, before.entry.revision) == ("big", "a")
    assert not watched.changed()
    written(tmp_path, b=target, a=target)
    assert watched.changed()
    assert [each.entry.revision for each in watched.contents] == ["b", "a"]
    assert watched.contents[1].model is before.model


def test_a_named_template_is_read_again_when_it_changes(tmp_path: Path) -> None:
    target = make("llama", tmp_path / "target")
    folder = target / "additional_chat_templates"
    folder.mkdir()
    for name in ("default", "tool_use"):
        (folder / f"{name}.jinja").write_text("before")
    written(tmp_path, a=target)
    watched = Watched(ModelsFile(tmp_path / "models.yaml"))
    (folder / "tool_use.jinja").write_text("afterwards")
    assert watched.changed()


def test_a_directory_may_come_after_the_file_that_names_it(tmp_path: Path) -> None:
    target = make("llama", tmp_path / "target")
    written(tmp_path, a=target)
    watched = Watched(ModelsFile(tmp_path / "models.yaml"))
    written(tmp_path, a=target, b=tmp_path / "late")
    assert not watched.changed()
    assert [each.entry.revision for each in watched.contents] == ["a"]  # the previous contents stay active
    (tmp_path / "late").symlink_to(target)
    assert watched.changed()
    assert [each.entry.revision for each in watched.contents] == ["a", "b"]


def test_a_directory_may_come_file_by_file(tmp_path: Path) -> None:
    target = make("llama", tmp_path / "target")
    written(tmp_path, a=target)
    watched = Watched(ModelsFile(tmp_path / "models.yaml"))
    written(tmp_path, a=target, b=tmp_path / "late")
    (tmp_path / "late").mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        watched.changed()
        shutil.copy(target / name, tmp_path / "late" / name)
    assert watched.changed()
    before = watched.contents[1].model
    (tmp_path / "late" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert watched.changed()
    assert watched.contents[1].model.text_fingerprint != before.text_fingerprint


def test_a_chat_template_of_ones_own_is_read_again_when_it_changes(tmp_path: Path) -> None:
    target, template = make("llama", tmp_path / "target"), tmp_path / "mine.jinja"
    revision = {"directory": str(target), "verifiers": ["a:1"], "chat_template": str(template)}
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": {"big": {"revisions": {"a": revision}}}}))
    with pytest.raises(ModelsFileError, match=r"big@a: directory: .*mine.jinja: no such file"):
        ModelsFile(tmp_path / "models.yaml").read()
    template.write_text("one: {{ messages[0].content }}")
    watched = Watched(ModelsFile(tmp_path / "models.yaml"))
    templates = watched.contents[0].model.tokenizer.chat_templates
    assert templates is not None
    assert templates.sources == {"default": "one: {{ messages[0].content }}"}
    template.write_text("another: {{ messages[0].content }}")
    assert watched.changed()
    templates = watched.contents[0].model.tokenizer.chat_templates
    assert templates is not None
    assert templates.sources == {"default": "another: {{ messages[0].content }}"}


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    written(tmp_path, a=tmp_path / "nothing")
    with pytest.raises(ModelsFileError, match=r"models.yaml: big@a: directory: .*nothing"):
        ModelsFile(tmp_path / "models.yaml").read()


def test_at_first_a_directory_that_cannot_be_used_is_left_out(tmp_path: Path) -> None:
    """On start-up it is skipped; on reload the previous contents stay active."""
    target = make("llama", tmp_path / "target")
    written(tmp_path, a=target, b=tmp_path / "late")
    with captured_logs() as logs:
        watched = Watched(ModelsFile(tmp_path / "models.yaml"))
    assert [each["event"] for each in logs] == ["revision_left_out"]
    assert [each.entry.revision for each in watched.contents] == ["a"]
    assert watched.refused
    assert refused()["models"] >= 1
    assert not watched.changed()
    (tmp_path / "late").symlink_to(target)
    assert watched.changed()
    assert [each.entry.revision for each in watched.contents] == ["a", "b"]
    assert not watched.refused
    written(tmp_path, a=target, b=target, c=tmp_path / "later")
    assert not watched.changed()
    assert watched.refused
    assert len(watched.contents) == 2


def test_what_was_read_of_a_refused_file_is_not_read_again(tmp_path: Path) -> None:
    target, other = (make("llama", tmp_path / name) for name in ("target", "other"))
    written(tmp_path, a=target)
    file = ModelsFile(tmp_path / "models.yaml")
    file.read()
    written(tmp_path, a=target, b=other, c=tmp_path / "late")
    kept = []
    for _ in range(2):
        with pytest.raises(ModelsFileError, match="late"):
            file.read()
        kept.append([model for (_, directory, *_), model in file._loaded.items() if directory == other])
    assert kept[0] == kept[1] != []
