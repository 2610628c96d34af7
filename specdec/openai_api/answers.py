"""Answers in OpenAI's shape: of a chat, and of completions; whole, and in pieces.

What OpenAI has no field for stands in the field `specdec` of each choice: how the request was understood, and what
speculation did.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from specdec.client import Chunk, Finish, Logprobs
from specdec.client.tool_calls import ToolCall, ToolCallReader
from specdec.client.tool_formats import ToolFormat
from specdec.client.tool_scanner import Schemas
from specdec.openai_api.json_text import Json, json_list, json_object
from specdec.openai_api.logprobs import EncodedLogprobs, TextOffset, chat_logprobs, completion_logprobs

REASONS = {"stop": "stop", "length": "length", "context": "length"}
"""Reasons to finish to OpenAI's names for them; the context is a length too."""


@dataclass(frozen=True)
class Frame:
    """The fields that an answer and all pieces of it have in common."""

    chat: bool
    id: str
    created: int  # seconds since 1970
    model: str

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """Return a whole answer, in JSON; all choices have ended."""
        kind = "chat.completion" if self.chat else "text_completion"
        told = self._framed(kind, usage=usage_of(choices), system_fingerprint=fingerprint(c.finish for c in choices))
        return json_object(told, {"choices": json_list(each.whole() for each in choices)}).encode()

    def piece(self, choices: Sequence[Json], **others: Any) -> Json:
        """Return an event of a stream."""
        return self._framed("chat.completion.chunk" if self.chat else "text_completion", choices=choices, **others)

    def _framed(self, kind: str, **fields: Any) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **fields}


class Choice:
    """One sample of one prompt, which comes chunk by chunk: each becomes a piece, or all are gathered."""

    def __init__(
        self,
        index: int,
        *,
        first_sample: bool,
        chat: bool,
        logprobs: bool,
        reasoning: bool = True,
        calls: Calls | None = None,
    ) -> None:
        """`first_sample` of its prompt: the tokens of the prompt are counted with it. `reasoning`, if there is any, is
        told. `calls`: functions may be called."""
        self._calls = calls
        self.index = index
        self.first_sample = first_sample
        self._chat = chat
        self._wants_logprobs = logprobs
        self._wants_reasoning = reasoning
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs = EncodedLogprobs(self._logprobs_of)
        self._offset = TextOffset()
        self._own: Json = {}
        self._finish: Finish | None = None

    @property
    def finish(self) -> Finish:
        assert self._finish is not None
        return self._finish

    def opening(self) -> Json:
        """Return the piece with which a chat's sample begins: who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def piece(self, chunk: Chunk, seed: int | None) -> Json:
        """Return a chunk of a request that has this seed as a piece of a stream."""
        piece: Json = {"index": self.index, "text": chunk.text}
        if self._chat:
            text, calls = self._said(chunk)
            reasoning = self._thought(chunk)
            said = text or (chunk.finish is None and not calls and not reasoning)
            piece = {"index": self.index, "delta": {"reasoning": reasoning} if reasoning else {}}
            piece["delta"] |= {"content": text} if said else {}
            piece["delta"] |= {"tool_calls": calls} if calls else {}
        logprobs = chunk.logprobs[chunk.reasoning_tokens :]
        piece["logprobs"] = self._logprobs_of(logprobs) if logprobs else None
        piece |= {"finish_reason": None} if chunk.finish is None else self._end(chunk.finish)
        own = self._note(chunk, seed)
        return piece | ({"specdec": own} if own else {})

    def gather(self, chunk: Chunk, seed: int | None) -> None:
        """Keep a chunk of a request that has this seed for `whole`."""
        self._text.append(self._said(chunk)[0])
        self._reasoning.append(self._thought(chunk))
        self._logprobs.add(chunk.logprobs[chunk.reasoning_tokens :])
        self._own |= self._note(chunk, seed)

    def whole(self) -> str:
        """Return the sample, all of which was gathered, in JSON."""
        text = "".join(self._text)
        said: Json = {"message": self._message(text)} if self._chat else {"text": text}
        told = {"index": self.index, **said, **self._end(self.finish), "specdec": self._own}
        return json_object(told, {"logprobs": self._logprobs.whole() if self._wants_logprobs else "null"})

    def _said(self, chunk: Chunk) -> tuple[str, list[Json]]:
        """Return what a chunk says, and the calls that are complete with it."""
        return (chunk.text, []) if self._calls is None else self._calls.split(chunk)

    def _thought(self, chunk: Chunk) -> str:
        """Return the reasoning of a chunk, as far as it is wanted."""
        return chunk.reasoning if self._wants_reasoning else ""

    def _message(self, text: str) -> Json:
        """Return the message of a chat's sample; its reasoning as vLLM names it."""
        made = () if self._calls is None else self._calls.made
        calls = [{name: value for name, value in call.items() if name != "index"} for call in made]
        others = {"reasoning": "".join(self._reasoning), "tool_calls": calls}
        others = {name: value for name, value in others.items() if value}
        silent = not text and (calls or self.finish.reasoning_tokens)
        return {"role": "assistant", "content": None if silent else text, **others}

    def _end(self, finish: Finish) -> Json:
        """Return how the sample ended; the stop string as vLLM names it."""
        reason = REASONS.get(finish.reason, "stop")
        if reason == "stop" and self._calls is not None and self._calls.made:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": finish.stop or None}

    def _note(self, chunk: Chunk, seed: int | None) -> Json:
        """Note how the sample ended, if it did; return what only this project tells of a chunk."""
        own: Json = {}
        if chunk.resolved is not None:
            resolved = asdict(chunk.resolved)
            resolved["time"] = None if chunk.resolved.time is None else chunk.resolved.time.isoformat()
            own |= {"seed": seed, "resolved": resolved}
        if chunk.finish is not None:
            self._finish = chunk.finish
            own |= _statistics(chunk.finish)
        return own

    def _logprobs_of(self, found: Iterable[Logprobs]) -> Json:
        return chat_logprobs(found) if self._chat else completion_logprobs(found, self._offset)


