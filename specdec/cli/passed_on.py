"""The services' options as options of `specdec up`, prefixed with the name of their service.

`--verifier-step-rows 64` of `specdec up` is `--step-rows 64` of `specdec verifier`, with the same validation and error
messages. Options added to a service later are passed on without a change here.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Annotated, Any, get_args, get_type_hints

import typer

from specdec.roles import PACKAGES, load
from specdec.signatures import parameters_of, with_parameters

OPTIONAL = {"openai": ("starlette", "uvicorn")}
"""Optional roles of `specdec up`, and the packages they need. A role without its packages has no options."""

SET_BY_UP = frozenset(
    {
        *("model", "models", "draft_model", "verifier", "draft", "orchestrator", "port", "stop_with_stdin"),
        "share_port",
    }
)
"""Names of options that `specdec up` sets itself: which service serves what, and where."""

ALSO_BARE = frozenset({"chat_template", "served_model_name", "speculation"})
"""Names of options that are also accepted without their service's prefix, and appear in the help."""

Values = dict[str, Any]
"""Values of the options given for a service, by parameter name."""


def passing_on(command: Callable[..., None], *, model: str = "") -> Callable[..., None]:
    """Return a command with the services' options added. It passes their values to `command` as the parameter `passed`,
    by service. `model` names an option of `command` that becomes the argument MODEL."""
    added = {role: dict(_parameters(role)) if _installed(role) else {} for role in PACKAGES}

    def run(**given: Any) -> None:
        passed: dict[str, Values] = {}
        for role, options in added.items():
            values = {name: given.pop(parameter.name) for name, parameter in options.items()}
            passed[role] = {name: value for name, value in values.items() if value is not None}
        command(**given, passed=passed)

    own = parameters_of(command)
    del own["passed"]
    if model:
        kind, option = get_args(own[model].annotation)
        argument = typer.Argument(metavar="MODEL", help=option.help)
        own[model] = own[model].replace(annotation=Annotated[kind, argument])
    shown = [*own.values(), *(option for options in added.values() for option in options.values())]
    return with_parameters(run, shown, command)


def _installed(role: str) -> bool:
    return all(find_spec(package) is not None for package in OPTIONAL.get(role, ()))


def _parameters(role: str) -> Iterator[tuple[str, inspect.Parameter]]:
    """Yield (name, parameter), with the service's prefix, for each option of a service that may be passed on."""
    hints = get_type_hints(load(f"{PACKAGES[role]}.__main__").main, include_extras=True)
    for name in hints:
        if name in SET_BY_UP or name == "return":
            continue
        kind, option = get_args(hints[name])
        option, spelled = copy.copy(option), name.replace("_", "-")
        declared = f"--{role}-{spelled}"
        kind = bool if kind == bool | None else kind
        option.param_decls = (f"{declared}/--{role}-no-{spelled}" if kind is bool else declared,)
        if name in ALSO_BARE:
            option.param_decls = (f"--{spelled}", *option.param_decls)
        option.hidden = name not in ALSO_BARE  # listed by `specdec verifier --help` and the like
        annotation: Any = Annotated[kind | None, option]
        yield (
            name,
            inspect.Parameter(f"{role}_{name}", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation),
        )


def unprefixed(arguments: Iterable[str], command: Callable[..., None]) -> str | None:
    """Return an error message for the first argument that is a service's option without its prefix; None if there is
    none."""
    own = {*inspect.signature(command).parameters, *ALSO_BARE}
    own |= {f"{role}_{name}" for role in PACKAGES if _installed(role) for name, _ in _parameters(role)}
    for argument in arguments:
        option = argument.partition("=")[0]
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or name in own:
            continue
        roles = [role for role in PACKAGES if _installed(role) and name in dict(_parameters(role))]
        if roles:
            prefixed = " or ".join(f"--{role}-{name.replace('_', '-')}" for role in roles)
            return f"{option}: there is no such option; {prefixed}"
    return None


def arguments(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the command-line arguments for these values."""
    words: list[str] = []
    for name, value in values.items():
        spelled = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{spelled}" if value else f"--no-{spelled}")
        else:
            for item in value if isinstance(value, list) else [value]:
                words.append(f"--{spelled}")
                words.extend(map(str, item) if isinstance(item, tuple) else [str(item)])
    return tuple(words)
