"""Command-line options for the target and the draft of a benchmark, by default the demo pair."""

from __future__ import annotations

import argparse
from pathlib import Path

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.local import DEMO


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options; `chosen` or `both` reads them."""
    parser.add_argument("--target", type=Path, default=DEMO / "target", help="target directory; default: the demo's")
    parser.add_argument("--draft", help='draft directory, or "none"; default: the demo\'s')


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[Path, Path | None]:
    """Return the directories of target and draft, both checked. The demo's draft is the default only for the demo's
    target."""
    usual = DEMO / "draft" if args.target == DEMO / "target" else None
    draft = None if args.draft == "none" else Path(args.draft) if args.draft else usual
    for name, path in (("target", args.target), ("draft", draft)):
        try:
            if path is not None:
                ModelDirectory(path)
        except ModelDirectoryError as error:
            parser.error(f"--{name}: {error}")
    return args.target, draft


def both(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[Path, Path]:
    """Return the directories of target and draft, for a benchmark that needs a draft."""
    target, draft = chosen(parser, args)
    if draft is None:
        parser.error("--draft: must be a model's directory")
    return target, draft
