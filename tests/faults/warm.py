"""Importing this takes the ten seconds that every verifier would take to import and compile what it computes with."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnxruntime  # noqa: F401 - for drafts
import torch

from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.model_directory import ModelDirectory
from tests.models import make

torch.set_num_threads(1)  # what is forked from a process with more would wait for threads it has not

with tempfile.TemporaryDirectory() as directory:
    CpuEngine(ModelDirectory(make("llama", Path(directory))), capacity=2048)
