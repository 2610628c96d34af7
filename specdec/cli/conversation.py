"""A conversation at a terminal: its turns, and the commands that change its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from specdec.client import Message
from specdec.wire.speculation import SPECULATIONS

HELP = """\
/seed N          draw the next answers with this seed; /seed alone: a new one each time
/temperature X   0 is greedy; /temperature alone: the model's own
/speculation S   which drafters propose tokens: auto, off, always, draft, local, or one alone
/colours         turn on or off the colours of token sources
/again           answer the last question once more
/clear           forget the conversation
/quit            leave, like Ctrl-D; Ctrl-C stops an answer
//...            ask a question that begins with /: the first / is dropped"""


class LeaveError(Exception):
    """The conversation is over."""


@dataclass
class Conversation:
    """A conversation: its turns, and the options of the next answer."""

    options: dict[str, Any]
    system: str | None = None
    colours: bool = False
    turns: list[Message] = field(default_factory=list)
    _asked: int = 0  # number of turns up to the question to answer

    @property
    def messages(self) -> list[Message]:
        """The messages of a request: the system's, and all turns up to the question to answer."""
        opening: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        return opening + self.turns[: self._asked]

    def ask(self, text: str) -> None:
        """Add a question."""
        self.turns.append({"role": "user", "content": text})
        self._asked = len(self.turns)

    def answered(self, text: str, *, thought: bool = False) -> None:
        """Record the answer to the question. If it is empty and nothing was `thought`, a previous answer is kept, and
        an unanswered question is removed, because templates require alternating turns."""
        if text or thought:
            self.turns[self._asked :] = [{"role": "assistant", "content": text}]
        elif self._asked == len(self.turns):
            self.turns.pop()
            self._asked = max(0, len(self.turns) - 1)  # the previous question, already answered

    def command(self, line: str) -> tuple[str, bool]:
        """Run a line that starts with /. Return a message for the user, and whether to answer the last question now.
        ValueError describes an invalid line; LeaveError ends the conversation."""
        name, _, value = line.strip().partition(" ")
        found = self._commands.get(name)
        if found is None:
            raise ValueError(f"{name} is not a command: /help lists them")
        return found(value.strip())

    @property
    def _commands(self) -> Mapping[str, Callable[[str], tuple[str, bool]]]:
        return {
            "/help": lambda _: (HELP, False),
            "/seed": self._set_seed,
            "/temperature": self._set_temperature,
            "/speculation": self._set_speculation,
            "/colours": self._toggle_colours,
            "/again": self._ask_again,
            "/clear": self._clear,
            "/quit": _leave,
        }

    def _set_seed(self, value: str) -> tuple[str, bool]:
        if value and not (value.isascii() and value.isdecimal() and int(value) < 1 << 64):
            raise ValueError(f"/seed {value}: must be a whole number from 0 to 2^64 - 1")
        self.options["seed"] = int(value) if value else None
        return f"seed: {value or 'a new one each time'}", False

    def _set_temperature(self, value: str) -> tuple[str, bool]:
        try:
            temperature = float(value) if value else None
        except ValueError:
            raise ValueError(f"/temperature {value}: must be a number") from None
        self.options["temperature"] = temperature
        return f"temperature: {value or 'default'}", False

    def _set_speculation(self, value: str) -> tuple[str, bool]:
        if value not in SPECULATIONS:
            raise ValueError(f"/speculation {value}: must be one of {', '.join(SPECULATIONS)}".replace(" :", ":"))
        self.options["speculation"] = value
        return f"speculation: {value}", False

    def _toggle_colours(self, _: str) -> tuple[str, bool]:
        self.colours = not self.colours
        return f"colours: {'on' if self.colours else 'off'}", False

    def _ask_again(self, _: str) -> tuple[str, bool]:
        if not self.turns:
            raise ValueError("/again: nothing was asked yet")
        return "", True

    def _clear(self, _: str) -> tuple[str, bool]:
        self.turns.clear()
        self._asked = 0
        return "forgotten", False


def _leave(_: str) -> NoReturn:
    raise LeaveError
