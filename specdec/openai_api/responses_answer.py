"""Answers of the Responses API: a response of items, complete or as typed events."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from specdec.client import Finish, Logprobs
from specdec.openai_api.answers import statistics
from specdec.openai_api.errors import ApiError
from specdec.openai_api.json_text import EncodedList, Json
from specdec.openai_api.logprobs import chat_logprobs
from specdec.openai_api.parts import BeginPart, CallPart, EndPart, Part, ReasoningPart, TextPart
from specdec.openai_api.responses_request import ResponsesRequest, carried
from specdec.openai_api.responses_tools import CUSTOM_INPUT

_UNFINISHED = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}))?$")
"""An escape of JSON that was cut off, or half of a surrogate pair, behind whole escaped backslashes."""


class ResponseAnswer:
    """A response under construction. Each part of its sample yields events; the finished response has all items."""

    def __init__(self, request: ResponsesRequest, response_id: str, *, stored: bool) -> None:
        self._request = request
        self._id = response_id
        self._sent = 0  # events
        self._item: Json | None = None  # being written
        self._text: list[str] = []  # of that item
        self.whole: Json = {
            "id": response_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": request.chat.model,
            "output": [],
            "usage": None,
            "background": False,
            "service_tier": "default",
            "store": stored,
            **request.echoed,
        }

    @property
    def output(self) -> list[Json]:
        """The items so far."""
        output: list[Json] = self.whole["output"]
        return output

    def add(self, part: Part) -> Iterator[Json]:
        """Yield the events of a part of the sample."""
        match part:
            case BeginPart():
                yield self._event("response.created", response=dict(self.whole))
                yield self._event("response.in_progress", response=dict(self.whole))
            case ReasoningPart():
                yield from self._write("reasoning", part.text)
            case TextPart():
                yield from self._write("message", part.text, part.logprobs)
            case CallPart():
                yield from self._close("completed")
                yield from self._call(part)
            case EndPart():
                status = "incomplete" if part.cut_off else "completed"
                if not self.output:  # an empty text is a message, too
                    yield from self._write("message", "")
                yield from self._close(status)
                self._end(status, part.finish)

    def end(self, *, stored: bool) -> Json:
        """Return the last event."""
        self.whole["store"] = stored
        return self._event(f"response.{self.whole['status']}", response=self.whole)

    def failed(self, error: ApiError) -> Iterator[Json]:
        """Yield the events for an error in mid-stream."""
        if self._item is not None:
            self._item["content"][0]["text"] = "".join(self._text)
            self._item["status"] = "incomplete"
        self.whole |= {"status": "failed", "error": {"code": error.code or error.type, "message": error.message}}
        yield self._event("error", code=error.code, message=error.message, param=error.param)
        yield self._event("response.failed", response=self.whole)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Json:
        """Return an event about the last item."""
        return self._event(kind, item_id=self.output[-1]["id"], output_index=len(self.output) - 1, **fields)

    def _open(self, item: Json) -> Json:
        """Append an item; return the event."""
        self.output.append(item)
        return self._event("response.output_item.added", output_index=len(self.output) - 1, item=dict(item))

    def _name(self, prefix: str) -> str:
        """Return an id for the next item."""
        return f"{prefix}_{self._id.partition('_')[2]}_{len(self.output)}"

    def _write(self, kind: str, text: str, logprobs: Iterable[Logprobs] = ()) -> Iterator[Json]:
        """Append text to the open item if it is of this kind (message or reasoning), else to a new one."""
        if self._item is None or self._item["type"] != kind:
            yield from self._close("completed")
            of_message: Json = {"role": "assistant"} if kind == "message" else {"summary": []}
            name = self._name("msg" if kind == "message" else "rs")
            self._item = {"id": name, "type": kind, "status": "in_progress", **of_message, "content": []}
            yield self._open(self._item)
            part: Json = {"type": "output_text" if kind == "message" else "reasoning_text", "text": ""}
            part |= {"annotations": [], "logprobs": EncodedList()} if kind == "message" else {}
            self._item["content"], self._text = [part], []
            yield self._of_item("response.content_part.added", content_index=0, part=dict(part))
        entries: list[Json] = chat_logprobs(logprobs)["content"] if self._request.includes_logprobs else []
        self._text.append(text)
        if kind == "message":
            self._item["content"][0]["logprobs"].extend(entries, ascii=True)
            yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=entries)
        else:
            yield self._of_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _close(self, status: str) -> Iterator[Json]:
        """End the open item, if any."""
        if self._item is None:
            return
        item, self._item = self._item, None
        item["status"], part = status, item["content"][0]
        part["text"] = "".join(self._text)
        if item["type"] == "message":
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._of_item("response.output_text.done", content_index=0, **text)
        else:
            yield self._of_item("response.reasoning_text.done", content_index=0, text=part["text"])
            if self._request.includes_encrypted:
                item["encrypted_content"] = carried(part["text"])
        yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _call(self, call: CallPart) -> Iterator[Json]:
        tool = self._request.tools.get(call.name)
        if tool is not None and tool.custom:
            prefix, kind, field, value = "ctc", "custom_tool_call", "input", _custom_input(call)
        else:
            prefix, kind, field, value = "fc", "function_call", "arguments", call.arguments
        own = call.name if tool is None else tool.name
        item = {"id": self._name(prefix), "type": kind, "call_id": call.id, "name": own}
        item |= {"namespace": tool.namespace} if tool is not None and tool.namespace else {}
        yield self._open({**item, "status": "in_progress", field: ""})
        self.output[-1] = item = {**item, "status": "incomplete" if call.input is None else "completed", field: value}
        yield self._of_item(f"response.{kind}_{field}.delta", delta=value)
        name = {} if kind == "custom_tool_call" else {"name": own}
        yield self._of_item(f"response.{kind}_{field}.done", **{field: value}, **name)
        yield self._event("response.output_item.done", output_index=len(self.output) - 1, item=item)

    def _end(self, status: str, finish: Finish) -> None:
        self.whole |= {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": finish.prompt_tokens,
                "input_tokens_details": {"cached_tokens": finish.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": finish.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": finish.reasoning_tokens},
                "total_tokens": finish.prompt_tokens + finish.completion_tokens,
            },
            "specdec": statistics(finish) | ({"ignored": list(self._request.ignored)} if self._request.ignored else {}),
        }


def _custom_input(call: CallPart) -> str:
    """Return the input of a custom tool: the one argument of its function if the model followed its schema, else all
    arguments. Of a call that was cut off, return the part that there is."""
    if call.input is not None:
        value = call.input.get(CUSTOM_INPUT)
        return value if isinstance(value, str) else call.arguments
    # Cut off, usually within this argument.
    value = (replace(call, arguments=_UNFINISHED.sub(r"\1", call.arguments) + '"}').input or {}).get(CUSTOM_INPUT)
    return value if isinstance(value, str) else ""
