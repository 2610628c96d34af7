"""The tokenizer in requests: nothing is truncated silently, and templates get the same values as in transformers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.text.tokenizer import ChatTemplateError, Tokenizer
from tests.models import make

NOON = datetime(2024, 2, 29, 12, tzinfo=UTC)


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make("llama", tmp_path / "m")


def with_template(directory: Path, template: str) -> Tokenizer:
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Tokenizer(ModelDirectory(directory))


def test_a_truncation_left_in_the_file_is_not_obeyed(directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (directory / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(ModelDirectory(directory))
    assert tokenizer.decode(tokenizer.encode("a long enough text")) == "a long enough text"


def test_templates_have_what_transformers_gives_them(directory: Path) -> None:
    tokenizer = with_template(
        directory,
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}{{ m.content | tojson }}"
        "{% generation %}!{% endgeneration %}{% endfor %}{{ eos_token }}{{ strftime_now('%d %b %Y %H:%M %Z') }}",
    )
    assert tokenizer.render(said(("user", "é<b>"), ("skip", "x")), NOON) == '"é<b>"!</s>29 Feb 2024 12:00 UTC'


def test_a_template_takes_arguments(directory: Path) -> None:
    tokenizer = with_template(directory, "{{ depth | default(1) }} {{ self }} {{ messages[0].content }}")
    assert tokenizer.render(said(("user", "x")), NOON, {"depth": 2, "self": 3}).startswith("2 ")
    assert tokenizer.render(said(("user", "x")), NOON).startswith("1 ")


@pytest.mark.parametrize("name", ["messages", "strftime_now", "add_generation_prompt", "eos_token", "tools"])
def test_no_argument_takes_the_place_of_what_is_ours(directory: Path, name: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"'{name}' cannot be set"):
        with_template(directory, "{{ messages }}").render(said(("user", "x")), NOON, {name: "x"})


@pytest.mark.parametrize("template", ["{{ raise_exception('only users') }}", "{{ messages[5].content.strip() }}"])
def test_a_template_may_refuse(directory: Path, template: str) -> None:
    with pytest.raises(ChatTemplateError, match="template failed"):
        with_template(directory, template).render(said(("system", "x")), NOON)


def test_a_template_cannot_reach_outside(directory: Path) -> None:
    with pytest.raises(ChatTemplateError):
        with_template(directory, "{{ ''.__class__.__mro__[1].__subclasses__() }}").render(said(("user", "x")), NOON)


def test_a_broken_template_stops_the_start(directory: Path) -> None:
    with pytest.raises(ModelDirectoryError, match="chat template"):
        with_template(directory, "{% for %}")


@pytest.mark.parametrize("template", ["{{ [1, 2] | random }}", "{{ lipsum() }}"])
def test_a_template_that_draws_lots_is_refused(directory: Path, template: str) -> None:
    """The same conversation would give different prompts."""
    with pytest.raises((ModelDirectoryError, ChatTemplateError)):
        with_template(directory, template).render(said(("user", "x")), NOON)


def test_no_template_is_said(directory: Path) -> None:
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer(ModelDirectory(directory))
    assert tokenizer.chat_templates is None
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render(said(("user", "x")), NOON)
