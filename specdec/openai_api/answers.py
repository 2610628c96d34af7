"""Answers in OpenAI's format, for chats and completions, complete or streamed.

The field `specdec` of each choice has the results without a field in OpenAI's API: the resolved request and the
speculation statistics.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from specdec.client import Chunk, Finish, Logprobs
from specdec.openai_api.json_text import Json, as_bytes, encoded, json_list, json_object
from specdec.openai_api.logprobs import EncodedLogprobs, TextOffset, chat_logprobs, completion_logprobs, of_text
from specdec.openai_api.prompts import AnsweredPrompt
from specdec.openai_api.requests import ParsedRequest
from specdec.wire.tool_calls import ToolCall, ToolCallReader
from specdec.wire.tool_formats import ToolFormat
from specdec.wire.tool_scanner import Schemas

REASONS = {"stop": "stop", "length": "length", "context": "length"}
"""Finish reasons, mapped to OpenAI's names; a full context counts as "length"."""


@dataclass(frozen=True)
class Frame:
    """The fields common to an answer and all its stream events."""

    chat: bool
    id: str
    created: int  # seconds since 1970
    model: str
    ignored: Sequence[str] = ()  # fields of the request

    def whole(self, choices: Sequence[Choice], others: Mapping[str, str] = MappingProxyType({})) -> bytes:
        """Return the complete answer as JSON, including the already encoded fields `others`; all choices must have
        ended. Prompt token ids are a field of a chat's answer, but of each choice in completions."""
        kind = "chat.completion" if self.chat else "text_completion"
        fields = self._framed(kind, usage=usage_of(choices), system_fingerprint=fingerprint(choices))
        fields |= self.ignored_json
        parts = {"choices": json_list(choice.whole() for choice in choices), **others}
        if self.chat and (prompt := choices[0].encoded_prompt):
            parts["prompt_token_ids"] = prompt
        return as_bytes(json_object(fields, parts))

    @property
    def ignored_json(self) -> Json:
        """The names of ignored fields, for an answer or the first event of a stream."""
        return {"specdec": {"ignored": list(self.ignored)}} if self.ignored else {}

    def piece(self, choices: Sequence[Json], **others: Any) -> Json:
        """Return one event of a stream."""
        return self._framed("chat.completion.chunk" if self.chat else "text_completion", choices=choices, **others)

    def _framed(self, kind: str, **fields: Any) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **fields}


