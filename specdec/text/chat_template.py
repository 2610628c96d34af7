"""A model's chat templates: finds them, and renders them in a sandbox.

The environment is transformers' own (`transformers.utils.chat_template_utils`), rebuilt here because the orchestrator
does not install transformers; `tests/text/test_published_templates.py` compares every rendering. The copy differs in
two points, so that the same conversation gives the same prompt everywhere: it uses the request's clock, and has no
random numbers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from specdec.engine.model_file import Fields, ModelDirectoryError, in_one_line, read_fields, read_text

FILE = "chat_template.jinja"
TEMPLATES_FOLDER = "additional_chat_templates"
"""Further templates, by name: `TEMPLATES_FOLDER/tool_use.jinja`."""

PROCESSOR_FILES = ("processor_config.json", "chat_template.json")
"""Files of processors, in which some models publish their template instead of in the tokenizer's files."""

DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the general template, and of the template that replaces it for conversations with tools."""

MAX_TEMPLATES = 64
"""Maximum named templates of a model; published models have at most three."""

RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "strftime_now")
"""Variables of the conversation itself, which arguments cannot set."""

CONTINUED = "\ue000continued\ue000"
"""A marker that is appended, for rendering, to a message that is to be continued. The template may trim white space or
end the turn after it, so only the output before the marker is used."""

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of a turn's reasoning; the first one present is used."""


class ChatTemplates:
    """The templates of a model, by name."""

    def __init__(self, sources: Mapping[str, str], files: Mapping[str, Path]) -> None:
        """Compile the templates used by requests; ModelDirectoryError if one does not compile."""
        self.sources = dict(sources)
        self._for_tools = TOOL_USE if TOOL_USE in sources else DEFAULT
        self._templates = {name: _compiled(sources[name], files[name]) for name in {DEFAULT, self._for_tools}}

    def mentions(self, text: str) -> bool:
        """Return True if a template used by requests contains this text."""
        return any(text in self.sources[name] for name in self._templates)

    @property
    def takes_tools(self) -> bool:
        """True if the template for conversations with tools reads them."""
        parsed = _environment().parse(self.sources[self._for_tools])
        return any(name.name == "tools" for name in parsed.find_all(nodes.Name))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        time: datetime,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
        continues: bool = False,
    ) -> str:
        """Render the prompt of the assistant's next turn, at this time; exceptions of the template propagate.
        `generation_prompt`: end with the start of that turn. If the text `continues` the last message, the prompt ends
        with that message's content."""
        template = self._templates[DEFAULT if tools is None else self._for_tools]
        turns = [_turn(message) for message in messages]
        if continues:
            turns[-1]["content"] += CONTINUED
        _rendering.left = MAX_ACCESSES
        text = template.render(
            variables,
            messages=turns,
            tools=None if tools is None else [dict(tool) for tool in tools],
            documents=None,
            add_generation_prompt=generation_prompt and not continues,
            strftime_now=time.strftime,
        )
        if not continues:
            return text
        prompt, *rest = text.split(CONTINUED)
        if len(rest) != 1:
            _refuse("the last message cannot be continued: the template does not write its content exactly once")
        return prompt


