"""`specdec export`: a model to ONNX."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from specdec.cli.failure import fail
from specdec.exit_status import ExitStatus
from specdec.extras import check_installed


def export(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the model in Hugging Face's layout.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory to write; an export already there is replaced.")
    ],
    dtype: Annotated[
        Literal["float32", "float16"], typer.Option(help="Data type of the export; float16 is for GPUs.")
    ] = "float32",
) -> None:
    """Export a model to ONNX. A draft service then runs it without torch."""
    check_installed("numpy", "structlog", "torch", "transformers", "onnx", "onnxscript")  # they take seconds to import
    from specdec.engine.engine import UnsupportedModelError
    from specdec.engine.model_directory import ModelDirectoryError
    from specdec.engine.onnx.replaceable import check_replaceable
    from specdec.engine.placement import Placement
    from specdec.engine.preflight.check import Wanted, check_model

    try:
        check_replaceable(out)
        directory = check_model(Wanted(model, Placement("eager")))
        print(
            f"specdec: exporting {model} to {out} in {dtype}; this takes a minute or more", file=sys.stderr, flush=True
        )
        signal.signal(signal.SIGTERM, _end)
        from specdec.serving.process import logs

        logs.configure("export", "warning")  # before the import of libraries that write to stderr
        from specdec.engine.onnx.export import export as run  # takes seconds: report problems first

        run(directory, out, dtype)
    except (ModelDirectoryError, UnsupportedModelError) as error:
        fail(str(error), ExitStatus.USAGE)
    print(out)


def _end(number: int, _: object) -> NoReturn:
    """Raise SystemExit, so that half-written files are removed; a second signal kills the process."""
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(ExitStatus.TERMINATED)
