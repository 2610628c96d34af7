"""`specdec import-gguf`: a GGUF file to a model directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from specdec.cli.failure import end_on_sigterm, end_with_stdin, fail, say
from specdec.exit_status import ExitStatus
from specdec.extras import check_installed


def import_gguf(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="GGUF file, not split into parts.")],
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="Directory to write; an earlier conversion there is replaced.")
    ],
    dtype: Annotated[
        Literal["auto", "bfloat16", "float16", "float32"],
        typer.Option(help="Data type of the weights; auto: the file's own, bfloat16 if they are quantised."),
    ] = "auto",
    stop_with_stdin: Annotated[bool, typer.Option("--stop-with-stdin", hidden=True)] = False,
) -> None:
    """Convert a GGUF file to a model directory. Services also take the file itself, and convert it into the cache."""
    check_installed(
        "numpy", "structlog", "torch", "transformers", "accelerate", "gguf"
    )  # before their import, which takes seconds
    from specdec.engine.gguf_file import MARKER, check_gguf
    from specdec.engine.model_file import ModelDirectoryError
    from specdec.engine.model_folder import check_replaceable
    from specdec.engine.start_phases import progress_to
    from specdec.serving.process import logs

    logs.configure("import-gguf", "warning")  # before the import of libraries that write to stderr
    try:
        check_gguf(file)
        check_replaceable(out, MARKER, file)
        say(f"converting {file} ({file.stat().st_size / 1e9:.3g} GB) to {out}")
        end_on_sigterm()
        if stop_with_stdin:
            end_with_stdin()
        from specdec.engine.hf.gguf_conversion import convert  # takes seconds: report problems first

        convert(file, out, None if dtype == "auto" else dtype, progress_to(say))
    except ModelDirectoryError as error:
        fail(str(error), ExitStatus.USAGE)
    print(out)
