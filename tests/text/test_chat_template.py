"""Chat templates are found, selected and rendered as by transformers; templates of these tests cover each feature."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer as FastTokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from orchestrator.requests.model import ServedModel
from specdec.engine.model_directory import ModelDirectory
from specdec.text.chat_template import ChatTemplates
from specdec.text.special_tokens import OF_ARCHITECTURE, OF_CLASS, STANDARD
from specdec.text.tokenizer import ChatTemplateError, Tokenizer
from tests.cpu_time import taking_less_than
from tests.models import make
from tests.text.conversations import ASKED, CONVERSATIONS, TOOLS, Refused, by_transformers, by_us, model_with, said

NOON = datetime(2024, 2, 29, 12, tzinfo=UTC)

EACH = "{% for m in messages %}"
FEATURES = {
    "ascii": "{{ [messages[0].content, '<é>'] | tojson(ensure_ascii=True) }}",
    "not ascii": "{{ messages[0].content | tojson(ensure_ascii=False) }}",
    "separators": "{{ messages | tojson(separators=(',', ':')) }}",
    "sorted": "{{ messages | tojson(sort_keys=True, indent=2) }}",
    "positional": "{{ messages | tojson(true, 4) }}",
    "tools is not none": "{% if tools is not none %}tools{% endif %}",
    "tools is none": "{{ tools is none }} {{ tools is defined }} {{ documents is none }} {{ documents is defined }}",
    "tools": "{{ tools | tojson }}",
    "all of a turn": EACH + "{{ m | tojson }}{% endfor %}",
    "special tokens": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ cls_token is defined }}",
    "generation": EACH + "{% generation %}\n  {{ m.content }}\n{% endgeneration %}{% endfor %}",
    "generation is a scope": EACH + "{% generation %}{% set a = 1 %}{% endgeneration %}{{ a is defined }}{% endfor %}",
    "no loop control in a generation": EACH + "{% generation %}{% break %}{% endgeneration %}{% endfor %}",
    "loop controls": EACH + "{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}{% endfor %}",
    "refusal": "{{ raise_exception('only users') }}",
    "blocks": "  {% if true %}\n  a\n  {% endif %}\nb",
    "dict": "{% set d = dict(a=1, b=messages[0].role) %}{{ d.a }}{{ d['b'] }}{{ dict.fromkeys(['x'], 1) }}",
    "type of dict": "{{ dict.mro }}",
    "namespace": "{% set n = namespace(a=1) %}" + EACH + "{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}",
    "namespace named self": "{% set n = namespace(self=1) %}{{ n.self }}",
    "underscores": "{% set n = namespace(_a=1) %}",
    "underscore set": "{% set n = namespace() %}{% set n._a = 1 %}",
    "macro": "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ bos_token }}{% endmacro %}{{ f(messages | length) }}",
    "mutable list": "{% set l = [] %}{{ l.append(1) }}",
    "sandbox": "{{ ''.__class__.__mro__ }}",
    "no argument": "{{ enable_thinking is defined and enable_thinking is false }}",
    "reasoning": EACH + "{{ m.reasoning_content }}|{{ m.thinking }}{% endfor %}",
    "missing": EACH + "{{ m.content.nothing }}{{ m.nothing.at_all }}{% endfor %}",
    "prompt": "{% if add_generation_prompt %}assistant:{% endif %}",
    "calls": EACH
    + "{% for c in m.tool_calls %}{{ c.function.arguments | items | list }}{{ c.id }}{% endfor %}{% endfor %}",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make("llama", tmp_path_factory.mktemp("models") / "m")
    (directory / "model.safetensors").unlink()
    return directory


def library(source: Path) -> FastTokenizer:
    return FastTokenizer.from_file(str(source / "tokenizer.json"))


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_renders_as_in_transformers(source: Path, tmp_path: Path, name: str) -> None:
    model = model_with(source, tmp_path / "m", {"chat_template.jinja": FEATURES[name] + " {{ tools is defined }}"})
    for conversation in CONVERSATIONS:
        wanted = by_transformers(library(source), FEATURES[name] + " {{ tools is defined }}", conversation)
        found = by_us(model, conversation)
        assert isinstance(found, Refused) == isinstance(wanted, Refused), (conversation.name, wanted, found)
        assert isinstance(wanted, Refused) or found == wanted, conversation.name


def test_reasoning_has_each_name_that_a_template_may_read(source: Path, tmp_path: Path) -> None:
    template = EACH + "{{ m | tojson }}{% endfor %}"
    model = model_with(source, tmp_path / "m", {"chat_template.jinja": template})
    assert isinstance(model, ServedModel)
    for fields in ({"reasoning": "a"}, {"thinking": "a"}, {"reasoning_content": "a", "thinking": "b"}, {"name": None}):
        turn = said("assistant", "x", **fields)
        own = PreTrainedTokenizerFast(tokenizer_object=library(source), chat_template=template)
        wanted = own.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
        assert model.tokenizer.render([turn], NOON) == wanted


def test_the_clock_is_the_requests(source: Path, tmp_path: Path) -> None:
    model = model_with(source, tmp_path / "m", {"chat_template.jinja": "{{ strftime_now('%d %b %Y %H:%M %Z') }}"})
    assert isinstance(model, ServedModel)
    assert model.tokenizer.render([ASKED], NOON) == "29 Feb 2024 12:00 UTC"


TOOL_USE = "{% if tools %}{% endif %}with tools"
NAMED = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": TOOL_USE}]
FOLDER = "additional_chat_templates"
PLACES: dict[str, tuple[dict[str, str], object]] = {
    "file": ({"chat_template.jinja": "file"}, "field"),
    "field": ({}, "field"),
    "list": ({}, NAMED),
    "object": ({}, {"default": "plain", "tool_use": TOOL_USE, "rag": "{% never read"}),
    "list without tool_use": ({}, [{"name": "default", "template": "{{ tools is none }}"}]),
    "folder": ({"chat_template.jinja": "plain", f"{FOLDER}/tool_use.jinja": TOOL_USE}, None),
    "folder and field": ({"chat_template.jinja": "file", f"{FOLDER}/rag.jinja": "rag"}, NAMED),
    "folder alone": ({f"{FOLDER}/default.jinja": "plain", f"{FOLDER}/tool_use.jinja": TOOL_USE}, "field"),
}


@pytest.mark.parametrize("place", PLACES)
def test_templates_are_found_where_transformers_finds_them(source: Path, tmp_path: Path, place: str) -> None:
    files, template = PLACES[place]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    model = model_with(source, tmp_path / "m", files, **settings)
    assert isinstance(model, ServedModel), model
    own = AutoTokenizer.from_pretrained(tmp_path / "m")
    for tools in (None, TOOLS):
        wanted = own.apply_chat_template([ASKED], tools=tools, tokenize=False, add_generation_prompt=True)
        assert model.tokenizer.render([ASKED], NOON, tools=tools) == wanted


OLD, NEW = {"chat_template.json": '{"chat_template": "old"}'}, {"processor_config.json": '{"chat_template": "new"}'}


@pytest.mark.parametrize(
    ("files", "field", "rendered"),
    [(OLD, None, "old"), (OLD | NEW, None, "new"), (OLD | {"chat_template.jinja": "a"}, None, "a"), (OLD, "a", "a")],
)
def test_a_processors_template_comes_last(
    source: Path, tmp_path: Path, files: dict[str, str], field: str | None, rendered: str
) -> None:
    model = model_with(source, tmp_path / "m", files, chat_template=field)
    assert isinstance(model, ServedModel)
    assert model.tokenizer.render([ASKED], NOON) == rendered


def test_named_templates_without_a_default_are_refused(source: Path, tmp_path: Path) -> None:
    refusal = model_with(source, tmp_path / "m", {"additional_chat_templates/tool_use.jinja": "a"}, chat_template="b")
    file = tmp_path / "m" / "additional_chat_templates" / "tool_use.jinja"
    assert refusal == (
        f"{file}: chat_template has tool_use, must be a template, or named ones with one of the name default"
    )


def test_the_template_that_is_rendered_with_tools_shows_in_the_fingerprint(source: Path, tmp_path: Path) -> None:
    found = [
        model_with(source, tmp_path / name, {}, chat_template={"default": "a", "tool_use": name}) for name in ("b", "c")
    ]
    first, second = (each.text_fingerprint for each in found if isinstance(each, ServedModel))
    assert first != second


def check_special_tokens(directory: Path, wanted: dict[str, str]) -> None:
    """Check a template that prints all special tokens."""
    names = [*wanted, *STANDARD]
    template = "{% set all = {" + ", ".join(f"'{name}': {name}" for name in names) + "} %}"
    template += "{% for name, value in all.items() if value is defined %}{{ [name, value] | tojson }}\n{% endfor %}"
    (directory / "chat_template.jinja").write_text(template)
    rendered = Tokenizer(ModelDirectory(directory)).render([ASKED], NOON)
    assert dict(json.loads(line) for line in rendered.splitlines()) == wanted


@pytest.mark.parametrize(
    "settings",
    [
        {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "pad_token": None},
        {"bos_token": "", "sep_token": "<s>", "cls_token": "<s>", "mask_token": "<s>", "add_bos_token": True},
        {"image_token": "<s>", "extra_special_tokens": {"audio_token": "</s>"}},
        {"additional_special_tokens": ["<s>"], "boi_token": "<s>"},
        {"added_tokens_decoder": {"1": {"content": "<s>", "special": True}}, "bos_token": "<s>"},
    ],
    ids=json.dumps,
)
@pytest.mark.parametrize("older", [None, {"bos_token": "<pad>", "unk_token": {"content": "<s>"}, "video_token": "<s>"}])
def test_special_tokens_are_named_as_in_transformers(
    source: Path, tmp_path: Path, settings: dict[str, Any], older: dict[str, Any] | None
) -> None:
    directory = shutil.copytree(source, tmp_path / "m")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if older is not None:
        (directory / "special_tokens_map.json").write_text(json.dumps(older))
    check_special_tokens(directory, AutoTokenizer.from_pretrained(directory).special_tokens_map)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3_moe", *OF_ARCHITECTURE])
@pytest.mark.parametrize("name", [None, "PreTrainedTokenizerFast", "LlamaTokenizer", *OF_CLASS, "GPT2TokenizerFast"])
def test_tokens_that_no_file_names_are_those_of_transformers(
    source: Path, tmp_path: Path, architecture: str, name: str | None
) -> None:
    directory = shutil.copytree(source, tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": architecture}))
    settings = {"unk_token": "<s>", "pad_token": None} | ({} if name is None else {"tokenizer_class": name})
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    check_special_tokens(directory, AutoTokenizer.from_pretrained(directory).special_tokens_map)


def test_what_is_wrong_with_many_templates(source: Path, tmp_path: Path) -> None:
    many = [{"name": f"t{number}", "template": "a"} for number in range(65)]
    refusal = model_with(source, tmp_path / "m", {}, chat_template=many)
    assert refusal == f"{tmp_path / 'm' / 'tokenizer_config.json'}: has 65 chat templates, must have at most 64"


def test_a_template_for_tools_that_cannot_be_compiled_stops_the_start(source: Path, tmp_path: Path) -> None:
    refusal = model_with(source, tmp_path / "m", {}, chat_template={"default": "a", "tool_use": "{% for %}"})
    assert isinstance(refusal, Refused)
    assert "the chat template cannot be compiled" in refusal


def test_what_raise_exception_says_is_told(source: Path, tmp_path: Path) -> None:
    model = model_with(source, tmp_path / "m", {"chat_template.jinja": FEATURES["refusal"]})
    assert isinstance(model, ServedModel)
    with pytest.raises(ChatTemplateError, match="the model's chat template failed: only users"):
        model.tokenizer.render([ASKED], NOON)


def test_a_template_in_quadratic_time_is_ended(tmp_path: Path) -> None:
    """As some published templates are."""
    inner = "{% for i in range(messages|length) %}{% if messages[i]['role'] == 'x' %}{% endif %}{% endfor %}"
    templates = ChatTemplates({"default": f"{{% for m in messages %}}{inner}{{% endfor %}}"}, {"default": tmp_path})
    messages = [{"role": "user", "content": "a"}] * 4096
    with taking_less_than(20.0), pytest.raises(TemplateError, match="takes too long to render: send fewer messages"):
        templates.render(messages, datetime.now(UTC), {})
    assert templates.render(messages[:100], datetime.now(UTC), {}) == ""