def _turn(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a turn as templates expect it: without null fields, and with its reasoning under each name in use."""
    turn = {name: value for name, value in message.items() if value is not None}
    reasoning = next((turn[name] for name in REASONING_FIELDS if name in turn), None)
    return turn if reasoning is None else {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def templates_of(directory: Path, settings: Fields, given: Path | None = None) -> ChatTemplates | None:
    """Read the templates of a model with this tokenizer_config.json; None if it has none. As in transformers, separate
    template files override tokenizer_config.json; a processor's template has the lowest priority. The file `given`
    replaces all of them."""
    if given is not None:
        source = read_text(given)
        if source is None:
            raise ModelDirectoryError(f"{given}: no such file")
        return ChatTemplates({DEFAULT: source}, {DEFAULT: given})
    found = _own_files(directory) or _of_field(settings)
    for name in PROCESSOR_FILES:
        found = found or _of_processor(directory / name)
    if not found:
        return None
    if DEFAULT not in found:
        _, file = next(iter(found.values()))
        raise ModelDirectoryError(
            f"{file}: chat_template has {', '.join(sorted(found))[:100]}, must be a template, "
            f"or named ones with one of the name {DEFAULT}"
        )
    sources = {name: source for name, (source, _) in found.items()}
    return ChatTemplates(sources, {name: file for name, (_, file) in found.items()})


_Found = dict[str, tuple[str, Path]]


def _own_files(directory: Path) -> _Found:
    folder = directory / TEMPLATES_FOLDER
    try:
        names = sorted(file.name for file in folder.iterdir() if file.suffix == ".jinja")
    except (FileNotFoundError, NotADirectoryError):
        names = []
    except OSError as error:
        raise ModelDirectoryError(f"{folder}: cannot be read: {error.strerror or error}") from error
    _check_number(folder, len(names))
    files = {name.removesuffix(".jinja"): folder / name for name in names}
    if files.get(DEFAULT) is None:
        files[DEFAULT] = directory / FILE
    return {name: (source, file) for name, file in files.items() if (source := read_text(file)) is not None}


def _of_field(settings: Fields) -> _Found:
    """Read the field `chat_template`: a template, a list of named ones, or an object of them."""
    if not settings.has("chat_template"):
        return {}
    field = settings.content["chat_template"]
    match field:
        case list():
            _check_number(settings.file, len(field))
            entries = settings.objects("chat_template")
            found = {entry.text("name"): entry.text("template") for entry in entries}
        case dict():
            _check_number(settings.file, len(field))
            entry = settings.fields("chat_template")
            found = {name: entry.text(name) for name in field}
        case _:
            found = {DEFAULT: settings.text("chat_template")}
    return {name: (source, settings.file) for name, source in found.items()}


def _of_processor(file: Path) -> _Found:
    fields = read_fields(file)
    return {} if fields is None else _of_field(fields)


def _check_number(place: Path, number: int) -> None:
    if number > MAX_TEMPLATES:
        raise ModelDirectoryError(f"{place}: has {number} chat templates, must have at most {MAX_TEMPLATES}")


def _compiled(source: str, file: Path) -> Template:
    try:
        return _environment().from_string(source)
    except Exception as error:  # in the template's syntax, or in the Python generated from it
        raise ModelDirectoryError(f"{file}: the chat template cannot be compiled: {in_one_line(error)}") from error


class _GenerationTag(Extension):
    """The tag `{% generation %}`, a training mark around the assistant's turns: only its content is rendered. The
    content has its own scope, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 (as jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        return caller()


class _TemplateDict:
    """The function `dict`, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _TemplateNamespace(Namespace):
    """The function `namespace`, whose attributes cannot begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` is in args: a template may have an attribute of that name
        self, *others = args
        attributes = dict(*others, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"an attribute of a namespace cannot begin with an underscore: {name!r}")


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return JSON without the HTML escapes of jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


MAX_ACCESSES = 500_000
"""Maximum accesses to attributes and items, and calls, while a conversation is rendered: some tenths of a second.
Published templates need fewer than 30 per message, but the time of some is quadratic in the number of messages."""

_rendering = threading.local()


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a budget of accesses."""

    def getitem(self, obj: Any, argument: Any) -> Any:
        _spend()
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        _spend()
        return super().getattr(obj, attribute)

    def call(__self, *args: Any, **kwargs: Any) -> Any:
        _spend()
        return super().call(*args, **kwargs)


def _spend() -> None:
    _rendering.left = getattr(_rendering, "left", MAX_ACCESSES) - 1
    if _rendering.left < 0:
        _refuse("the conversation takes too long to render: send fewer messages")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"raise_exception": _refuse, "dict": _TemplateDict(), "namespace": _TemplateNamespace}
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = _to_json
    return environment
