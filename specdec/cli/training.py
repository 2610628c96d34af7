"""Options, failures and the interruptible loop of `train-heads` and `train-draft`."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from specdec.cli.failure import fail, say
from specdec.command_line import number
from specdec.exit_status import ExitStatus
from specdec.progress import ProgressLines

if TYPE_CHECKING:  # imports torch
    from specdec.training.own_text import OwnText

SAVE_SECONDS = 120.0
LOOK_SECONDS = 60.0
"""Minimum seconds between two evaluations of the training."""

SHARE = 0.05
"""Maximum share of the time spent on saving; evaluating has the same limit."""

Target = Annotated[
    Path, typer.Argument(metavar="TARGET", help="Directory of the target in Hugging Face's layout, or its GGUF file.")
]
Out = Annotated[
    Path, typer.Argument(metavar="OUT", help="Directory to write; `--resume` continues the training there.")
]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        help="Text to train on, similar to the text that the target serves: a file, or a .jsonl file of objects with "
        "`text` or `messages`. May be given several times. With --resume it may be left out: OUT keeps it."
    ),
]
OwnTokens = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=100_000_000,
        help="Also train on this many tokens that the target writes itself, as continuations of the text. Writing "
        "takes longer than learning. Default: none.",
    ),
]
Steps = Annotated[int, typer.Option(min=1, max=10_000_000, help="Steps of training.")]
Rows = Annotated[int, typer.Option(min=1, max=4096, help="Windows of text in a step.")]
Length = Annotated[int, typer.Option(min=64, max=32_768, help="Tokens of a window.")]
Device = Annotated[str, typer.Option(help="Device of the training: cpu, cuda, or cuda:N.")]
Minutes = Annotated[
    float | None,
    number(
        "Stop after this many minutes of training, without loading and measuring; `--resume` continues. Default: no "
        "limit.",
        min=0.1,
        max=1e5,
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the unfinished training in OUT.")]


class ResumableWork(Protocol):
    """Work in units; it can be saved after each unit, and resumed."""

    @property
    def unit(self) -> str: ...

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int:
        """The number of units."""

    @property
    def over(self) -> bool: ...

    def step(self) -> float:
        """Do some units; return a figure about them."""

    def describe(self, figure: float) -> str:
        """Return a line for a person about the last step."""

    def save(self, out: Path) -> None: ...


class Stops:
    """Records Ctrl-C and SIGTERM, so that the process ends only after a whole step: half a step could not be resumed.
    A second signal of the same kind ends the process immediately and loses unsaved work."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, self._hear)

    def _hear(self, came: int, _: FrameType | None) -> None:
        self.heard.append(came)
        signal.signal(came, signal.SIG_DFL)

    def end(self) -> None:
        """End the process if a signal was recorded."""
        if self.heard:
            raise SystemExit(ExitStatus.INTERRUPTED if self.heard[0] == signal.SIGINT else ExitStatus.TERMINATED)


class Seldom:
    """An action run at most every `seconds`, and for at most SHARE of the time."""

    def __init__(self, seconds: float, do: Callable[[], object], clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._do, self._clock = seconds, do, clock
        self._due = clock() + seconds

    def __call__(self) -> None:
        """Run the action if it is due."""
        begin = self._clock()
        if begin >= self._due:
            self._do()
            end = self._clock()
            self._due = end + max(self._seconds, (end - begin) / SHARE)


class TimeLimit:
    """A limit on the time spent in `running`. Time outside, such as for loading models or measuring a draft, does not
    count: a short limit would leave none for the training."""

    def __init__(self, minutes: float | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._left = math.inf if minutes is None else 60 * minutes  # seconds
        self._clock = clock

    @contextmanager
    def running(self) -> Iterator[float]:
        """Run the clock within this context; yield its time at which the limit is reached."""
        until = self._clock() + self._left
        try:
            yield until
        finally:
            self._left = until - self._clock()


def check_begin(text: list[Path] | None, *, resume: bool, traffic: bool = False) -> None:
    """End the process unless there is text, traffic, or a training to resume."""
    if not text and not resume and not traffic:
        fail("--text: give the text to train on, or continue with --resume", ExitStatus.USAGE)


def take_place(out: Path, *, resume: bool, texts: Sequence[Path]) -> None:
    """Lock `out` until this process ends. End the process unless a training may begin or resume there, and can read its
    `texts`. WriteError if the folder cannot be created."""
    from specdec.training.files import PLAN, is_unused, lock, make_folder, remove_leftovers

    if not resume:
        if (out / PLAN).is_file():
            fail(f"{out}: has an unfinished training; continue with --resume, or write elsewhere", ExitStatus.USAGE)
        if not is_unused(out):
            fail(f"{out}: is not empty; write elsewhere", ExitStatus.USAGE)
        for file in texts:  # before minutes of loading, and before the folder is made
            try:
                file.open("rb").close()
            except OSError as error:
                fail(f"{file}: cannot be read: {error.strerror}", ExitStatus.USAGE)
        make_folder(out)
    if out.is_dir() and not lock(out):
        fail(f"{out}: another training is writing there; wait for it, or write elsewhere", ExitStatus.USAGE)
    remove_leftovers(out)


@contextmanager
def failing_in_one_line() -> Iterator[None]:
    """Within this context, end the process with one line if a training fails while it is prepared or run."""
    from specdec.engine.model_file import ModelDirectoryError
    from specdec.engine.unsupported import UnsupportedModelError
    from specdec.training.files import WriteError
    from specdec.training.plan import DivergedError

    try:
        yield
    except (ModelDirectoryError, UnsupportedModelError) as error:
        fail(str(error), ExitStatus.USAGE)
    except (WriteError, DivergedError) as error:
        fail(str(error))


def own_text_written(own_text: OwnText, out: Path, stops: Stops, limit: TimeLimit, *, resumable: bool = True) -> bool:
    """Have the target write its own text, as in `work_on`; return whether it is complete. End the process if a signal
    was recorded meanwhile."""
    if not own_text.over:
        say(f"the target writes {own_text.tokens} tokens to train on")
        work_on(own_text, out, stops, limit, resumable=resumable)
        stops.end()
    return own_text.over


def work_on(
    work: ResumableWork,
    out: Path,
    stops: Stops,
    limit: TimeLimit,
    look: Callable[[], object] = lambda: None,
    *,
    resumable: bool = True,
) -> None:
    """Run the work until it is over, a signal was recorded, or the limit is reached; then save. Meanwhile save and
    `look` from time to time, and report progress. WriteError if saving fails: --resume continues from the last saved
    state."""
    progress = ProgressLines(say, work.total, begun=work.done)
    save, look = Seldom(SAVE_SECONDS, lambda: work.save(out)), Seldom(LOOK_SECONDS, look)
    with limit.running() as until:
        while not work.over and not stops.heard and time.monotonic() < until:
            figure = work.step()
            progress.heard(work.done, work.describe(figure))
            if not work.over:
                look()
                save()
    work.save(out)
    if not work.over:
        next_step = (
            "the same command with --resume continues" if resumable else "a training with --traffic cannot be resumed"
        )
        say(f"stopped at {work.unit} {work.done} of {work.total}; {next_step}")
