"""`specdec chat`: a conversation with the model at a terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console

from specdec import ports
from specdec.cli.access import OPEN, Access, ModelName, Orchestrators, with_access
from specdec.cli.conversation import Conversation, LeaveError
from specdec.cli.failure import described, fail, from_stdin
from specdec.cli.report import CompletionReport
from specdec.cli.shown import coloured, for_stdout, speculation_lines, styled
from specdec.cli.waiting import WaitReporter
from specdec.client import Cancelled, Client, SpecdecError, Stream
from specdec.exit_status import ExitStatus
from specdec.wire.speculation import SpeculationName

ASKS = "> "


@with_access
def chat(
    address: Orchestrators = f"127.0.0.1:{ports.ORCHESTRATOR}",
    model: ModelName = None,
    system: Annotated[str | None, typer.Option(help="The system prompt.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of an answer. Default: until the context is full.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; 0 is greedy. Default: the model's own, else 0."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**64 - 1, help="Seed of each answer. Default: a new one each time.")
    ] = None,
    speculation: Annotated[
        SpeculationName, typer.Option(help="Which drafters propose candidates, as for `generate`.")
    ] = "auto",
    colours: Annotated[
        bool, typer.Option("--colours", help="Colour each token by its source, as `generate` does.")
    ] = False,
    allowed: Access = OPEN,
) -> None:
    """Chat with the model. Ctrl-C stops an answer, Ctrl-D leaves; /help lists further commands."""
    options = {
        "model": model,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "speculation": speculation,
    }
    conversation = Conversation(options, system, colours)
    at_terminal = sys.stdin.isatty()
    asks = ASKS if at_terminal and sys.stdout.isatty() else ""
    if at_terminal:
        with contextlib.suppress(ImportError):  # some Python builds lack it: no line editing
            import readline  # noqa: F401
    with Client(address, **allowed.for_client) as client:
        if at_terminal:
            _greet(client, WaitReporter(address, access=allowed), model, address)
        while True:
            try:
                while True:  # inside the try, so that an interrupt between two turns is caught too
                    _turn(client, WaitReporter(address, access=allowed), conversation, asks)
            except (EOFError, LeaveError):
                return
            except InterruptedError:
                if not at_terminal:
                    raise KeyboardInterrupt from None
                print()
                _say("stopped")
            except KeyboardInterrupt:
                if not at_terminal:
                    raise
                print()
                _say("Ctrl-D or /quit leaves")
            except ValueError as error:
                if not at_terminal:
                    fail(str(error), ExitStatus.USAGE)
                _say(str(error))
            except SpecdecError as error:
                if not at_terminal:  # a script needs the exit status
                    raise
                full = error.reason == "PROMPT_TOO_LONG" and conversation.turns
                _say(described(error) + ("; /clear forgets the conversation" if full else ""))


def _greet(client: Client, waiting: WaitReporter, wanted: str | None, address: str) -> None:
    """Print which model answers at this address. End the process if none can, before the user types a question."""
    with waiting:
        models = client.models()
    names = ", ".join(model.name for model in models)
    if wanted is None and len(models) > 1:
        fail(f"{address} serves several models, name one by --model: {names}", ExitStatus.USAGE)
    model = next((model for model in models if wanted is None or model.is_asked_as(wanted)), None)
    if model is None:
        fail(f"--model {wanted}: {address} serves {names or 'no model'}", ExitStatus.REFUSED)
    if not model.chat:
        fail(f"{model.name} has no chat template: `specdec generate` continues a text", ExitStatus.REFUSED)
    _say(f"{wanted or model.name} at {address}; /help lists the commands, Ctrl-D leaves")


def _turn(client: Client, waiting: WaitReporter, conversation: Conversation, asks: str) -> None:
    """Read a line at the prompt `asks`, and run its command or answer its question."""
    line = from_stdin(lambda: input(asks))
    line = line.removeprefix("\ufeff").removesuffix("\r")  # stdin may be a file from a Windows editor: BOM, CR
    if not line.strip():
        return
    if line.startswith("/") and not line.startswith("//"):
        output, answer_now = conversation.command(line)
        if output:
            _say(output)
        if not answer_now:
            return
    else:
        conversation.ask(line.removeprefix("/"))
    _answer(client, waiting, conversation)


def _answer(client: Client, waiting: WaitReporter, conversation: Conversation) -> None:
    """Stream the answer to the last question; Ctrl-C cancels it. The received part stays in the conversation."""
    console, report, said, thought = Console(), CompletionReport(), "", False
    try:
        with client.generate(messages=conversation.messages, **conversation.options) as stream, waiting:
            report.request_id = stream.request_id
            with _interrupting(stream):
                for chunk in stream:
                    waiting.heard()
                    report.add(chunk)
                    thought = thought or chunk.reasoning_tokens > 0
                    _aside(chunk.reasoning + ("\n\n" if thought and chunk.text and not said else ""))
                    in_colours = conversation.colours and console.is_terminal
                    sys.stdout.write(coloured(chunk, console) if in_colours else for_stdout(chunk.text))
                    sys.stdout.flush()
                    said += chunk.text
    except SpecdecError:
        if said:
            print()
        raise
    finally:
        conversation.answered(said, thought=thought)
    print()
    s, count = report.finish.speculation, len(report.tokens)
    _say(
        f"{count} tokens, {count / report.seconds:.0f}/s, {s.mean_tokens_per_step:.2f} a step; "
        f"{report.finish.reason}, seed {report.seed}, request {report.request_id}"
    )
    err = Console(stderr=True)
    for line in speculation_lines(s, err, in_colours=conversation.colours and console.is_terminal):
        err.file.write(f"{line}\n")


@contextlib.contextmanager
def _interrupting(stream: Stream) -> Iterator[None]:
    """Make Ctrl-C cancel the stream and raise InterruptedError, because a KeyboardInterrupt inside gRPC's own code
    would leave the connection unusable. Ignored interrupts stay ignored."""
    cancelled = threading.Event()

    def cancel(*_: object) -> None:
        cancelled.set()
        threading.Thread(target=stream.cancel).start()  # this handler may run while the stream holds its lock

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, cancel)
    try:
        yield
    except Cancelled:
        if cancelled.is_set():
            raise InterruptedError from None
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _say(line: str) -> None:
    """Print a status line for the user."""
    _aside(f"{line}\n")


def _aside(text: str) -> None:
    """Print text other than answers, such as a model's reasoning, to stderr; stdout is for answers only."""
    if text:
        console = Console(stderr=True)
        console.file.write(styled(text, "dim", console) if console.is_terminal else text)
        console.file.flush()
