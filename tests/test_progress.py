"""The remaining time of long work is estimated from what is done."""

from __future__ import annotations

import pytest

from specdec.progress import ProgressLines, left


@pytest.mark.parametrize(
    ("done", "total", "seconds", "told"),
    [
        (0, 100, 9.0, ""),
        (25, 100, 10.0, "about 30 s left"),
        (10, 100, 20.0, "about 3 min left"),
        (1, 100, 100.0, "about 2.8 h left"),
        (100, 100, 20.0, "about 0 s left"),
    ],
)
def test_the_rest_takes_as_long_as_what_is_done(done: int, total: int, seconds: float, told: str) -> None:
    assert left(done, total, seconds) == told


def test_lines_are_few_and_count_from_where_the_work_went_on() -> None:
    now, said = [0.0], list[str]()
    lines = ProgressLines(said.append, 20, begun=10, clock=lambda: now[0])
    for done in range(11, 21):
        now[0] += 4.0
        lines.heard(done, f"step {done} of 20")
    assert said == [
        "step 13 of 20, about 28 s left",
        "step 16 of 20, about 16 s left",
        "step 19 of 20, about 4 s left",
        "step 20 of 20",
    ]
