"""A reasoning model: a tiny one whose first two special tokens are the marks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.models import BEGIN, PAD

OPEN, CLOSE = PAD, BEGIN

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "{% if not loop.last %}\n{% endif %}{% endfor %}"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% elif opened %}<think>\n{% endif %}"
)
"""By default the model may open its reasoning itself; with `opened` the prompt opens it; with `enable_thinking`
false there is none. The start of an answer depends on the last character of the question, since tiny models look
little further back."""


def reasoning_model(source: Path, directory: Path, template: str = TEMPLATE) -> Path:
    """Copy a tiny model, and add marks that are tokens, with a template using them. As in most models, they are not
    special tokens."""
    shutil.copytree(source, directory)
    file = directory / "tokenizer.json"
    text = file.read_text().replace('"<pad>"', '"<think>"').replace('"<s>"', '"</think>"')
    tokenizer = json.loads(text)
    for token in tokenizer["added_tokens"]:
        token["special"] = token["id"] not in (OPEN, CLOSE)
    file.write_text(json.dumps(tokenizer))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {"chat_template": template, "bos_token": None, "pad_token": None}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
