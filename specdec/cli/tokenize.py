"""`specdec tokenize`: the tokens of a prompt."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from specdec import ports
from specdec.cli.access import OPEN, Access, ModelName, Orchestrators, with_access
from specdec.cli.failure import fail, prompt_text
from specdec.cli.waiting import WaitReporter
from specdec.client import Client, Piece
from specdec.command_line import duration
from specdec.exit_status import ExitStatus


@with_access
def tokenize(
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to tokenize; `-` reads it from stdin.")],
    address: Orchestrators = f"127.0.0.1:{ports.ORCHESTRATOR}",
    model: ModelName = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat PROMPT as a user message, rendered by the model's chat template.")
    ] = False,
    special: Annotated[
        bool, typer.Option(help="Add the model's special tokens around plain text, such as BOS.")
    ] = True,
    count: Annotated[bool, typer.Option("--count", help="Print only the number of tokens.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    timeout: Annotated[float, duration("Timeout of the call in seconds, retries included.", min=0.001)] = 30.0,
    allowed: Access = OPEN,
) -> None:
    """Print the tokens of a prompt, a line each: id and text. Nothing is generated."""
    if chat and not special:
        fail("--no-special is for plain text: a chat template adds special tokens itself", ExitStatus.USAGE)
    try:
        text = prompt_text(prompt)
        with (
            Client(address, timeout=timeout, **allowed.for_client) as client,
            WaitReporter(address, access=allowed),
        ):
            if chat:
                found = client.tokenize(messages=[{"role": "user", "content": text}], model=model, pieces=not count)
            else:
                found = client.tokenize(text, model=model, add_special=None if special else False, pieces=not count)
    except ValueError as error:  # a value that does not fit into a message
        fail(str(error), ExitStatus.USAGE)
    if json_output:
        pieces = [{"text": piece.text, "bytes": list(piece.bytes)} for piece in found.pieces]
        fields = {"count": found.count, "context_tokens": found.context_tokens, "ids": found.ids}
        print(json.dumps(fields if count else {**fields, "pieces": pieces}))
    elif count:
        print(found.count)
    else:
        for token, piece in zip(found.ids, found.pieces, strict=True):
            print(f"{token:>7}  {_shown(piece)}")
        print(f"{found.count} tokens; the context holds {found.context_tokens}", file=sys.stderr)


def _shown(piece: Piece) -> str:
    """Return a token's text as a Python literal, or its bytes if they do not form whole characters."""
    try:
        return repr(piece.bytes.decode())
    except UnicodeDecodeError:
        return repr(piece.bytes)
