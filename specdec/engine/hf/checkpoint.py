"""The part of a model directory that transformers sees: the configuration without references to code, and the
safetensors.

In a directory, transformers would also look at pickles, adapters, the model's own code, and checkpoints of training
runs. So it gets a private folder instead, with links to the checked files.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from specdec.engine.model_directory import INDEX, WEIGHTS, WEIGHTS_FIELD, ModelDirectory

NAMES_CODE = frozenset(
    {
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "auto_map",
        "custom_generate",
        "custom_pipelines",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
        "kernel_config",
        "use_kernels",
        "_use_kernels",
        WEIGHTS_FIELD,
    }
)
"""Fields of a configuration, at any depth, that select the code that runs a model, or the file of its weights: we
decide both."""

log = structlog.get_logger()


@contextmanager
def vetted(directory: ModelDirectory) -> Iterator[Path]:
    """Yield a temporary folder with the loadable part of a directory."""
    with tempfile.TemporaryDirectory(prefix="specdec-checkpoint-") as name:  # mode 0700
        folder = Path(name)
        ignored: set[str] = set()
        config = without_code(directory.whole_config, ignored)
        if foreign := sorted(field for field in ignored if field != WEIGHTS_FIELD):
            log.info("configuration_fields_ignored", model=directory.name, fields=foreign)
        (folder / "config.json").write_text(json.dumps(config))
        index, files = directory.safetensors()
        for file in files:
            single = index is None and len(files) == 1
            (folder / (WEIGHTS if single else file.name)).symlink_to(file.absolute())
        if index is not None:
            (folder / INDEX).symlink_to(index.absolute())
        yield folder


def without_code(config: dict[str, Any], ignored: set[str]) -> dict[str, Any]:
    """Return a configuration without the fields in NAMES_CODE, at any depth, and add their names to `ignored`."""
    ignored |= {name for name in config if name in NAMES_CODE}
    return {
        name: without_code(value, ignored) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in NAMES_CODE
    }