class Choice:
    """One sample of one prompt. Its chunks are streamed one by one (`piece`) or gathered into one answer (`gather`,
    `whole`)."""

    def __init__(
        self, index: int, request: ParsedRequest, calls: Calls | None = None, prompt: AnsweredPrompt | None = None
    ) -> None:
        """`calls`: collects tool calls; None if the text has none. `prompt`: the prompt, if a completion's choice shows
        any part of it."""
        self.index = index
        self._request = request
        self._calls = calls
        self._chunks: list[str] = []
        self._tokens: list[str] = []  # ids, in decimal
        self._last_token: int | None = None
        self._completion_tokens = 0
        self.prompt_tokens = 0
        """Tokens of the prompt, once known."""
        self.prompt_token_ids: list[int] | None = None
        """Token ids of the prompt, for the first piece of a stream, if requested."""
        self.encoded_prompt = ""
        """Token ids of the prompt as JSON, for a complete answer."""
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._logprobs = EncodedLogprobs(self._logprobs_of)
        self._prompt = prompt or AnsweredPrompt()
        self._own: Json = {}
        self._model = ""  # fingerprint of the model's weights
        self._finish: Finish | None = None

    @property
    def finish(self) -> Finish:
        assert self._finish is not None
        return self._finish

    @property
    def computed_by(self) -> str:
        """The fingerprints of the model and of its numerics; the sample must have ended."""
        return f"{self._model} {self.finish.numerics}"

    @property
    def first_sample(self) -> bool:
        """True for the first sample of its prompt. Usage counts the prompt's tokens with this sample only."""
        return self.index % self._request.samples == 0

    def opening(self) -> Json:
        """Return the first stream event of a chat's sample, which contains only the role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": self.index, "delta": delta, "logprobs": None, "finish_reason": None}

    @property
    def usage(self) -> Json:
        """The token counts so far."""
        prompt, completion = self.prompt_tokens, self._completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def pieces(self, chunk: Chunk, seed: int | None) -> list[Json]:
        """Return a chunk as the choices of one or two stream events; `seed` is the request's. The end of a text never
        comes with a call: OpenAI's SDKs look at an event's end first, and would not report that call as complete."""
        piece = self._piece(chunk, seed)
        if chunk.finish is None or "tool_calls" not in piece.get("delta", {}):
            return [piece]
        ended = {"finish_reason", "stop_reason", "specdec"}
        end = {name: value for name, value in piece.items() if name in ended}
        calls = {name: value for name, value in piece.items() if name not in ended}
        return [calls | {"finish_reason": None}, {"index": self.index, "delta": {}, "logprobs": None} | end]

    def _piece(self, chunk: Chunk, seed: int | None) -> Json:
        own = self._note(chunk, seed)
        piece: Json = {"index": self.index, "text": chunk.text}
        if self._request.chat:
            text, calls = self._said(chunk)
            reasoning = self._thought(chunk)
            said = text or (chunk.finish is None and not calls and not reasoning)
            piece = {"index": self.index, "delta": {"reasoning": reasoning} if reasoning else {}}
            piece["delta"] |= {"content": text} if said else {}
            piece["delta"] |= {"tool_calls": calls} if calls else {}
        logprobs = of_text(chunk, with_end=self._request.tells_end)
        piece["logprobs"] = self._logprobs_of(logprobs) if logprobs else None
        piece |= {"finish_reason": None} if chunk.finish is None else self._end(chunk.finish)
        if self._request.chunks and chunk.tokens:
            own["chunks"] = [self._chunk(chunk)]
        if self._request.token_ids:
            piece["token_ids"] = chunk.tokens
        if self.prompt_token_ids is not None and not self._request.chat:
            piece["prompt_token_ids"], self.prompt_token_ids = self.prompt_token_ids, None
        return piece | ({"specdec": own} if own else {})

    def gather(self, chunk: Chunk, seed: int | None) -> int:
        """Keep a chunk for `whole`, and return its number of characters; `seed` is the request's."""
        self._text.append(self._said(chunk)[0])
        self._reasoning.append(self._thought(chunk))
        size = len(chunk.text) + len(self._reasoning[-1])
        logprobs = of_text(chunk, with_end=self._request.tells_end)
        if logprobs or chunk.finish:  # wait for the whole prompt: text offsets begin at its end
            size += self._logprobs.add(logprobs)
        self._own |= self._note(chunk, seed)
        if self._request.chunks and chunk.tokens:
            self._chunks.append(encoded(self._chunk(chunk)))
            size += len(self._chunks[-1])
        if self._request.token_ids:
            self._tokens += map(str, chunk.tokens)
        return size

    def whole(self) -> str:
        """Return the gathered sample as JSON."""
        text = self._prompt.text + "".join(self._text)
        said: Json = {"message": self._message(text)} if self._request.chat else {"text": text}
        fields = {"index": self.index, **said, **self._end(self.finish)}
        own = json_object(self._own, {"chunks": json_list(self._chunks)} if self._request.chunks else {})
        logprobs = self._logprobs.whole(self._prompt.logprobs) if self._request.logprobs else "null"
        parts = {"specdec": own, "logprobs": logprobs, **self._prompt.fields}
        if self._request.token_ids:
            parts["token_ids"] = json_list(self._tokens)
        if self.encoded_prompt and not self._request.chat:
            parts["prompt_token_ids"] = self.encoded_prompt
        return json_object(fields, parts)

    def _said(self, chunk: Chunk) -> tuple[str, list[Json]]:
        """Return a chunk's text without tool calls, and the calls that it completes."""
        return (chunk.text, []) if self._calls is None else self._calls.split(chunk)

    def _thought(self, chunk: Chunk) -> str:
        """Return a chunk's reasoning; "" if the request excludes it."""
        return chunk.reasoning if self._request.reasoning else ""

    def _message(self, text: str) -> Json:
        """Return the message of a chat's sample; `reasoning` is vLLM's field."""
        made = () if self._calls is None else self._calls.made
        calls = [{name: value for name, value in call.items() if name != "index"} for call in made]
        others = {"reasoning": "".join(self._reasoning), "tool_calls": calls}
        others = {name: value for name, value in others.items() if value}
        silent = not text and (calls or self.finish.reasoning_tokens)
        return {"role": "assistant", "content": None if silent else text, **others}

    def _end(self, finish: Finish) -> Json:
        """Return the finish fields. `stop_reason` is vLLM's: the stop string, or the request's stop token, that ended
        the text."""
        reason = REASONS.get(finish.reason, "stop")
        if reason == "stop" and self._calls is not None and self._calls.made:
            reason = "tool_calls"
        asked = finish.reason == "stop" and self._last_token in self._request.options.stop_tokens
        token = self._last_token if asked else None
        return {"finish_reason": reason, "stop_reason": finish.stop or token}

    def _chunk(self, chunk: Chunk) -> Json:
        """Return the tokens of a chunk with their sources, and times in seconds. Excluded reasoning has empty texts."""
        hidden = 0 if self._request.reasoning else chunk.reasoning_tokens
        fields: Json = {
            "tokens": chunk.tokens,
            "token_texts": [""] * hidden + chunk.token_texts[hidden:],
            "sources": chunk.sources,
            "reasoning_tokens": chunk.reasoning_tokens,
            "steps": chunk.steps,
            "offered": chunk.offered,
            "elapsed_seconds": round(chunk.elapsed_seconds, 6),
            "forward_seconds": round(chunk.forward_seconds, 6),
            "step_seconds": round(chunk.step_seconds, 6),
        }
        if chunk.rejected:
            shown = self._completion_tokens - len(chunk.tokens) + hidden  # tokens before the first shown one
            fields["rejected"] = [
                {
                    "position": r.position,
                    "depth": r.depth,
                    "token": r.token,
                    "text": "" if r.position - r.depth < shown and hidden else r.piece.text,
                    "source": r.source,
                }
                for r in chunk.rejected
            ]
        return fields

    def _note(self, chunk: Chunk, seed: int | None) -> Json:
        """Record a chunk's token counts, last token and finish, if any; return its part of the field `specdec`."""
        own: Json = {}
        self._completion_tokens += len(chunk.tokens)
        self._last_token = chunk.tokens[-1] if chunk.tokens else self._last_token
        self._model = chunk.model_fingerprint or self._model
        if chunk.resolved is not None:
            resolved = asdict(chunk.resolved)
            resolved["time"] = None if chunk.resolved.time is None else chunk.resolved.time.isoformat()
            own |= {"seed": seed, "resolved": resolved}
        if chunk.finish is not None:
            self._finish = chunk.finish
            own |= statistics(chunk.finish)
        return own

    @cached_property
    def _offset(self) -> TextOffset:
        return TextOffset(self._prompt.text)

    def _logprobs_of(self, found: Iterable[Logprobs]) -> Json:
        return chat_logprobs(found) if self._request.chat else completion_logprobs(found, self._offset)


