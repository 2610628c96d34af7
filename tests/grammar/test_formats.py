"""Formats of dates and times, against Python's own reading."""

from __future__ import annotations

from datetime import date

import pytest

from tests.grammar.followed import Followed

YEARS = (1, 4, 1896, 1900, 1999, 2000, 2023, 2024, 2100, 2400, 9999)
DATES = [
    f"{year:04}-{month:02}-{day:02}"
    for year in YEARS
    for month in (0, 1, 2, 4, 12, 13)
    for day in (0, 1, 28, *range(29, 33))
]


def is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_dates_know_the_calendar() -> None:
    grammar = Followed.of_schema({"type": "string", "format": "date"})
    assert [text for text in DATES if grammar.takes(f'"{text}"') != is_date(text)] == []


@pytest.mark.parametrize(
    ("format_", "valid", "invalid"),
    [
        ("time", ["12:00:59Z", "23:59:59.25+01:30"], ["12:00:60Z", "24:00:00Z", "12:00:00", "12:00:00+24:00"]),
        ("date-time", ["2024-02-29T00:00:00Z", "2023-02-28t12:00:00.5-08:00"], ["2023-02-29T00:00:00Z", "2024-02-29"]),
    ],
)
def test_times(format_: str, valid: list[str], invalid: list[str]) -> None:
    grammar = Followed.of_schema({"type": "string", "format": format_})
    assert [text for text in valid if not grammar.takes(f'"{text}"')] == []
    assert [text for text in invalid if grammar.takes(f'"{text}"')] == []
