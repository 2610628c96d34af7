"""The file of models: their revisions, with the pods and the share of requests of each.

models:
  llama-70b:
    revisions:
      "2026-10":
        directory: /models/llama-70b-2026-10
        verifiers: ["dns:///verifier-a:50051"]
        drafts: ["dns:///draft:50052"]
        share: 95
      "2026-11":
        directory: /models/llama-70b-2026-11
        verifiers: ["dns:///verifier-b:50051"]
        drafts: ["dns:///draft:50052"]
        share: 5
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar

import structlog

from orchestrator.requests.model import ServedModel
from specdec import strict_yaml
from specdec.engine.gguf_file import open_model
from specdec.engine.model_file import ModelDirectoryError
from specdec.serving.echo import echo
from specdec.text.chat_template import TEMPLATES_FOLDER
from specdec.wire.address import Address
from specdec.wire.file_version import Version, version_of

log = structlog.get_logger()

MAX_NAME_CHARACTERS = 256
"""Longest name of a model, in characters."""

REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Valid names of revisions."""

SEPARATOR = "@"
"""Separates the names of model and revision in requests for one revision."""

MAX_SHARE = 1e6
"""Largest share. Shares are relative, so any scale will do."""


READ = (".json", ".jinja")
"""Suffixes of the files that an orchestrator reads from a model directory."""


_Key = tuple[str, Path, Path | None, Version]
"""A model's name, directory and chat template, and the version of the files that are read."""


class ModelsFileError(Exception):
    """A file of models cannot be used. The message is one line: the file, the entry and the problem."""


@dataclass(frozen=True)
class RevisionEntry:
    """The entry of one revision in the file."""

    model: str
    revision: str  # its name; empty: the model's only revision
    directory: Path  # of the target model: tokenizer and configuration are read, weights are not needed
    verifiers: tuple[Address, ...]
    drafts: tuple[Address, ...] = ()
    share: float = 1.0  # of the model's requests, relative to its other revisions
    chat_template: Path | None = None  # a file that replaces the model's own templates

    @property
    def label(self) -> str:
        """The revision's name in logs and errors; a request for a model of this name gets this revision."""
        return f"{self.model}{SEPARATOR}{self.revision}" if self.revision else self.model


KEYS = tuple(attribute.name for attribute in fields(RevisionEntry) if attribute.name not in ("model", "revision"))


@dataclass(frozen=True)
class LoadedRevision:
    """The entry of a revision, and the model read from its directory."""

    entry: RevisionEntry
    model: ServedModel


@dataclass
class ModelsFile:
    """A file of models. A directory is read when the file first names it, and again when its files change: the files
    may be written after the entry.

    At start-up, an unreadable directory is skipped if any other can be read. On reload, it makes the whole file
    unusable, and the previous file stays active.
    """

    path: Path
    missing: tuple[RevisionEntry, ...] = ()
    """Revisions skipped when the file was first read."""
    left_out: str = ""
    """Why they were skipped; empty if none was."""
    what: ClassVar[str] = "models"
    unusable: ClassVar[type[Exception]] = ModelsFileError
    _loaded: dict[_Key, ServedModel] = field(default_factory=dict)

    @property
    def all(self) -> tuple[Path]:
        return (self.path,)

    def version(self) -> Version:
        """Return the current version of the file and its directories; OSError if there is no file."""
        try:
            named = {(entry.directory, entry.chat_template) for entry in self.entries()}
        except ModelsFileError:
            named = set()
        return sum((_text_version(*files) for files in sorted(named, key=str)), version_of(self.path))

    def read(self) -> tuple[LoadedRevision, ...]:
        """Read the file and its new or changed directories; ModelsFileError if the file or a directory cannot be used
        (on the first call: if no directory can be used)."""
        entries, first = self.entries(), not self._loaded
        loaded: list[LoadedRevision] = []
        used: dict[_Key, ServedModel] = {}
        problems: dict[RevisionEntry, ModelsFileError] = {}
        for entry in entries:
            files = entry.directory, entry.chat_template
            key = entry.model, *files, _text_version(*files)
            try:
                model = self._loaded.get(key)
                if model is None:
                    directory = open_model(entry.directory)
                    model = ServedModel.of(directory, entry.model, chat_template=entry.chat_template)
            except ModelDirectoryError as error:
                problem = ModelsFileError(f"--models {self.path}: {entry.label}: directory: {error}")
                if not first:
                    self._loaded |= used  # so that the next check of the file does not load these models again
                    raise problem from None
                problems[entry] = problem
                continue
            used[key] = model
            loaded.append(LoadedRevision(entry, model))
        if problems and not loaded:
            raise next(iter(problems.values()))
        for problem in problems.values():
            log.error("revision_left_out", why=str(problem))
        self._loaded = used
        self.missing, self.left_out = tuple(problems), "; ".join(map(str, problems.values()))
        return tuple(loaded)

    def entries(self) -> tuple[RevisionEntry, ...]:
        """Read the file without its directories; ModelsFileError if it cannot be used."""
        try:
            content = strict_yaml.load(self.path)
        except strict_yaml.YamlFileError as error:
            raise ModelsFileError(f"--models {self.path}: {error}") from None
        models = content.get("models") if isinstance(content, dict) and len(content) == 1 else None
        if not isinstance(models, dict) or not models:
            raise ModelsFileError(f"--models {self.path}: must be `models:` with at least one model by name")
        found: list[RevisionEntry] = []
        for name, entry in models.items():
            try:
                found += _revisions(name, entry)
            except ValueError as error:
                raise ModelsFileError(f"--models {self.path}: models.{echo(str(name))}: {error}") from None
        return tuple(found)


