"""The additional files of an exported model: broken ones are refused in one line that names the fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest

from specdec.engine.model_directory import COPY_GRAPH, DESCRIPTION, GRAPH, ModelDirectory
from specdec.engine.onnx.engine import OnnxEngine
from specdec.engine.onnx.export import copy_graph
from tests.engine.broken_directories import CONFIG, ODD_FILES, become, edit, refused
from tests.models import VOCABULARY


class TestExport:
    """The additional files of an exported model."""

    @pytest.fixture
    def exported(self, directory: Path) -> Path:
        """An export that computes nothing, as large as a real one where size matters."""
        pools = {"key_0": [2, 16], "value_0": [2, 16]}
        taken = {"all": ["n", VOCABULARY]} | {name: ["s", *sizes] for name, sizes in pools.items()}
        given = {"logits": "all"} | {f"new_{name}": name for name in pools}
        tensor = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node("Identity", [source], [name]) for name, source in given.items()],
            "model",
            [tensor(name, onnx.TensorProto.FLOAT, sizes) for name, sizes in taken.items()],
            [tensor(name, onnx.TensorProto.FLOAT, taken[source]) for name, source in given.items()],
        )
        opset = onnx.helper.make_opsetid("", 23)
        onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), directory / GRAPH)
        onnx.save(copy_graph("float32"), directory / COPY_GRAPH)
        description = {"dtype": "float32", "pools": [[2, 16, 16]], "window": None}
        (directory / DESCRIPTION).write_text(json.dumps(description))
        assert self.engine(directory).vocabulary == VOCABULARY
        return directory

    def engine(self, directory: Path) -> OnnxEngine:
        return OnnxEngine(ModelDirectory(directory), capacity=64, threads=1)

    @pytest.mark.parametrize("name", [GRAPH, COPY_GRAPH, DESCRIPTION])
    @pytest.mark.parametrize("kind", ["directory", "fifo"])
    def test_odd_files(self, exported: Path, name: str, kind: str) -> None:
        making, said = ODD_FILES[kind]
        become(name, making)(exported)
        assert refused(lambda: self.engine(exported)) == f"{exported / name}: {said}"

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"pools": [[2, float("inf"), 16]]}, "damaged"),
            ({"window": "x"}, "damaged"),
            ({"window": [1]}, "damaged"),
        ],
    )
    def test_odd_descriptions(self, exported: Path, fields: dict[str, Any], said: str) -> None:
        edit(DESCRIPTION, **fields)(exported)
        assert refused(lambda: self.engine(exported)).startswith(f"{exported / DESCRIPTION}: {said}")

    def test_a_description_that_is_nested_deeply(self, exported: Path) -> None:
        (exported / DESCRIPTION).write_bytes(b"[" * 100_000)
        assert "nested too deeply" in refused(lambda: self.engine(exported))

    @pytest.mark.parametrize(
        ("file", "fields", "said"),
        [
            (
                DESCRIPTION,
                {"pools": [[2, -16, 16]]},
                "key_0 has the shape [2, 16], must have [2, -16] as in specdec.json",
            ),
            (
                DESCRIPTION,
                {"pools": [[2, 16, 16]] * 2},
                "key_1 has the shape None, must have [2, 16] as in specdec.json",
            ),
            (CONFIG, {"vocab_size": 640}, "logits has the shape [320], must have [640] as in config.json"),
        ],
    )
    def test_a_graph_of_other_sizes(self, exported: Path, file: str, fields: dict[str, Any], said: str) -> None:
        edit(file, **fields)(exported)
        assert refused(lambda: self.engine(exported)) == f"{exported / GRAPH}: {said}"
