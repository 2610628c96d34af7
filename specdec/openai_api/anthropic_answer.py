"""Answers of the Messages API: a message of blocks, complete or as typed events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdec.client import Finish
from specdec.openai_api.answers import statistics
from specdec.openai_api.anthropic_request import MessagesRequest
from specdec.openai_api.errors import ApiError
from specdec.openai_api.json_text import Json
from specdec.openai_api.parts import BeginPart, CallPart, EndPart, Part, ReasoningPart, TextPart

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP statuses, mapped to error names."""

PING: Json = {"type": "ping"}
"""The event that keeps a quiet stream open."""

SIGNATURE = "specdec"
"""The signature of every thinking block: clients drop blocks without one. It proves nothing."""


def error_body(error: ApiError, request_id: str) -> Json:
    """Return an error in the format of this API."""
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.body["error"]["message"]},
        "request_id": request_id,
    }


class MessageAnswer:
    """A message under construction. Each part of its sample yields events; the finished message has all blocks."""

    def __init__(self, request: MessagesRequest, request_id: str) -> None:
        self._request = request
        self._request_id = request_id
        self._open: Json | None = None  # the block being written
        self._text: list[str] = []  # of that block
        self.whole: Json = {
            "id": f"msg_{request_id}",
            "type": "message",
            "role": "assistant",
            "model": request.chat.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(0, 0, 0),
        }

    @property
    def blocks(self) -> list[Json]:
        blocks: list[Json] = self.whole["content"]
        return blocks

    def add(self, part: Part) -> Iterator[Json]:
        """Yield the events of a part of the sample."""
        match part:
            case BeginPart():  # the number of cached prompt tokens is known only at the end
                self.whole["usage"] = _usage(part.prompt_tokens, 0, 0)
                yield {"type": "message_start", "message": self.whole}
            case ReasoningPart():
                yield from self._write("thinking", part.text)
            case TextPart():
                yield from self._write("text", part.text)
            case CallPart():
                yield from self._close()
                yield from self._call(part)
            case EndPart():
                yield from self._close()
                yield from self._end(part)

    def failed(self, error: ApiError) -> Iterator[Json]:
        """Yield the event for an error in mid-stream."""
        yield error_body(error, self._request_id)

    def _event(self, kind: str, **fields: Any) -> Json:
        """Return an event about the last block."""
        return {"type": kind, "index": len(self.blocks) - 1, **fields}

    def _write(self, kind: str, text: str) -> Iterator[Json]:
        """Append text to the open block if it has this type, else to a new one."""
        if not text:
            return
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            self._open, self._text = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}), []
            self.blocks.append(self._open)
            yield self._event("content_block_start", content_block=self._open)
        self._text.append(text)
        yield self._event("content_block_delta", delta={"type": f"{kind}_delta", kind: text})

    def _close(self) -> Iterator[Json]:
        """End the open block, if any."""
        if self._open is None:
            return
        block, self._open = self._open, None
        block[block["type"]] = "".join(self._text)
        if block["type"] == "thinking":
            block["signature"] = SIGNATURE
            yield self._event("content_block_delta", delta={"type": "signature_delta", "signature": SIGNATURE})
        yield self._event("content_block_stop")

    def _call(self, call: CallPart) -> Iterator[Json]:
        block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        self.blocks.append(block)
        yield self._event("content_block_start", content_block=block)
        yield self._event("content_block_delta", delta={"type": "input_json_delta", "partial_json": call.arguments})
        block["input"] = call.input or {}  # a cut-off call's partial input is only in the stream
        yield self._event("content_block_stop")

    def _end(self, part: EndPart) -> Iterator[Json]:
        finish = part.finish
        sequence = finish.stop or None
        reason = "max_tokens" if part.cut_off else "stop_sequence" if sequence else "end_turn"
        if not part.cut_off and any(block["type"] == "tool_use" for block in self.blocks):
            reason = "tool_use"  # also before a stop sequence: clients run tools only for this reason
        own: Json = {"ignored": list(self._request.ignored)} if self._request.ignored else {}
        self.whole |= {"stop_reason": reason, "stop_sequence": sequence, "usage": _usage_of(finish)}
        self.whole["specdec"] = statistics(finish) | own
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield {
            "type": "message_delta",
            "delta": delta,
            "usage": self.whole["usage"],
            "specdec": self.whole["specdec"],
        }
        yield {"type": "message_stop"}


def _usage_of(finish: Finish) -> Json:
    return _usage(finish.prompt_tokens, finish.completion_tokens, finish.cached_tokens)


def _usage(prompt: int, completion: int, cached: int) -> Json:
    """Return the token counts; the prompt's count excludes cached tokens."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }
