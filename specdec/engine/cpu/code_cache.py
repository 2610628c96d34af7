"""Compiled loops in the cache folder, so that only the first start on a machine compiles them.

Numba's own cache checks only the time and size of the file that defines a function, and has no key for functions that
close over others, as ours do. Here the key consists of the name and file passed to `kept`, the arguments' types, the
processor, Numba's settings, and all our sources with the versions of their dependencies (`engine/cache_folder.py`). The
code is cacheable because it refers to external functions by name: it contains no address of this process.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import structlog
from numba.core.caching import _Cache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from specdec.engine import cache_folder

log = structlog.get_logger()


def kept(name: str, file: str, dispatcher: Any) -> Any:
    """Attach the cache folder to a compiled function, defined in `file`, and return the function. `name` must be
    unique, so it must include every constant compiled in, such as a width."""
    dispatcher._cache = CodeCache(name, file)
    return dispatcher


class CodeCache(_Cache):  # type: ignore[misc]
    """The code of one function, for each signature it is called with."""

    def __init__(self, name: str, file: str) -> None:
        self._name, self._file = name, file

    @property
    def cache_path(self) -> str:
        return str(cache_folder.place())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the function for this signature; None if it must be compiled."""
        target_context.refresh()
        data = cache_folder.read("code", *self._key(sig, target_context.codegen()))
        if data is None:
            return None
        try:
            return CompileResult._rebuild(target_context, *pickle.loads(data))
        except Exception as error:  # unpickling may raise anything; compiling again always works
            log.warning("code_not_loaded", function=self._name, why=f"{type(error).__name__}: {error}")
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        if data.lifted or data.library.has_dynamic_globals:  # contains addresses of this process
            log.warning("code_not_kept", function=self._name)
            return
        cache_folder.write(dumps(data._reduce()), "code", *self._key(sig, data.codegen))

    def enable(self) -> None:
        """Do nothing: the cache is on whenever there is a folder."""

    disable = flush = enable

    def _key(self, sig: Any, codegen: Any) -> tuple[object, ...]:
        settings = sorted((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_"))
        return self._name, _content(self._file), str(sig), codegen.magic_tuple(), settings


@functools.cache
def _content(file: str) -> str:
    """Return a digest of the file that defines a function, which need not be among the engines' sources."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