class Calls:
    """The tool calls in one sample's text."""

    def __init__(
        self, tool_format: ToolFormat, name: str, schemas: Schemas = MappingProxyType({}), *, forced: bool = False
    ) -> None:
        """`name` is unique to the sample; call ids are derived from it. `schemas` are the functions' argument schemas.
        `forced`: the text consists of calls only."""
        self.made: list[Json] = []
        self._reader = ToolCallReader(tool_format, schemas, only_calls=forced)
        self._name = name

    def split(self, chunk: Chunk) -> tuple[str, list[Json]]:
        """Return a chunk's text without tool calls, and the calls that it completes."""
        found = list(self.items(chunk))
        return "".join(item for item in found if isinstance(item, str)), [i for i in found if not isinstance(i, str)]

    def items(self, chunk: Chunk) -> Iterator[str | Json]:
        """Yield a chunk's text and the calls that it completes, in order."""
        yield from self.push(chunk.text)
        yield from self.finish(chunk.finish)

    def push(self, text: str) -> Iterator[str | Json]:
        """Yield a piece of the text and the calls that it completes, in order."""
        yield from map(self._item, self._reader.push(text))

    def finish(self, finish: Finish | None) -> Iterator[str | Json]:
        """Yield what was held back, at the end of the sample; nothing without `finish`."""
        if finish is not None:
            cut = REASONS.get(finish.reason) == "length"
            yield from map(self._item, self._reader.finish(cut=cut))

    def _item(self, found: str | ToolCall) -> str | Json:
        return found if isinstance(found, str) else self._made(found)

    def _made(self, call: ToolCall) -> Json:
        """Return a call in OpenAI's format. Ids have nine letters or digits, as Mistral's templates require."""
        number = len(self.made)
        identifier = hashlib.sha256(f"{self._name}-{number}".encode()).hexdigest()[:9]
        function = {"name": call.name, "arguments": call.arguments}
        self.made.append({"index": number, "id": identifier, "type": "function", "function": function})
        return self.made[-1]


def usage_of(choices: Sequence[Choice]) -> Json:
    """Return the token counts of finished choices. A prompt counts once, regardless of its number of samples."""
    prompts = [choice.finish for choice in choices if choice.first_sample]
    prompt = sum(finish.prompt_tokens for finish in prompts)
    completion = sum(choice.finish.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(finish.cached_tokens for finish in prompts)},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.finish.reasoning_tokens for choice in choices)},
    }


def fingerprint(choices: Iterable[Choice]) -> str:
    """Return a hash of the model and the numerics of finished choices: with equal hashes and seeds, a prompt's tokens
    get the same answer."""
    found = sorted({choice.computed_by for choice in choices})
    return f"fp_{hashlib.sha256(' '.join(found).encode()).hexdigest()[:16]}"


def statistics(finish: Finish) -> Json:
    """Return specdec's own statistics of a finished sample."""
    check = finish.schema_check
    return {
        **asdict(finish.speculation),
        "mean_tokens_per_step": finish.speculation.mean_tokens_per_step,
        "numerics": finish.numerics,
        "exact": finish.exact,
        "reproducible": finish.reproducible,
        "preemptions": finish.preemptions,
        **({"kept_for_learning": True} if finish.kept_for_learning else {}),
        **({} if check is None else {"schema_check": asdict(check)}),
    }
