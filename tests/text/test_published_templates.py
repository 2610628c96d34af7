"""Published chat templates render as transformers renders them. They are those that llama.cpp's sources carry, which
`make llama-sources` unpacks; none of them is part of this project."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer

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
