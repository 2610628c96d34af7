"""The `specdec` command: one file per subcommand."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

from specdec import __version__
from specdec.extras import needed_by, needed_extra

with needed_by("specdec", needed_extra(sys.argv[1:])):  # perhaps only the client is installed
    LOGGING = {"draft", "verifier", "orchestrator", "openai", "up", "serve"}  # commands of services, which have a log
    # Read when gRPC is loaded. Its lines about callers' failed handshakes and closed connections are not for operators;
    # commands report its errors themselves. Services that `up` starts inherit the variable.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE" if LOGGING.isdisjoint(sys.argv[1:2]) else "ERROR")
    import rich  # noqa: F401 (commands need it: report here that it is missing)
    import typer

from specdec.cli.api_key import api_key
from specdec.cli.bench import bench
from specdec.cli.chat import chat
from specdec.cli.doctor import doctor
from specdec.cli.export import export
from specdec.cli.failure import ending, open_missing_streams, say
from specdec.cli.forget import forget
from specdec.cli.generate import generate
from specdec.cli.import_gguf import import_gguf
from specdec.cli.services import draft, evaluate, openai, orchestrator, serve, up, verifier, warm_up
from specdec.cli.stats import stats
from specdec.cli.tokenize import tokenize
from specdec.cli.trace import trace
from specdec.cli.train_draft import train_draft
from specdec.cli.train_heads import train_heads
from specdec.command_line import HELP_OPTIONS
from specdec.signatures import PlainCommand
from specdec.variables import PREFIXES, unread

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command whose options are parsed elsewhere."""


def main() -> None:
    open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters missing from the terminal's encoding
    with needed_by("specdec", needed_extra(sys.argv[1:])):
        app(prog_name="specdec")


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


def specdec(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Speculative decoding as three gRPC services.

    `specdec COMMAND --help` lists the options of a command.
    """
    if context.invoked_subcommand not in LOGGING and (unknown := unread(os.environ)):
        of_services = ", ".join(PREFIXES)
        say(f"{', '.join(unknown)}: not a variable that specdec reads; those of services begin with {of_services}")


app = typer.Typer(
    context_settings=HELP_OPTIONS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.callback()(specdec)
for service in (draft, verifier, orchestrator, openai, up, serve, warm_up, evaluate):
    app.command(context_settings=PASS_ON)(ending(service))
COMMANDS = (
    *(doctor, export, import_gguf, train_draft, train_heads, forget),
    *(stats, trace, generate, chat, tokenize, api_key),
)
for command in COMMANDS:
    app.command(cls=PlainCommand)(ending(command))
app.command(context_settings=PASS_ON)(ending(bench))
