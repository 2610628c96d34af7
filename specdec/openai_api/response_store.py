"""Stored responses, which later requests continue by id: in memory or in a SQLite file, limited in bytes and age."""

from __future__ import annotations

import json
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import structlog

from specdec.openai_api.errors import ApiError, overloaded, too_many
from specdec.openai_api.json_text import Json, encoded
from specdec.serving.bounded_threads import BoundedThreads
from specdec.serving.errors import OverloadedError, TenantLimitError

log = structlog.get_logger()

MAX_STORED_BYTES = 64 << 20
"""Default limit on the bytes of all stored responses."""

STORED_SECONDS = 24 * 3600.0
"""Default lifetime of a stored response in seconds."""

MAX_CHAIN = 1000
"""Maximum length of a chain of responses, where each continues the previous one."""

MAX_WAITING = 1024
WAIT_SECONDS = 10.0
"""Maximum number of calls that wait for the store, and maximum wait in seconds."""

LOCK_SECONDS = 5.0
"""Maximum wait in seconds for other servers that use the same file."""

_ID = re.compile(r"resp_[0-9a-f]{1,64}")

_SCHEMA = """
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, caller TEXT NOT NULL, stored REAL NOT NULL, bytes INTEGER NOT NULL, previous TEXT,
    items TEXT NOT NULL, output TEXT NOT NULL, response TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS by_caller ON responses (caller, stored, bytes);
CREATE INDEX IF NOT EXISTS by_age ON responses (stored);
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS held (caller TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_bytes ON held (bytes);
CREATE TABLE IF NOT EXISTS total (bytes INTEGER NOT NULL);
INSERT INTO held SELECT caller, SUM(bytes) FROM responses WHERE NOT EXISTS (SELECT 1 FROM total) GROUP BY caller;
INSERT INTO total SELECT (SELECT COALESCE(SUM(bytes), 0) FROM held) WHERE NOT EXISTS (SELECT 1 FROM total);
CREATE TRIGGER IF NOT EXISTS added AFTER INSERT ON responses BEGIN
    INSERT INTO held VALUES (NEW.caller, NEW.bytes) ON CONFLICT DO UPDATE SET bytes = bytes + NEW.bytes;
    UPDATE total SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER IF NOT EXISTS removed AFTER DELETE ON responses BEGIN
    UPDATE held SET bytes = bytes - OLD.bytes WHERE caller = OLD.caller;
    DELETE FROM held WHERE caller = OLD.caller AND bytes <= 0;
    UPDATE total SET bytes = bytes - OLD.bytes;
END;
COMMIT;
"""
"""`held` has the bytes of each caller, `total` those of all callers: summing them up from `responses` would take 0.2 us
per response. Triggers keep both correct even if a server of an earlier version uses the same file."""

_CHAIN = """
WITH RECURSIVE chain(id, previous, number) AS (
    SELECT id, previous, 1 FROM responses WHERE id = :id AND caller = :caller AND stored >= :since
    UNION ALL
    SELECT r.id, r.previous, chain.number + 1 FROM responses r JOIN chain ON r.id = chain.previous
    WHERE r.caller = :caller AND r.stored >= :since AND chain.number < :most
)
SELECT chain.id, chain.previous, LENGTH(r.items) + LENGTH(r.output) FROM chain JOIN responses r ON r.id = chain.id
ORDER BY chain.number DESC
"""
"""The responses of a chain, earliest first, each with the bytes of its items, which are ASCII. The rest of a response,
such as its tools, is not continued."""

Result = TypeVar("Result")


class ResponseStoreError(Exception):
    """The file cannot be used."""


