"""A file of results: one JSON object per line, written so that an interrupted run can resume."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from specdec.cli.prompt_file import Prompt


class ResultsFileError(ValueError):
    """The file cannot be written or resumed; the message names the file and the problem."""


class ResultsFile:
    """Results by the line of their prompt. If the process dies, at most the last line is incomplete."""

    def __init__(self, path: Path, *, resume: bool) -> None:
        """Create the file, or index the existing one of an interrupted run."""
        self.path = path.resolve()  # replacing the file must not replace a link to it
        self._places: dict[int, tuple[int, int]] = {}  # prompt's line: (offset, length) in the file
        self._digests: dict[int, tuple[int, str]] = {}  # prompt's line: (line here, prompt's digest)
        self._dropped = False
        self._failed = 0
        try:
            self._file: BinaryIO = self.path.open("rb+" if resume and self.path.exists() else "xb+")
            try:
                self._lock(self._file)
                if not os.path.samestat(os.fstat(self._file.fileno()), self.path.stat()):  # replaced since
                    raise self._taken()
                self._index()
            except BaseException:
                self._file.close()
                raise
        except FileExistsError:
            raise ResultsFileError(f"{path}: already exists; --resume continues it") from None
        except OSError as error:
            raise ResultsFileError(f"{path}: {error.strerror}") from error

    def __contains__(self, prompt: Prompt) -> bool:
        return prompt.line in self._places

    def __len__(self) -> int:
        """Return the number of prompts that are done. A failed one is not: --resume repeats it."""
        return len(self._places) - self._failed

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise ResultsFileError if a result has no prompt, or was made with other options."""
        unknown = dict(self._digests)
        for prompt in prompts:
            if not unknown:
                break
            here, digest = unknown.pop(prompt.line, (0, None))
            if digest is not None and digest != prompt.digest:
                raise ResultsFileError(
                    f"{self.path}:{here}: is the result of another prompt or other options than line {prompt.line} "
                    "has now"
                )
        for line, (here, _) in unknown.items():
            raise ResultsFileError(f"{self.path}:{here}: is the result of line {line}, which has no prompt now")

    def begin(self) -> None:
        """Drop entries to redo: an incomplete last line, and errors."""
        if self._dropped:
            try:
                self._rewrite()
            except OSError as error:
                raise ResultsFileError(f"{self.path}: {error.strerror}") from error

    def append(self, prompt: Prompt, result: dict[str, Any]) -> None:
        """Append a result; earlier bytes do not change."""
        line = json.dumps({"line": prompt.line, "request": prompt.digest, **result}).encode() + b"\n"
        try:
            place = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise ResultsFileError(f"{self.path}: {error.strerror}") from error
        self._places[prompt.line] = (place, len(line))
        self._failed += "error" in result

    def close(self) -> None:
        """Sort the results by prompt and close the file. After a failed write, the file is left unsorted, with at most
        the last line incomplete."""
        offsets = [self._places[line] for line in sorted(self._places)]
        try:
            try:
                if offsets != sorted(offsets):
                    self._rewrite()
            finally:
                self._file.close()
        except OSError as error:
            raise ResultsFileError(f"{self.path}: {error.strerror}") from error

    def _lock(self, file: BinaryIO) -> None:
        """Lock a file until it is closed; ResultsFileError if another process has locked it. On a file system without
        locks, do nothing."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._taken() from None
        except OSError:
            pass

    def _taken(self) -> ResultsFileError:
        return ResultsFileError(f"{self.path}: another run is writing to it")

    def _index(self) -> None:
        offset = 0
        for number, line in enumerate(self._file, 1):
            place, offset = (offset, len(line)), offset + len(line)
            if not line.endswith(b"\n"):
                self._dropped = True
                break
            try:
                entry = json.loads(line)
                of, digest = int(entry["line"]), str(entry["request"])
            except (ValueError, KeyError, TypeError, RecursionError):
                raise ResultsFileError(f"{self.path}:{number}: is not a result of this command") from None
            if "error" in entry:
                self._dropped = True
            else:
                self._places[of], self._digests[of] = place, (number, digest)

    def _rewrite(self) -> None:
        """Atomically replace the file by one that contains only the known results, in order."""
        beside = self.path.with_name(self.path.name + ".new")
        places: dict[int, tuple[int, int]] = {}
        new = beside.open("wb+")
        try:
            self._lock(new)  # before another process can open it by the file's name
            os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(self._file.fileno()).st_mode))
            for line in sorted(self._places):
                offset, length = self._places[line]
                self._file.seek(offset)
                places[line] = (new.tell(), length)
                new.write(self._file.read(length))
            new.flush()
            os.fsync(new.fileno())
            os.replace(beside, self.path)
        except BaseException:
            beside.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # closing flushes, which fails on a full disk
                new.close()
            raise
        self._file.close()
        self._file, self._places, self._dropped = new, places, False
