"""A model's chat template: where it is found, and how it is compiled, to run in a sandbox."""

from __future__ import annotations

import json
from pathlib import Path

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.engine.model_directory import ModelDirectoryError
from specdec.engine.model_file import Fields, in_one_line, read_text


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which marks the assistant's turns for training: rendered as its content alone."""

    tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compiled(source: str | None, file: Path) -> Template | None:
    """Compile the template, with the functions and filters that transformers gives to templates."""
    if source is None:
        return None

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.globals["raise_exception"] = refuse
    del environment.filters["random"], environment.globals["lipsum"]  # a conversation is the same prompt everywhere
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    try:
        return environment.from_string(source)
    except Exception as error:  # of the template's syntax, or of the Python that it is made into
        raise ModelDirectoryError(f"{file}: the chat template cannot be compiled: {in_one_line(error)}") from error


def template_of(file: Path, settings: Fields) -> tuple[str | None, Path]:
    """Read the template, if there is one, from its own file, else from tokenizer_config.json, where it may be a list
    of named ones. Return also which file it is from."""
    source = read_text(file)
    if source is not None or not settings.has("chat_template"):
        return source, file
    if not isinstance(settings.content["chat_template"], list):
        return settings.text("chat_template"), settings.file
    named = {entry.text("name"): entry.text("template") for entry in settings.objects("chat_template")}
    if "default" not in named:
        raise settings.refusal("chat_template", "a template, or a list of named ones with one of the name default")
    return named["default"], settings.file
