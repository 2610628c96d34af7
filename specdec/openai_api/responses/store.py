"""Stored responses, which later requests continue by id: in memory or in a SQLite file, bounded in bytes and age."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from specdec.openai_api.errors import ApiError
from specdec.openai_api.json_text import Json

MAX_STORED_BYTES = 64 << 20
"""Default limit on the bytes of all stored responses."""

STORED_SECONDS = 24 * 3600.0
"""Default lifetime of a stored response in seconds."""

MAX_CHAIN = 1000
"""Maximum number of responses that one request continues, the earliest of which began the conversation."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, caller TEXT NOT NULL, stored REAL NOT NULL, bytes INTEGER NOT NULL, previous TEXT,
    items TEXT NOT NULL, response TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_caller ON responses (caller, stored);
CREATE INDEX IF NOT EXISTS by_size ON responses (caller, bytes);
CREATE INDEX IF NOT EXISTS by_age ON responses (stored);
"""

Result = TypeVar("Result")


class ResponseStoreError(Exception):
    """The file cannot be used."""


@dataclass(frozen=True)
class StoredResponse:
    """A response with the input items of its request."""

    items: list[Json]
    response: Json


class ResponseStore:
    """The stored responses. A caller sees only its own. Beyond the limit on bytes, the oldest response of the caller
    with most bytes is evicted. Methods run in a thread of the store."""

    def __init__(
        self,
        file: Path | None = None,
        *,
        most_bytes: int = MAX_STORED_BYTES,
        seconds: float = STORED_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the file, which several servers of one machine may share; None: keep the responses in memory.
        ResponseStoreError if the file cannot be used."""
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "responses")
        try:
            self._database = sqlite3.connect(
                ":memory:" if file is None else file, check_same_thread=False, isolation_level=None, timeout=10.0
            )
            self._database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise ResponseStoreError(f"{file}: {error}") from error

    async def put(self, caller: str, items: Sequence[Json], response: Json) -> None:
        """Store a response; `items` are the input items of its request."""
        await self._run(lambda: self._put(caller, items, response))

    async def get(self, caller: str, response_id: str) -> StoredResponse:
        """Return a response; ApiError if there is none."""
        return await self._run(lambda: self._get(caller, response_id))

    async def delete(self, caller: str, response_id: str) -> None:
        """Delete a response; ApiError if there is none."""
        await self._run(lambda: self._delete(caller, response_id))

    async def conversation(self, caller: str, response_id: str) -> tuple[list[Json], int]:
        """Return the items of a response and of all it continues, in order, and their bytes; ApiError if one of them is
        gone."""
        return await self._run(lambda: self._conversation(caller, response_id))

    def close(self) -> None:
        self._thread.shutdown()
        self._database.close()

    async def _run(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _put(self, caller: str, items: Sequence[Json], response: Json) -> None:
        told = [json.dumps(value) for value in (list(items), response)]
        size = sum(map(len, told))
        if size > self._most_bytes:
            return
        row = (response["id"], caller, self._clock(), size, response["previous_response_id"], *told)
        self._expire()
        self._database.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        while self._total() > self._most_bytes:
            largest = "SELECT caller FROM responses GROUP BY caller ORDER BY SUM(bytes) DESC LIMIT 1"
            oldest = f"SELECT id FROM responses WHERE caller = ({largest}) ORDER BY stored LIMIT 1"
            self._database.execute(f"DELETE FROM responses WHERE id = ({oldest})")

    def _total(self) -> int:
        ((total,),) = self._database.execute("SELECT COALESCE(SUM(bytes), 0) FROM responses")
        return int(total)

    def _expire(self) -> None:
        self._database.execute("DELETE FROM responses WHERE stored < ?", (self._clock() - self._seconds,))

    def _row(self, caller: str, response_id: str) -> tuple[str | None, str, str]:
        self._expire()
        asked = "SELECT previous, items, response FROM responses WHERE id = ? AND caller = ?"
        found: tuple[str | None, str, str] | None = self._database.execute(asked, (response_id, caller)).fetchone()
        if found is None:
            raise not_found(response_id)
        return found

    def _get(self, caller: str, response_id: str) -> StoredResponse:
        _, items, response = self._row(caller, response_id)
        return StoredResponse(json.loads(items), json.loads(response))

    def _delete(self, caller: str, response_id: str) -> None:
        asked = "DELETE FROM responses WHERE id = ? AND caller = ?"
        if not self._database.execute(asked, (response_id, caller)).rowcount:
            raise not_found(response_id)

    def _conversation(self, caller: str, response_id: str) -> tuple[list[Json], int]:
        turns: list[list[Json]] = []
        size = 0
        previous: str | None = response_id
        while previous is not None:
            if len(turns) == MAX_CHAIN:
                problem = f"continues more than {MAX_CHAIN} responses"
                raise ApiError(400, f"previous_response_id: {problem}", param="previous_response_id")
            previous, items, response = self._row(caller, previous)
            turns.append(json.loads(items) + json.loads(response)["output"])
            size += len(items) + len(response)
        return [item for turn in reversed(turns) for item in turn], size


def not_found(response_id: str) -> ApiError:
    message = f"response {response_id[:100]!r} is not stored here, or no longer"
    return ApiError(404, message, param="response_id", code="response_not_found")