class Calls:
    """The calls of functions in one sample's text."""

    def __init__(self, tool_format: ToolFormat, name: str, schemas: Schemas = MappingProxyType({})) -> None:
        """`name` is the sample's own: ids of calls come of it. `schemas` are those of the functions' arguments."""
        self.made: list[Json] = []
        self._reader = ToolCallReader(tool_format, schemas)
        self._name = name

    def split(self, chunk: Chunk) -> tuple[str, list[Json]]:
        """Return what a chunk says besides calls, and the calls that are complete with it."""
        found = list(self._reader.push(chunk.text))
        if chunk.finish is not None:
            found += self._reader.finish()
        text = "".join(each for each in found if isinstance(each, str))
        calls = [self._made(each) for each in found if isinstance(each, ToolCall)]
        return text, calls

    def _made(self, call: ToolCall) -> Json:
        """Return a call in OpenAI's shape; templates of Mistral want ids of nine letters and digits."""
        number = len(self.made)
        identifier = hashlib.sha256(f"{self._name}-{number}".encode()).hexdigest()[:9]
        function = {"name": call.name, "arguments": call.arguments}
        self.made.append({"index": number, "id": identifier, "type": "function", "function": function})
        return self.made[-1]


def usage_of(choices: Sequence[Choice]) -> Json:
    """Return the token counts of choices that have ended. A prompt counts once, however many samples it has."""
    prompts = [each.finish for each in choices if each.first_sample]
    prompt = sum(each.prompt_tokens for each in prompts)
    completion = sum(each.finish.completion_tokens for each in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(each.cached_tokens for each in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(each.finish.reasoning_tokens for each in choices)},
    }


def fingerprint(finishes: Iterable[Finish]) -> str:
    """Return a name for what the tokens were computed with: equal ones, and the same seed, mean equal tokens."""
    numerics = sorted({each.numerics for each in finishes})
    return f"fp_{hashlib.sha256(' '.join(numerics).encode()).hexdigest()[:16]}"


def _statistics(finish: Finish) -> Json:
    """Return what only this project tells of a sample that has ended."""
    return {
        **asdict(finish.speculation),
        "mean_tokens_per_step": finish.speculation.mean_tokens_per_step,
        "numerics": finish.numerics,
        "exact": finish.exact,
        "reproducible": finish.reproducible,
        "preemptions": finish.preemptions,
    }
