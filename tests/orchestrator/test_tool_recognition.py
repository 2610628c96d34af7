"""A model's tool format is detected from a call rendered by its own chat template."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.requests.model import ServedModel
from specdec.engine.model_directory import ModelDirectory
from specdec.wire.tool_formats import GRANITE, HERMES, LLAMA, MISTRAL_ARGS, ToolFormat
from tests.models import make
from tests.text.conversations import model_with
from tests.tool_templates import TEMPLATES

TELLING = "{% if tools %}{{ tools | tojson }}{% endif %}"
TOLD = TELLING + "{% for m in messages %}{{ m.content }}"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make("llama", tmp_path_factory.mktemp("models") / "m")
    (directory / "model.safetensors").unlink()
    return directory


def found(source: Path, directory: Path, **templates: str) -> ToolFormat | None:
    model = model_with(source, directory, {}, chat_template=templates)
    assert isinstance(model, ServedModel), model
    return model.tool_format


@pytest.mark.parametrize("tool_format", list(TEMPLATES), ids=lambda each: each.name)
def test_each_format_is_recognised(source: Path, tmp_path: Path, tool_format: ToolFormat) -> None:
    assert found(source, tmp_path / "m", default=TEMPLATES[tool_format]) == tool_format


def test_the_template_of_the_examples_calls_tools(source: Path) -> None:
    template = Path(__file__).parents[2] / "examples" / "tools.jinja"
    assert ServedModel.of(ModelDirectory(source)).tool_format is None
    assert ServedModel.of(ModelDirectory(source), chat_template=template).tool_format == HERMES


FORMS: dict[str, tuple[str, ToolFormat | None]] = {
    "spaced": ("<tool_call> FUNCTION</tool_call>", HERMES),
    "with ids": ("[TOOL_CALLS]NAME[CALL_ID]{{ c.id }}[ARGS]ARGUMENTS", MISTRAL_ARGS),
    "refused": ("{% if m.content %}a{% else %}{{ raise_exception('no') }}{% endif %}", None),
    "like Python": ("<tool_call>NAME(ARGUMENTS)</tool_call>", None),
    "list": ("<tool_calls>[FUNCTION]</tool_calls>", None),
    "fence": ("```json\nFUNCTION\n```", None),
    "behind text": ('call: {"name": "NAME", "parameters": ARGUMENTS}', None),
    "mentioned": ("Not <tool_call>, nor [TOOL_CALLS]", None),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_that_differ(source: Path, tmp_path: Path, name: str) -> None:
    """Formats are recognized up to white space; no other variation is guessed."""
    call, wanted = FORMS[name]
    for word, expression in (
        ("NAME", "{{ c.function.name }}"),
        ("ARGUMENTS", "{{ c.function.arguments | tojson }}"),
        ("FUNCTION", "{{ c.function | tojson(indent=2) }}"),
    ):
        call = call.replace(word, expression)
    template = TOLD + "{% for c in m.tool_calls %}" + call + "{% endfor %}{% endfor %}"
    assert found(source, tmp_path / "m", default=template) == wanted
    untold = template.removeprefix(TELLING)
    assert found(source, tmp_path / "untold", default=untold) is None


def test_a_template_that_tells_how_to_call_but_writes_no_calls(source: Path, tmp_path: Path) -> None:
    assert found(source, tmp_path / "m", default=TOLD + "{% endfor %} Begin with <|tool_call|>.") == GRANITE
    assert found(source, tmp_path / "other", default=TOLD + "{% endfor %} Begin with <tool_call>.") is None


def test_the_template_for_tools_decides(source: Path, tmp_path: Path) -> None:
    templates = {"default": TEMPLATES[HERMES], "tool_use": TEMPLATES[LLAMA]}
    assert found(source, tmp_path / "m", **templates) == LLAMA
