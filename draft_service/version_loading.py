"""Loads a new version of a draft's model beside the serving one.

A version is checked as at start-up, and compared with the model that the service began with: everything that a session
relies on must be the same. Then the version is loaded and measured; for ONNX Runtime it is exported first, in a process
of lower priority.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import structlog

from draft_service.language_model import LanguageModelDrafter
from draft_service.pass_times import WIDTHS, PassTimes, measured_width
from draft_service.translation import Translation
from draft_service.version_folder import FoundVersion
from specdec.decoding.draft_logits import DraftLogits, Shortlists
from specdec.decoding.processing import MAX_ABS_LOGIT, Logits
from specdec.engine.batch import PackedBatch
from specdec.engine.derived_models import user_cache
from specdec.engine.engine import DraftPass, Engine, draft_pass_of
from specdec.engine.engines.loading import load_engine
from specdec.engine.learned_from import LearnedFrom
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import in_one_line
from specdec.engine.placement import Placement
from specdec.engine.preflight.check import Wanted, check
from specdec.engine.preflight.device import is_exported
from specdec.engine.preflight.dtype import dtype_of
from specdec.engine.preflight.finite_weights import check_finite

log = structlog.get_logger()

NICENESS = 10
"""Niceness of the process that exports a version: it yields the cores to a service on the same machine."""

PROBED_TOKENS = 32
"""Tokens of the text whose logits must be finite before a version serves."""

BESIDE = 2.0
"""Factor on the slowdown limit at loading: a version is measured while the serving version runs passes on the same
cores. On trial, the two take turns, so the limit applies without this factor."""

NODES = WIDTHS[0]
"""Nodes of the passes whose times are compared."""


class VersionRefusedError(Exception):
    """Raised, with a one-line reason, for a version that cannot serve here."""


@dataclass
class LoadedVersion:
    """A version's model in memory."""

    drafter: LanguageModelDrafter
    fingerprint: str  # of config and weights
    times: PassTimes | None = None
    widest: int = 0  # nodes of the largest pass that `times` describes
    watched: CheckedPass | None = None  # its forward pass; None for the model loaded at start-up
    export: Path | None = None  # directory of an export made for it
    learned_from: LearnedFrom | None = None  # tenants whose texts it has learned from; None: no tenants


class CheckedPass:
    """The forward pass of a version. While `checks` is set, logits that are not finite raise FloatingPointError;
    otherwise they just yield no candidates."""

    def __init__(self, forward: DraftPass) -> None:
        self.checks = True
        self.rows = 0
        """Rows of the latest pass."""
        self._forward = forward

    def __call__(self, batch: PackedBatch) -> DraftLogits:
        self.rows = len(batch.tokens)
        logits = self._forward(batch)
        return _Checked(logits) if self.checks else logits


class _Checked:
    """Draft logits that raise FloatingPointError where they are not finite."""

    def __init__(self, logits: DraftLogits) -> None:
        self._logits = logits

    def shortlists(self, rows: Sequence[int]) -> Shortlists:
        found = self._logits.shortlists(rows)
        _check_peaks(found.values[:, 0])
        return found

    def whole(self, rows: Sequence[int]) -> Sequence[Logits]:
        found = self._logits.whole(rows)
        if found:
            _check_peaks(np.array([row.max() for row in found]))
        return found


def _check_peaks(peaks: Logits) -> None:
    """Raise FloatingPointError unless the largest logits of rows, float32 [n], are finite. NaN counts as the
    largest."""
    unsound = int((~(np.abs(peaks) < MAX_ABS_LOGIT)).sum())
    if unsound:
        raise FloatingPointError(f"the logits of {unsound} of {len(peaks)} rows are not finite")


