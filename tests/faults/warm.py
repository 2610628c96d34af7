"""Importing this module takes the ten seconds of imports and compilation that each verifier would otherwise need."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.onnx_runtime import ort  # noqa: F401 - for drafts
from tests.models import make

torch.set_num_threads(1)  # a process forked from a multi-threaded one would wait for threads it does not have

with tempfile.TemporaryDirectory() as directory:
    CpuEngine(ModelDirectory(make("llama", Path(directory))), capacity=2048)
