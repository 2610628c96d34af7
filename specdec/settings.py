"""The settings of a service: its options, from the command line, else the environment, else a YAML file.

`--kv-tokens 4096` of the verifier is `SPECDEC_VERIFIER_KV_TOKENS=4096` in the environment, and `kv-tokens: 4096` in the
file named by `--config` or `SPECDEC_VERIFIER_CONFIG`. All are validated as on the command line. No option contains a
secret: options name files that contain secrets.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from specdec import strict_yaml, variables
from specdec.signatures import OF_CHECKER, parameters_of, with_parameters


class Settings(NamedTuple):
    """The settings of a running service."""

    values: dict[str, Any]
    sources: dict[str, str]  # for non-defaults: "command line", "environment" or the file
    unknown: list[str]  # environment variables that nothing reads


_settings: ContextVar[Settings | None] = ContextVar("settings", default=None)


def settings() -> Settings | None:
    """Return the settings of the service in this process; None if no command has started it."""
    return _settings.get()


def configurable(service: str, command: Callable[..., None]) -> Callable[..., None]:
    """Add `--config` to a service's command, and read its options also from that file and the environment."""
    prefix = variables.prefix(service)

    def read(context: typer.Context, path: Path | None) -> Path | None:
        """Set the defaults of the options that follow, from the environment and the file."""
        options = {
            parameter.name: parameter
            for parameter in context.command.params
            if not getattr(parameter, "hidden", False) and parameter.name not in ("config", "help")
        }
        found: dict[str, tuple[Any, str]] = {}
        if path is not None:
            source = context.get_parameter_source("config")
            given = f"{prefix}CONFIG" if source is not None and source.name == "ENVIRONMENT" else "--config"
            found |= {name: (value, str(path)) for name, value in _file(path, options, given).items()}
        values, unknown = _environment(prefix, options)
        found |= {name: (value, "environment") for name, value in values.items()}
        for name, (value, place) in found.items():
            spelled = f"{prefix}{name.upper()}" if place == "environment" else f"{_spelled(name)} in {place}"
            try:
                options[name].process_value(context, value)
            except typer.BadParameter as error:
                message = error.message.removeprefix(OF_CHECKER)
                message = f"{message}, is {value!r}" if str(value) not in message else message
                raise typer.BadParameter(message, param_hint=f"'{spelled}'") from None
        context.default_map = {name: value for name, (value, _) in found.items()}
        context.meta[__name__] = {name: place for name, (_, place) in found.items()}, unknown
        return path

    def run(context: typer.Context, *, config: Path | None, **given: Any) -> None:
        elsewhere, unknown = context.meta[__name__]
        named = [name for name in given if context.get_parameter_source(name).name == "COMMANDLINE"]  # type: ignore[union-attr]
        sources = elsewhere | dict.fromkeys(named, "command line")
        values = {name: value for name, value in given.items() if name in context.params}
        _settings.set(Settings(values, sources, unknown))
        command(**given)

    option = typer.Option(
        callback=read,
        is_eager=True,  # before the options whose defaults it sets
        envvar=f"{prefix}CONFIG",
        show_envvar=False,
        help="YAML file of options, such as log-level: debug. The command line takes precedence over the environment "
        f"({prefix}LOG_LEVEL for --log-level), and that over the file.",
    )
    last = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context),
        *parameters_of(command).values(),
        inspect.Parameter("config", last, default=None, annotation=Annotated[Path | None, option]),
    ]
    return with_parameters(run, parameters, command)


def check_settings(service: str, command: Callable[..., None]) -> dict[str, Any]:
    """Return the values that a service's command would take from its environment and file, by parameter name;
    typer.BadParameter if the command would refuse one."""
    made = _made(configurable(service, command))
    context = typer.Context(made, info_name=f"specdec {service}")
    (config,) = [parameter for parameter in made.params if parameter.name == "config"]
    value, source = config.consume_value(context, {})
    context.set_parameter_source("config", source)
    config.process_value(context, value)
    texts = context.default_map or {}
    found: dict[str, Any] = {}

    @functools.wraps(command)
    def keep(**values: Any) -> None:
        found.update({name: values[name] for name in texts})

    made = _made(keep)
    parameters = (parameter for parameter in made.params if parameter.name in texts)
    made.callback(**{option.name: option.process_value(context, texts[option.name]) for option in parameters})
    return found


def _made(command: Callable[..., None]) -> Any:
    """Return the command that typer makes of a function."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return typer.main.get_command(app)


def _environment(prefix: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the option values in the environment, and the variables that nothing reads, with suggestions for those
    with this prefix."""
    values: dict[str, Any] = {}
    unknown = variables.unread(os.environ)
    for variable, text in os.environ.items():
        if not variable.startswith(prefix) or not text or variable == f"{prefix}CONFIG":
            continue
        name = variable.removeprefix(prefix).lower()
        if variables.is_service_link(name.upper(), text):
            continue
        if name in options:
            values[name] = text.split() if _takes_several(options[name]) else text
        elif variable not in variables.READ:
            near = difflib.get_close_matches(name, options, 1)
            unknown.append(f"{variable} (did you mean {prefix}{near[0].upper()}?)" if near else variable)
    return values, sorted(unknown)


def _file(path: Path, options: Mapping[str, Any], given: str) -> dict[str, Any]:
    """Return the option values in a YAML file; typer.BadParameter if it is unreadable, or for anything else in it.
    `given` is the option or variable that names the file."""
    hint = f"'{given}' {path}"
    try:
        content = strict_yaml.load_text(path)
    except strict_yaml.YamlFileError as error:
        raise typer.BadParameter(str(error), param_hint=hint) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise typer.BadParameter("must be a mapping of options, such as log-level: debug", param_hint=hint)
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("-", "_")
        if name not in options:
            near = difflib.get_close_matches(name, options, 1)
            meant = f" (did you mean {_spelled(near[0])}?)" if near else ""
            raise typer.BadParameter(f"{key} is not an option of this service{meant}", param_hint=hint)
        takes_several = _takes_several(options[name])
        if isinstance(value, str) and options[name].nargs > 1:  # split as in the environment
            value = value.split()
        several = value if isinstance(value, list) else [value]
        if any(not isinstance(item, str) for item in several) or (isinstance(value, list) and not takes_several):
            raise typer.BadParameter(f"{key} must be one value, is {value}", param_hint=hint)
        if name in values:
            raise typer.BadParameter(f"{_spelled(name)} is given twice, with - and with _", param_hint=hint)
        values[name] = several if takes_several else several[0]
    return values


def _takes_several(option: Any) -> bool:
    """Return True if an option's value is a list: the option may be repeated, or accepts several words."""
    return bool(option.multiple or option.nargs > 1)


def _spelled(name: str) -> str:
    return name.replace("_", "-")
