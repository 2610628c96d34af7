"""Never slower than plain decoding: which candidates to take at all, by what they bring.

What speculation costs is not only what the cost model knows: drafts may share the verifier's cores, messages take
the event loop's time. So tokens a second are measured as they come out, in each way (plain, with the verifier's own
guesses, with those of its own draft, with drafts from elsewhere), for each kind of crowd (by its size, in powers of
two, since the more sessions there are, the less speculation brings; by what they allow, and by how they choose), and
the best of them goes on. The others are tried again now and then, less often each time that they lose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

EPOCH = 0.5
"""Seconds of steps that make a measurement, if they are not too FEW."""

GLANCE, HOPELESS = 0.1, 0.8
"""Seconds that are enough to see that a way brings less than this part of what another does, if it was taken at all:
at the beginning of a text there is nothing to look up, drafts have to read the prompt, and a step is a plain one."""

FEW = 10
"""Steps that tell nothing, however long they are."""

SETTLING = 0.1
"""Seconds after a change that are not measured: drafts have to hear of it, and to read what they left unread."""

BETTER = 1.05
"""By so much another way must be better to be taken."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds of steps until another way is tried again: idle ones would make trials a larger part of what is done."""

HOLD = 1.0
"""Seconds for which sessions that have left still count: others often follow. To wake the drafts for the last steps of
a few, and to stop them again, would cost more than it brings."""

TUITION = 0.05
"""Part of all tokens that trials of one way may cost: a trial that lost much is followed by a longer pause."""


class Way(Enum):
    """What is verified."""

    PLAIN = "plain"
    """Nothing: a token a step."""
    LOCAL = "local"
    """What the verifier guesses by itself, without a model."""
    OWN = "own"
    """That, and what its own draft guesses."""
    DRAFTED = "drafted"
    """What it guesses without a model, and the candidates of drafts elsewhere."""


@dataclass
class Trial:
    """When a way is tried next, and how long it rests if it loses again."""

    at: float = 0.0
    pause: float = FIRST_PAUSE


@dataclass
class Experience:
    """With one kind of crowd. Tokens a second, of the ways that were measured."""

    best: Way  # as far as is known
    others: dict[Way, Trial]
    rates: dict[Way, float] = field(default_factory=dict)
    trying: Way | None = None  # another one, now
    clock: float = 0.0  # seconds of steps
    settling: float = 0.0  # seconds left of it
    tokens: int = 0  # of the measurement under way
    seconds: float = 0.0
    steps: int = 0
    taken: int = 0  # steps of it in which its way was
    taken_seconds: float = 0.0

    @property
    def way(self) -> Way:
        """What to verify now."""
        return self.trying or self.best

    def observe(self, tokens: int, seconds: float, plain_rate: float, *, taken: bool) -> None:
        """A step was made in its way, or, if that is not `taken`, there was nothing to verify."""
        self.clock += seconds
        if self.settling > 0:
            self.settling -= seconds
            return
        self.tokens += tokens
        self.seconds += seconds
        self.steps += 1
        self.taken += taken
        self.taken_seconds += taken * seconds
        long_enough = self.seconds >= EPOCH and self.steps >= FEW
        if long_enough or (self._telling and self._hopeless(plain_rate)):
            before = self.way
            self._conclude(plain_rate)
            self.settling = SETTLING if self.way is not before else 0.0

    @property
    def _telling(self) -> bool:
        """Whether its way was taken often enough to say something of it."""
        return self.taken >= FEW and self.taken_seconds >= GLANCE

    def _hopeless(self, plain_rate: float) -> bool:
        """Whether a way that is new here has no chance, by what it has brought so far."""
        if self.trying is None and self.rates:
            return False
        return self.tokens < HOPELESS * max(self.rates.get(self.best, 0.0), plain_rate) * self.seconds

    def _conclude(self, plain_rate: float) -> None:
        """An epoch is over: what it says of its way, and which is next."""
        rate, first, telling = self.tokens / self.seconds, not self.rates, self._telling
        seconds = SETTLING + self.seconds
        self.tokens, self.seconds, self.steps, self.taken, self.taken_seconds = 0, 0.0, 0, 0, 0.0
        before = self.rates.get(self.best, rate) if self.trying is None else rate  # what is long past tells nothing
        self.rates[self.way] = before + 0.5 * (rate - before)
        disappoints = telling and self.rates[self.best] < plain_rate
        if first and not disappoints:  # what it goes on with is good, the guesses alone can wait
            for trial in self.others.values():
                trial.at = self.clock + trial.pause
        if self.trying is not None:
            self._judge(self.trying, seconds)
        due = [way for way, trial in self.others.items() if self.clock >= trial.at]
        if not disappoints and Way.PLAIN not in self.rates and Way.PLAIN in due:
            due.remove(Way.PLAIN)  # while more comes than is expected of it, it need not be measured
        self.trying = min(due, key=lambda way: self.others[way].at, default=None)

    def _judge(self, tried: Way, seconds: float) -> None:
        """Another way has been measured, which took so many `seconds`."""
        trial = self.others[tried]
        if self.rates[tried] > BETTER * self.rates[self.best]:
            del self.others[tried]
            self.others[self.best] = Trial(self.clock + FIRST_PAUSE)
            self.best = tried
        else:
            lost = seconds * (1.0 - self.rates[tried] / self.rates[self.best])
            pause = max(trial.pause, lost / TUITION)
            trial.at = self.clock + pause
            trial.pause = min(2 * pause, LONGEST_PAUSE)