class ResponseStore:
    """The stored responses. A caller sees only its own. Above the limit on bytes, the oldest responses of the caller
    with the most bytes are evicted."""

    def __init__(
        self,
        file: Path | None = None,
        *,
        most_bytes: int = MAX_STORED_BYTES,
        seconds: float = STORED_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the file, which several servers on one machine may share; None: keep the responses in memory.
        Raise ResponseStoreError if the file cannot be used."""
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._clock = clock
        self._thread = BoundedThreads("responses", 1, MAX_WAITING)
        try:
            if file is not None:
                file.touch(0o600)  # what callers wrote is for this user only; an existing file keeps its permissions
            self._database = sqlite3.connect(
                ":memory:" if file is None else file,
                check_same_thread=False,
                isolation_level=None,
                timeout=LOCK_SECONDS,
            )
            self._use_wal()
            self._database.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise ResponseStoreError(f"{file}: {error}") from error

    def _use_wal(self) -> None:
        """Set the file's journal mode. SQLite does not wait for the lock that this needs while another server opens the
        new file, so it is tried again for `LOCK_SECONDS`."""
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                self._database.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    async def put(self, caller: str, items: Sequence[Json], response: Json) -> bool:
        """Store a response; `items` are the input items of its request. Return False if there is no room for it,
        or if storing fails, which is logged."""
        try:
            return await self._thread.run(lambda: self._put(caller, items, response), caller, WAIT_SECONDS)
        except (sqlite3.Error, OverloadedError) as error:  # e.g. a full disk, or a long lock by another server
            log.warning("response_not_stored", why=str(error))
            return False

    async def get(self, caller: str, response_id: str) -> str:
        """Return a response as JSON; ApiError if it is not stored."""
        return await self._run(caller, lambda: self._row(caller, response_id, "response")[0])

    async def items(self, caller: str, response_id: str) -> str:
        """Return the input items of a response's request as JSON; ApiError if it is not stored."""
        return await self._run(caller, lambda: self._row(caller, response_id, "items")[0])

    async def delete(self, caller: str, response_id: str) -> None:
        """Delete a response; ApiError if it is not stored."""
        await self._run(caller, lambda: self._delete(caller, response_id))

    async def chain(self, caller: str, response_id: str) -> tuple[list[str], int]:
        """Return the ids of a response and of all responses that it continues, earliest first, and the total bytes of
        their items. Raise ApiError if one of them is missing, or if there are more than `MAX_CHAIN`."""
        return await self._run(caller, lambda: self._chain(caller, response_id))

    async def conversation(self, caller: str, chain: Sequence[str]) -> list[Json]:
        """Return the input and output items of these responses."""
        return await self._run(caller, lambda: self._conversation(caller, chain))

    async def output(self, caller: str, response_id: str, ids: Collection[str]) -> dict[str, tuple[Json, int]]:
        """Return the output items of a response that have one of these ids, by id, each with its bytes as JSON;
        ApiError if the response is not stored."""
        return await self._run(caller, lambda: self._output(caller, response_id, ids))

    def close(self) -> None:
        self._thread.close(wait=True)  # it may be using the database
        self._database.close()

    async def _run(self, caller: str, work: Callable[[], Result]) -> Result:
        """Run work in the store's thread; ApiError if it fails or waits too long."""
        try:
            return await self._thread.run(work, caller, WAIT_SECONDS)
        except TenantLimitError:
            raise too_many("too many of your requests wait for stored responses") from None
        except (sqlite3.Error, OverloadedError) as error:
            log.warning("responses_not_read", why=str(error))
            raise overloaded("the store of responses does not answer: try again") from None

    @property
    def _since(self) -> float:
        return self._clock() - self._seconds

    def _put(self, caller: str, items: Sequence[Json], response: Json) -> bool:
        columns = [encoded(value, ascii=True) for value in (list(items), response["output"], response)]
        size = sum(map(len, columns))
        if size > self._most_bytes:
            return False
        execute = self._database.execute
        execute("BEGIN IMMEDIATE")
        try:
            execute("DELETE FROM responses WHERE stored < ?", (self._since,))
            row = (response["id"], caller, self._clock(), size, response["previous_response_id"], *columns)
            execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            while (excess := self._excess()) > 0:
                self._evict(excess)
            kept = execute("SELECT 1 FROM responses WHERE id = ?", (response["id"],)).fetchone() is not None
        except BaseException:
            execute("ROLLBACK")
            raise
        execute("COMMIT")
        return kept

    def _excess(self) -> int:
        ((total,),) = self._database.execute("SELECT bytes FROM total")
        return int(total) - self._most_bytes

    def _evict(self, excess: int) -> None:
        """Delete the oldest responses of the caller with the most bytes: `excess` bytes, or all that it has."""
        asked = (
            "SELECT id, bytes FROM responses WHERE caller = (SELECT caller FROM held ORDER BY bytes DESC LIMIT 1) "
            "ORDER BY stored, id"
        )
        oldest = []
        for response_id, size in self._database.execute(asked):
            oldest.append((response_id,))
            excess -= size
            if excess <= 0:
                break
        self._database.executemany("DELETE FROM responses WHERE id = ?", oldest)

    def _row(self, caller: str, response_id: str, columns: str) -> tuple[str, ...]:
        found: tuple[str, ...] | None = None
        if _ID.fullmatch(response_id):
            asked = f"SELECT {columns} FROM responses WHERE id = ? AND caller = ? AND stored >= ?"
            found = self._database.execute(asked, (response_id, caller, self._since)).fetchone()
        if found is None:
            raise not_found(response_id)
        return found

    def _output(self, caller: str, response_id: str, ids: Collection[str]) -> dict[str, tuple[Json, int]]:
        items = json.loads(self._row(caller, response_id, "output")[0])
        return {item["id"]: (item, len(encoded(item, ascii=True))) for item in items if item["id"] in ids}

    def _delete(self, caller: str, response_id: str) -> None:
        self._row(caller, response_id, "id")
        self._database.execute("DELETE FROM responses WHERE id = ? AND caller = ?", (response_id, caller))

    def _chain(self, caller: str, response_id: str) -> tuple[list[str], int]:
        asked = {"id": response_id, "caller": caller, "since": self._since, "most": MAX_CHAIN}
        rows = self._database.execute(_CHAIN, asked).fetchall()
        if not rows:
            raise not_found(response_id)
        if (missing := rows[0][1]) is not None:
            if len(rows) == MAX_CHAIN:
                problem = f"previous_response_id: continues more than {MAX_CHAIN} responses"
                raise ApiError(400, problem, param="previous_response_id", code="invalid_value")
            raise not_found(missing, f", which {response_id} continues,")
        return [row[0] for row in rows], sum(row[2] for row in rows)

    def _conversation(self, caller: str, chain: Sequence[str]) -> list[Json]:
        rows = (self._row(caller, response_id, "items, output") for response_id in chain)
        return [item for row in rows for column in row for item in json.loads(column)]


def not_found(response_id: str, relation: str = "") -> ApiError:
    message = f"response {response_id[:100]!r}{relation} is not stored here; it may have expired or been evicted"
    return ApiError(404, message, param="response_id", code="response_not_found")
