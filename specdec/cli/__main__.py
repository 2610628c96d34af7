"""`python -m specdec.cli`: the `specdec` command."""

from __future__ import annotations

import contextlib

from specdec.cli import main

if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
