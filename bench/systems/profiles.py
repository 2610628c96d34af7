"""Profiles of hardware: pass times of a target and of its draft by rows, and the source of the times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Times:
    """Milliseconds of passes over some numbers of rows, interpolated linearly; extrapolated from the last two."""

    rows: tuple[int, ...]
    ms: tuple[float, ...]

    def seconds(self, rows: int) -> float:
        if rows <= self.rows[-1]:
            return 1e-3 * float(np.interp(rows, self.rows, self.ms))
        slope = (self.ms[-1] - self.ms[-2]) / (self.rows[-1] - self.rows[-2])
        return 1e-3 * (self.ms[-1] + slope * (rows - self.rows[-1]))


@dataclass(frozen=True)
class Profile:
    """A target and a draft, each on its own device."""

    about: str
    target: Times
    draft: Times
    vocabulary: int
    source: str  # of the times


EIGHT = Times((1, 8, 64, 256, 512), (6.8, 7.0, 8.5, 13.0, 19.1))
SMALL = Times((1, 64, 512), (1.4, 1.7, 3.8))

PROFILES = {
    "8b-h100": Profile(
        "8B on an H100, drafts of 0.5B to 1B on another",
        EIGHT,
        SMALL,
        128256,
        "target: docs/decisions/2026-11-27-first-run-on-a-gpu.md; draft: assumed",
    ),
    "8b-h200": Profile(
        "8B and 1B on an H200 each",
        Times((1, 8, 32, 64, 128, 256), (5.1, 5.8, 7.5, 8.0, 9.0, 11.3)),
        Times((1, 32, 128, 256, 512), (1.6, 2.8, 3.4, 4.0, 5.9)),
        128256,
        "docs/decisions/2026-11-28-second-run-on-a-gpu.md: 1 to 32 texts of 1,024 tokens, 1 to 8 rows each (1B: to 16)",
    ),
}
