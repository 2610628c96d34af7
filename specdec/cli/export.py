"""`specdec export`: a model to ONNX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec.cli.failure import end_on_sigterm, fail, say
from specdec.exit_status import ExitStatus
from specdec.extras import check_installed

BITS: dict[str, Literal[4, 8, 32] | None] = {"auto": None, "4": 4, "8": 8, "32": 32}


def export(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Directory of the model in Hugging Face's layout, or its GGUF file."),
    ],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory to write; an export already there is replaced.")
    ],
    dtype: Annotated[
        Literal["float32", "float16"], typer.Option(help="Data type of the export; float16 is for GPUs.")
    ] = "float32",
    bits: Annotated[
        Literal["auto", "4", "8", "32"],
        typer.Option(
            help="Bits of a weight; 32: not quantised. auto: the fewest with which at least 90 % of the export's draws "
            "on a sample text are the model's; 32 for small models and for float16."
        ),
    ] = "auto",
) -> None:
    """Export a model to ONNX. A draft service then runs it without torch."""
    wanted = ("numpy", "structlog", "torch", "transformers", "onnx", "onnx_ir", "onnxscript")
    check_installed(*wanted, *(("onnxruntime",) if bits in ("4", "8") else ()))  # they take seconds to import
    from specdec.engine.model_directory import DESCRIPTION
    from specdec.engine.model_file import ModelDirectoryError
    from specdec.engine.model_folder import check_replaceable
    from specdec.engine.placement import Placement
    from specdec.engine.preflight.check import Wanted, check_model
    from specdec.engine.start_phases import progress_to
    from specdec.engine.unsupported import UnsupportedModelError
    from specdec.serving.process import logs

    logs.configure("export", "warning")  # before checks that log, and libraries that write to stderr
    try:
        check_replaceable(out, DESCRIPTION, model)
        directory = check_model(Wanted(model, Placement("eager")))
        there = ", replacing the export there" if (out / DESCRIPTION).is_file() else ""
        say(f"exporting {model} to {out} in {dtype}{there}; large models take minutes")
        end_on_sigterm()
        from specdec.engine.onnx.export import export as run  # takes seconds: report problems first

        found = run(directory, out, dtype, BITS[bits], progress_to(say))
        if found is not None:
            chosen = json.loads((out / DESCRIPTION).read_text(encoding="utf-8"))["bits"]
            say(
                f"quantised to {chosen} bits; {found.overlap:.1%} of draws and {found.greedy:.1%} of best tokens are "
                "the model's"
            )
    except (ModelDirectoryError, UnsupportedModelError) as error:
        fail(str(error), ExitStatus.USAGE)
    print(out)
