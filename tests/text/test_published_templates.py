"""Published chat templates render as by transformers, and their tool formats are recognized.

The templates are in llama.cpp's sources, unpacked by `make llama-sources`; none is part of this project.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer

from orchestrator.requests.model import ServedModel
from tests.models import make
from tests.text.conversations import CONVERSATIONS, Refused, RefusedByRule, by_transformers, by_us, model_with

FOLDER = Path("build/llama/source/vendor/llama.cpp/models/templates")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs llama.cpp's sources: make llama-sources")


def test_six_conversations_with_every_template(tmp_path: Path) -> None:
    source = make("llama", tmp_path / "source")
    (source / "model.safetensors").unlink()
    tokenizer = FastTokenizer.from_file(str(source / "tokenizer.json"))
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for file in sorted(FOLDER.glob("*.jinja")):
        template = file.read_text(encoding="utf-8")
        model = model_with(source, tmp_path / file.stem, {"chat_template.jinja": template})
        for conversation in CONVERSATIONS:
            wanted, found = by_transformers(tokenizer, template, conversation), by_us(model, conversation)
            if isinstance(found, RefusedByRule):
                kind = "refused by rule"
            elif isinstance(found, Refused):
                kind = "refused by both" if isinstance(wanted, Refused) else "refused here alone"
            elif isinstance(wanted, Refused):
                kind = "refused by transformers alone"
            else:
                kind = "equal" if found == wanted else "other text"
            counts[kind] += 1
            if kind not in ("equal", "refused by both", "refused by rule"):
                wrong.append(f"{file.stem}, {conversation.name}: {kind}: {found[:200]!r} instead of {wanted[:200]!r}")
    print(dict(counts))
    assert not wrong, "\n".join(wrong)
    assert counts["equal"] > counts.total() / 2


FORMATS = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral_args",
    "unsloth-mistral-Devstral-Small-2507": "mistral_args",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "Qwen3-Coder": "qwen3_coder",
    "ByteDance-Seed-OSS": "seed_oss",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm47",
    "MiniMax-M2": "minimax_m2",
    # The calls of these models use marks of the formats above, but in another form.
    "MiniMax-M1": None,
    "MiniMax-M3": None,
    "unsloth-Apriel-1.5": None,
    "google-gemma-2-2b-it": None,
}


@pytest.mark.parametrize(("name", "wanted"), FORMATS.items())
def test_the_tool_format_of_published_templates(tmp_path: Path, name: str, wanted: str | None) -> None:
    source = make("llama", tmp_path / "source")
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    model = model_with(source, tmp_path / "m", {"chat_template.jinja": template})
    assert isinstance(model, ServedModel)
    assert (model.tool_format and model.tool_format.name) == wanted