def _text_version(directory: Path, chat_template: Path | None) -> Version:
    """Return the version of the files an orchestrator reads from a model directory, or of a GGUF file, and of a chat
    template; empty if one is unreadable."""
    template = () if chat_template is None else (chat_template,)
    try:
        if directory.is_file():
            return version_of(directory, *template)
        files = (*directory.iterdir(), *(directory / TEMPLATES_FOLDER).glob("*"))
        return version_of(*sorted(file for file in files if file.suffix in READ), *template)
    except OSError:
        return ()


def check_name(name: Any) -> str:
    """Return a valid model name; ValueError if it is invalid."""
    if not (
        isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable() and SEPARATOR not in name
    ):
        raise ValueError(f"must be a name of 1 to {MAX_NAME_CHARACTERS} printable characters without {SEPARATOR}")
    return name


def _revisions(name: Any, entry: Any) -> Iterator[RevisionEntry]:
    """Yield the revisions of a model; ValueError names the problem."""
    name = check_name(name)
    revisions = entry.get("revisions") if isinstance(entry, dict) and len(entry) == 1 else None
    if not isinstance(revisions, dict) or not revisions:
        raise ValueError("must have only `revisions:`, with at least one revision by name")
    found: list[RevisionEntry] = []
    for revision, values in revisions.items():
        if not isinstance(revision, str) or not REVISION.fullmatch(revision):
            raise ValueError(
                f"revisions.{echo(str(revision))}: must be a name, in quotes: 1 to 64 letters, digits, . _ and -"
            )
        try:
            found.append(_revision(name, revision, values, alone=len(revisions) == 1))
        except ValueError as error:
            raise ValueError(f"revisions.{revision}: {error}") from None
    if not any(revision.share for revision in found):
        raise ValueError("revisions: all have a share of 0, at least one must have more")
    yield from found


def _revision(name: str, revision: str, values: Any, *, alone: bool) -> RevisionEntry:
    """Parse a revision, which may omit its share only if it is `alone`."""
    if not isinstance(values, dict):
        raise ValueError(f"must be a mapping with {', '.join(KEYS)}")
    for key in values:
        if key not in KEYS:
            raise ValueError(f"{echo(str(key))} must be one of {', '.join(KEYS)}")
    directory = values.get("directory")
    if not isinstance(directory, str) or not directory:
        raise ValueError("directory: must be the path of the target model")
    if not alone and "share" not in values:
        raise ValueError("share: is missing, must be given where a model has several revisions")
    share = values.get("share", 1.0)
    if type(share) not in (int, float) or not 0 <= share <= MAX_SHARE:
        raise ValueError(f"share: is {share!r}, must be a number from 0 to {MAX_SHARE:g}")
    template = values.get("chat_template")
    if template is not None and (not isinstance(template, str) or not template):
        raise ValueError("chat_template: must be the path of a Jinja file")
    verifiers = _addresses("verifiers", values.get("verifiers"))
    if not verifiers:
        raise ValueError("verifiers: must be a list of at least one address")
    return RevisionEntry(
        name,
        revision,
        Path(directory),
        verifiers,
        _addresses("drafts", values.get("drafts", [])),
        float(share),
        None if template is None else Path(template),
    )


def _addresses(key: str, values: Any) -> tuple[Address, ...]:
    """Parse a list of addresses, without duplicates."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ValueError(f"{key}: must be a list of addresses")
    found: list[Address] = []
    for index, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueError(f"{key}[{index}]: must be an address")
        try:
            found.append(Address.parse(value.strip()))
        except ValueError as error:
            raise ValueError(f"{key}[{index}]: {error}") from None
    return tuple(dict.fromkeys(found))
