"""The store of responses: bounded in bytes and age, alone or shared by servers."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from specdec.openai_api.errors import ApiError
from specdec.openai_api.json_text import encoded
from specdec.openai_api.response_store import ResponseStore

BEFORE = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, caller TEXT NOT NULL, stored REAL NOT NULL, bytes INTEGER NOT NULL, previous TEXT,
    items TEXT NOT NULL, output TEXT NOT NULL, response TEXT NOT NULL
);
CREATE INDEX by_caller ON responses (caller, stored, bytes);
CREATE INDEX by_age ON responses (stored);
"""
"""The schema of a file of the first version."""


@contextmanager
def stored(**options: Any) -> Iterator[ResponseStore]:
    store = ResponseStore(**options)
    try:
        yield store
    finally:
        store.close()


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def response(number: int, previous: str | None = None, size: int = 100) -> dict[str, Any]:
    return {"id": f"resp_{number}", "previous_response_id": previous, "output": ["x" * size]}


def test_a_file_is_its_users_alone(tmp_path: Path) -> None:
    with stored(file=tmp_path / "store"):
        assert {file.stat().st_mode & 0o777 for file in tmp_path.iterdir()} == {0o600}


def test_servers_may_open_a_new_file_at_once(tmp_path: Path) -> None:
    """Setting the journal mode fails while another connection holds a lock."""
    file = tmp_path / "store"
    with closing(sqlite3.connect(file, isolation_level=None, check_same_thread=False)) as other:
        other.executescript("CREATE TABLE unrelated (a); BEGIN EXCLUSIVE;")
        ends = threading.Timer(0.2, other.rollback)
        ends.start()
        with stored(file=file):
            pass
        ends.join()


async def test_stored_responses_are_bounded() -> None:
    """A caller's responses are not evicted for those of a caller with more."""
    with stored(most_bytes=2000, clock=Clock()) as store:
        await store.put("small", [], response(0))
        for number in range(1, 100):
            await store.put("large", [], response(number))
        assert json.loads(await store.get("small", "resp_0")) == response(0)
        assert json.loads(await store.get("large", "resp_99")) == response(99)
        with pytest.raises(ApiError):
            await store.get("large", "resp_1")
        assert not await store.put("large", [], response(100, size=3000))  # too long to be stored
        with pytest.raises(ApiError):
            await store.get("large", "resp_100")


async def test_stored_responses_expire() -> None:
    clock = Clock()
    with stored(seconds=100.0, clock=clock) as store:
        await store.put("a", [], response(1))
        assert await store.items("a", "resp_1") == "[]"
        clock.now += 100
        with pytest.raises(ApiError):
            await store.get("a", "resp_1")


async def test_a_chain_is_read_at_one_moment() -> None:
    """Between two statements another server may delete it, or it may expire."""
    with stored(seconds=1.5, clock=Clock()) as store:
        await store.put("a", [], response(1))
        assert (await store.chain("a", "resp_1"))[0] == ["resp_1"]
        with pytest.raises(ApiError, match="'resp_1' is not stored here"):
            await store.chain("a", "resp_1")


async def test_servers_share_a_file(tmp_path: Path) -> None:
    file = tmp_path / "responses.db"
    with stored(file=file) as one, stored(file=file) as other:
        await one.put("a", [{"type": "message", "text": "\ud800"}], response(1))
        await other.put("a", [{"role": "user"}], response(2, "resp_1"))
        chain, size = await one.chain("a", "resp_2")
        assert chain == ["resp_1", "resp_2"]
        items = await one.conversation("a", chain)
        assert items == [{"type": "message", "text": "\ud800"}, "x" * 100, {"role": "user"}, "x" * 100]
        assert size > len(json.dumps(items)) // 2


async def test_only_items_count_in_a_chain() -> None:
    """A response repeats its request's tools and instructions, which a later request does not continue."""
    with stored() as store:
        items, previous = [{"role": "user", "content": "é"}], None
        for number in (1, 2):
            await store.put("a", items, response(number, previous) | {"tools": ["x" * 10_000]})
            previous = f"resp_{number}"
        _, size = await store.chain("a", "resp_2")
        assert size == 2 * (len(encoded(items, ascii=True)) + len(encoded(["x" * 100])))
        ((held,),) = store._database.execute("SELECT bytes FROM held")
        assert held > 20_000  # eviction counts all that is stored


async def test_a_store_that_does_not_answer_is_named() -> None:
    with stored() as store:
        store._database.execute("DROP TABLE responses")
        with pytest.raises(ApiError, match="the store of responses does not answer") as caught:
            await store.get("a", "resp_1")
    assert caught.value.status == 503


async def test_a_response_evicted_at_once_is_not_stored() -> None:
    with stored(most_bytes=1000, clock=Clock()) as store:
        assert await store.put("small", [], response(1, size=100))
        assert not await store.put("large", [], response(2, size=400))  # its caller has the most bytes
        assert json.loads(await store.get("small", "resp_1")) == response(1, size=100)


async def test_a_file_of_the_first_version_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "responses.db"
    with closing(sqlite3.connect(file)) as old:
        old.executescript(BEFORE)
        for number in range(10):
            row = (f"resp_{number}", "aab"[number % 3], float(number), 100, None, "[]", "[]", json.dumps(number))
            old.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
        old.commit()
    for _ in range(2):
        with stored(file=file, most_bytes=1100, clock=lambda: 10.0) as store:
            assert await store.get("a", "resp_4") == "4"
    with stored(file=file, most_bytes=1100, clock=lambda: 10.0) as store:
        await store.put("c", [], response(10, size=200))
        rows = store._database.execute("SELECT caller, SUM(bytes) FROM responses GROUP BY caller").fetchall()
        assert store._database.execute("SELECT caller, bytes FROM held").fetchall() == rows
        assert store._database.execute("SELECT bytes FROM total").fetchall() == [(sum(size for _, size in rows),)]
        assert sum(size for _, size in rows) <= 1100
        with pytest.raises(ApiError):
            await store.get("a", "resp_0")  # the oldest
        assert await store.get("a", "resp_9") == "9"


async def test_an_eviction_reads_only_what_it_deletes() -> None:
    """Sums over all responses take a tenth of a second for 300,000."""
    with stored(most_bytes=2_000_000, seconds=1e9, clock=lambda: 1e6) as store:
        rows = ((f"resp_{n}", "a", float(n), 100, None, "[]", "[]", "{}") for n in range(20_000))
        store._database.executemany("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        steps = 0

        def step() -> int:
            nonlocal steps
            steps += 1
            return 0

        store._database.set_progress_handler(step, 100)
        assert await store.put("a", [], response(10**6))
        assert steps < 100  # of 100 instructions each