@dataclass(frozen=True)
class VersionLoader:
    """Loads versions of one draft's model."""

    first: ModelDirectory
    """The model that the service began with."""
    context: int
    """Length in tokens of the longest text of a session."""
    placement: Placement
    """The placement of the first model, with its number of KV slots."""
    threads: int
    branches: int
    """Children of a node while the width of passes is measured."""
    max_slowdown: float
    """Limit on the seconds of a pass, in multiples of the serving version's."""
    translation: Translation | None = None

    def load(self, found: FoundVersion, expected: Callable[[int], float] | None) -> LoadedVersion:
        """Check and load a version; VersionRefusedError if it cannot serve. `expected` maps the number of nodes of a
        pass to the seconds that the serving version needs at present; None: unknown.

        Call it in a thread that ends afterwards, since OpenMP keeps threads for each thread that has computed.
        """
        export: Path | None = None
        try:
            directory = self._checked(found.path)
            fingerprint = directory.model_fingerprint
            if self.placement.kind == "onnx" and not is_exported(directory, self.placement):
                export = exported(directory, self.placement)
            loaded = self._loaded(directory if export is None else ModelDirectory(export), expected)
            learned_from = LearnedFrom.of(found.path)  # read last, since it is written before the weights
            if found.path == self.first.path:
                export = None  # made at start-up, and kept for the next start
        except Exception as error:  # no fault of a version may stop the service
            if export is not None and found.path != self.first.path:
                remove_export(export)
            if not isinstance(error, VersionRefusedError):
                error = VersionRefusedError(in_one_line(error))
            raise error from None
        return replace(loaded, fingerprint=fingerprint, export=export, learned_from=learned_from)

    def _checked(self, path: Path) -> ModelDirectory:
        """Return a version's directory, after checking that sessions can use it in place of the first model: only its
        guesses may differ."""
        (directory,) = check(Wanted(path, replace(self.placement, beside=True)))
        directory.check_pair(self.first)
        for what, own, needed in (
            ("a vocabulary", directory.vocabulary, self.first.vocabulary),
            ("a context", min(directory.context, self.context), self.context),
        ):
            if own != needed:
                raise VersionRefusedError(f"has {what} of {own} tokens, must have {needed}")
        check_finite(directory)
        return directory

    def _loaded(self, directory: ModelDirectory, expected: Callable[[int], float] | None) -> LoadedVersion:
        engine = load_engine(directory, self.placement, threads=(self.threads,))
        check_logits(engine)
        width = measured_width(engine, directory.context, self.branches)
        if expected is not None:
            _check_speed(width.seconds[NODES], expected(NODES), self.max_slowdown)
        watched = CheckedPass(draft_pass_of(engine))
        drafter = LanguageModelDrafter.of(
            engine, width, translation=self.translation, context=directory.context, forward=watched
        )
        return LoadedVersion(drafter, "", drafter.times, width.of_all, watched)


def _check_speed(seconds: float, expected: float, max_slowdown: float) -> None:
    allowed = BESIDE * max_slowdown
    if seconds > allowed * expected:
        raise VersionRefusedError(
            f"a pass over {NODES} nodes takes {1e3 * seconds:.3g} ms, must take at most {allowed:g} times the "
            f"{1e3 * expected:.3g} ms of the serving version"
        )


def check_logits(engine: Engine) -> None:
    """Raise VersionRefusedError unless the logits of a short text are finite. No session may hold slots yet."""
    packer = engine.packer()
    slots = np.arange(1, 1 + PROBED_TOKENS)
    rows = packer.add_rows([token % engine.vocabulary for token in range(PROBED_TOKENS)], 0, slots)
    packer.add_path(slots, rows)
    for row in rows:
        packer.want(row)
    logits = engine.forward(packer.pack())
    if np.isnan(logits).any() or not np.abs(logits.max(axis=1)).max() < MAX_ABS_LOGIT:
        raise VersionRefusedError(f"its logits of a text of {PROBED_TOKENS} tokens are not finite")


def exported(directory: ModelDirectory, placement: Placement) -> Path:
    """Return the path of a version's export in the user's cache; make the export if it is missing."""
    from specdec.engine.onnx.first_use import exported as exported_on_first_use

    begin = time.monotonic()
    dtype: Literal["float16", "float32"] = "float16" if dtype_of(directory, placement) == "float16" else "float32"
    path = exported_on_first_use(directory, dtype, quantised=placement.may_quantise, niceness=NICENESS)
    log.info("version_exported", version=directory.name, seconds=round(time.monotonic() - begin, 2))
    return path


def remove_export(export: Path) -> None:
    """Remove a version's export and its folder in the cache, which would grow with every version. Processes that have
    loaded the export keep their open files."""
    shutil.rmtree(export, ignore_errors=True)
    if user_cache() in export.parents:
        with suppress(OSError):  # the folder has another model with the same weights
            export.parent.rmdir()
