"""Export of a model on first use, in a separate process, so that its memory is freed and torch is not loaded here."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import structlog

from specdec.engine import start_phases
from specdec.engine.cache_folder import temporary
from specdec.engine.derived_models import make_user_cache, place_of_export, user_cache, what_is_broken
from specdec.engine.model_directory import DESCRIPTION, GRAPH, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError, read_fields
from specdec.engine.placement import GraphDtype
from specdec.engine.unsupported import UnsupportedModelError
from specdec.exit_status import how_it_ended

log = structlog.get_logger()


def exported(
    directory: ModelDirectory, dtype: GraphDtype = "float32", *, quantised: bool = False, niceness: int = 0
) -> Path:
    """Return the path of a model's export: the directory itself, or one in the user's cache, created now if it is
    missing or broken. If the cache cannot be written, the export is temporary. `quantised`: quantise the weights, to a
    number of bits that `export` chooses; otherwise they stay float. `niceness`: of the exporting process, for exports
    while another process serves."""
    if (directory.path / GRAPH).is_file():
        return directory.path
    target = place_of_export(directory, dtype, quantised=quantised)
    if broken := what_is_broken(target):
        if target.exists():
            log.warning("export_is_broken", export=str(target), why=broken, cost="the model is exported again")
        with start_phases.phase(start_phases.EXPORT):
            try:
                make_user_cache()
                if target.exists() and not (target / DESCRIPTION).is_file():  # what a cleaner of the cache left
                    shutil.rmtree(target)
                _export(directory, target, dtype, quantised, niceness)
            except OSError as error:
                target = _without_cache(directory, dtype, quantised, niceness, error)
        description = read_fields(target / DESCRIPTION)
        if description is not None and description.has("agreement"):
            log.info("quantised", bits=description.content["bits"], **description.fields("agreement").content)
    return target


def _without_cache(
    directory: ModelDirectory, dtype: GraphDtype, quantised: bool, niceness: int, error: OSError
) -> Path:
    """Export a model into a folder deleted when this process ends, since the cache cannot be written; return its path.
    ModelDirectoryError, naming both folders, if that fails too."""
    folder, why = user_cache(), error.strerror or str(error)
    log.warning("cache_not_used", folder=str(folder), why=why, cost="every start exports the model again")
    target = temporary() / directory.name
    try:
        _export(directory, target, dtype, quantised, niceness)
    except OSError as again:
        raise ModelDirectoryError(
            f"{directory.path}: the export can be written neither to {folder} ({why}) nor to {target.parent} "
            f"({again.strerror or again}): set XDG_CACHE_HOME to a folder with room, or run `specdec export`"
        ) from again
    return target


def _export(directory: ModelDirectory, target: Path, dtype: GraphDtype, quantised: bool, niceness: int) -> None:
    """Run the export in a new process and report its progress. Raise its error; an OSError if the folder cannot be
    written."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    given = (directory.path, target, dtype, quantised, niceness, sender)
    process = context.Process(target=_in_process, args=given, daemon=True)
    process.start()
    sender.close()
    progress = start_phases.progress_to(start_phases.report)
    try:
        while not isinstance(message := receiver.recv(), Exception):
            progress(*message)
    except EOFError:  # the process has ended
        process.join()
        if process.exitcode:
            raise UnsupportedModelError(
                f"{directory.name} was not exported: {how_it_ended(process.exitcode)}"
            ) from None
        return
    raise message


def _in_process(
    path: Path, target: Path, dtype: GraphDtype, quantised: bool, niceness: int, sender: Connection
) -> None:
    """Export, sending progress and, if it fails, the error. If the parent has died, sending fails, and the written
    files are removed."""
    os.nice(niceness)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # the parent logs
    logging.disable(logging.WARNING)  # the libraries log each rule they apply
    try:
        from specdec.engine.onnx.export import export

        export(
            ModelDirectory(path),
            target,
            dtype,
            None if quantised else 32,
            lambda what, done, total: sender.send((what, done, total)),
        )
    except (ModelDirectoryError, UnsupportedModelError) as error:
        sender.send(error)
    except OSError as error:
        sender.send(OSError(error.errno, error.strerror or str(error), error.filename))
