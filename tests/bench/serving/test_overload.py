"""The report on a burst, for any outcome of its requests."""

from __future__ import annotations

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata

from bench.serving.overload import TOKENS, report

SERVED = (1.5, TOKENS)
REFUSED = (0.004, AioRpcError(StatusCode.RESOURCE_EXHAUSTED, Metadata(), Metadata(), "full"))


@pytest.mark.parametrize(
    ("answers", "lines"),
    [
        (
            [SERVED, (2.0, TOKENS - 1), REFUSED],
            [
                "served 2, 1 complete; the last after 2.0 s",
                "  refused 1 with {'RESOURCE_EXHAUSTED'}, all with a delay: False",
                "  refusals took median 4 ms, worst 4 ms",
            ],
        ),
        ([SERVED], ["served 1, 1 complete; the last after 1.5 s", "  refused none"]),
        (
            [REFUSED],
            [
                "served 0, 0 complete",
                "  refused 1 with {'RESOURCE_EXHAUSTED'}, all with a delay: False",
                "  refusals took median 4 ms, worst 4 ms",
            ],
        ),
    ],
)
def test_a_burst_is_reported(
    answers: list[tuple[float, object]], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report(answers)
    assert capsys.readouterr().out.splitlines() == lines
