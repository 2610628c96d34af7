"""The folder in which wrong commands run: a pair of models, incomplete copies of them, and prompt files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from specdec.engine.gguf_file import MARKER
from specdec.engine.model_directory import DESCRIPTION
from specdec.training.files import PLAN
from tests.models import make


def furnish(folder: Path) -> None:
    """Write `target` and `draft`, broken copies of `target` named by their defect, derived models, a begun
    training, and prompt files."""
    target = make("llama", folder / "target")
    make("llama", folder / "draft", seed=1, num_hidden_layers=1)

    def broken(name: str) -> Path:
        return Path(shutil.copytree(target, folder / name))

    def configured(name: str, **fields: Any) -> None:
        file = broken(name) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    (folder / "empty").mkdir()
    (broken("no-tokenizer") / "tokenizer.json").unlink()
    (broken("no-weights") / "model.safetensors").unlink()
    (broken("half-a-config") / "config.json").write_text('{"model_type": "llama", ')
    weights = broken("cut-weights") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    (broken("no-safetensors") / "model.safetensors").write_bytes(b"not weights at all")
    (broken("bad-template") / "chat_template.jinja").write_text("{% if messages %}")
    (broken("too-cold") / "generation_config.json").write_text('{"do_sample": true, "temperature": -1}')
    configured("mamba", model_type="mamba")
    configured("magic", quantization_config={"quant_method": "magic"})
    configured("short", max_position_embeddings=8)
    tokenizer = broken("foreign") / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["added_tokens"][0]["content"] = "<other>"
    tokenizer.write_text(json.dumps(content))

    (folder / "prompts.jsonl").write_text('{"text": "def main("}\n')
    (folder / "no-json.jsonl").write_text('{"text": "def main("}\ndef main(\n')
    (folder / "typo.jsonl").write_text('{"text": "def main(", "temprature": 1}\n')
    (folder / "typo.yaml").write_text("model: target\nkv-token: 4096\n")
    (folder / "few.yaml").write_text("model: target\nkv-tokens: 9\n")
    revision = "{directory: target, verifiers: ['big:1']}"
    (folder / "models.yaml").write_text(f"models: {{big: {{revisions: {{a: {revision}, b: {revision}}}}}}}\n")
    (folder / "big.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    (folder / "dangling").symlink_to("gone")
    for derived, marker in (("onnx", DESCRIPTION), ("converted", MARKER)):
        (folder / derived).mkdir()
        (folder / derived / marker).write_text("{}")
    shutil.copytree(target, folder / "onnx" / "target")
    (folder / "converted" / "a.gguf").write_bytes(b"GGUF\3\0\0\0")
    (folder / "begun").mkdir()
    (folder / "begun" / PLAN).write_text("{}")
    (folder / "notes").mkdir()
    (folder / "notes" / "readme.txt").write_text("Mine.\n")