class Crowd(NamedTuple):
    """The sessions of a step that could speculate, as far as it decides which way is best for them."""

    sessions: int
    drafted: bool  # some of them
    guessing: bool  # some of them, by themselves
    drawn: bool  # most of their tokens; the most probable ones are guessed far more easily
    own: bool = False  # the verifier has a draft of its own

    @property
    def ways(self) -> list[Way]:
        """That they allow, the most hopeful first."""
        guessing = [Way.OWN] * self.own + [Way.LOCAL] if self.guessing else []
        return [Way.DRAFTED] * self.drafted + guessing + [Way.PLAIN]


class Guard:
    """Told of every step."""

    def __init__(self) -> None:
        self._experience: dict[Crowd, Experience] = {}
        self._way = Way.DRAFTED
        self._held = 0  # sessions of the kind that is served, or that was of late
        self._seen = 0.0  # when there were so many

    @property
    def way(self) -> Way:
        """What is verified. Where there are no drafts, DRAFTED means LOCAL."""
        return self._way

    def way_for(self, crowd: Crowd, now: float) -> Way:
        """In which such a crowd would be served. Changes nothing: any thread may ask."""
        kind = _kind(crowd)
        if now - self._seen <= HOLD:
            kind = self._at_least(kind)
        known = self._experience.get(kind)
        return known.way if known is not None else self._likely(kind)

    def face(self, crowd: Crowd, now: float) -> None:
        """A step of such a crowd is next: nothing is learned of it while prompts are in it, and what others have been
        served by may not be the way for these."""
        kind = _kind(crowd)
        if kind.sessions >= self._held or now - self._seen > HOLD:
            self._held, self._seen = kind.sessions, now
        self._way = self._of(self._at_least(kind)).way

    def observe(self, crowd: Crowd, *, taken: bool, tokens: int, seconds: float, plain_rate: float) -> None:
        """A step brought `tokens`, `seconds` after the step before it or, if there was nothing to do, after its start;
        if its way is not `taken`, it was a plain one for want of candidates. `plain_rate` is what plain decoding
        could bring at most: what speculation takes from the time between two steps cannot be told from what plain
        decoding would.

        A measurement goes on where it was left when there is such a crowd again."""
        kind = _kind(crowd)
        known = self._of(kind)
        if known.way is self._way:  # else it was planned for other sessions
            known.observe(tokens, seconds, plain_rate, taken=taken)
        self._way = self._of(self._at_least(kind)).way

    def _at_least(self, kind: Crowd) -> Crowd:
        """One that has those who have just left."""
        return kind._replace(sessions=max(kind.sessions, self._held))

    def _of(self, kind: Crowd) -> Experience:
        known = self._experience.get(kind)
        if known is None:
            best = self._likely(kind)
            known = self._experience[kind] = Experience(best, {way: Trial() for way in kind.ways if way is not best})
        return known

    def _likely(self, kind: Crowd) -> Way:
        """The best way for a first crowd of its kind. One that some have just left goes on as before; one that grows,
        as the nearest smaller one did, since speculation brings no more where there are more sessions. Where only much
        larger ones are known it is hoped to pay, which is soon seen."""
        sizes = (kind.sessions + 1, *reversed(range(kind.sessions)))
        near = (self._experience.get(kind._replace(sessions=size)) for size in sizes)
        return next((known.best for known in near if known is not None), kind.ways[0])


def _kind(crowd: Crowd) -> Crowd:
    """Crowds of which one is served like the other: of up to two to the power of their `sessions`. A crowd of 64 is of
    one kind with what is left of it when the first have ended."""
    return crowd._replace(sessions=(crowd.sessions - 1).bit_length())
