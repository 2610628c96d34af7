"""`python -m specdec.cli`: the `specdec` command."""

from __future__ import annotations

from specdec.cli import main

if __name__ == "__main__":
    main()
