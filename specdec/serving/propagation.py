"""Context propagation: metadata that a call passes on to the calls made on its behalf.

It consists of the request id and the W3C trace context. Both come from the caller's metadata at the start of a call,
plain or on a multiplexed connection.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import structlog

from specdec.wire.request_metadata import REQUEST_ID, is_request_id, new_request_id

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"

TRACESTATE_CHARACTERS = 512

Metadata = tuple[tuple[str, str], ...]

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-[!-~]{0,64})?")

_trace_context: ContextVar[Metadata] = ContextVar("trace_context", default=())


def bound_request_id() -> str:
    """Return the id of the request being served; "" outside a request."""
    return str(structlog.contextvars.get_contextvars().get("request_id", ""))


def bound_trace_context() -> Metadata:
    """Return the trace context of the call being served; () if it has none."""
    return _trace_context.get()


def carried() -> Metadata:
    """Return the metadata for calls made on behalf of the call being served."""
    bound = bound_request_id()
    return (((REQUEST_ID, bound),) if bound else ()) + bound_trace_context()


def bind_metadata(metadata: Mapping[str, Any]) -> None:
    """Bind the metadata of the call being served: its request id, or a new one if that is missing or malformed, and its
    trace context, if well-formed."""
    given = metadata.get(REQUEST_ID)
    structlog.contextvars.bind_contextvars(request_id=given if is_request_id(given) else new_request_id())
    bind_trace_context(trace_context_of(metadata))


def bind_trace_context(context: Metadata) -> None:
    """Set the trace context for outgoing calls, and the trace id in logs."""
    _trace_context.set(context)
    if context:
        structlog.contextvars.bind_contextvars(trace_id=trace_id_of(context))
    else:
        structlog.contextvars.unbind_contextvars("trace_id")


def trace_context_of(metadata: Mapping[str, Any]) -> Metadata:
    """Return the trace context in metadata; () without one. If `traceparent` is malformed, its `tracestate` is ignored
    too (W3C Trace Context)."""
    parent, state = metadata.get(TRACEPARENT), metadata.get(TRACESTATE)
    found = _TRACEPARENT.fullmatch(parent) if isinstance(parent, str) else None
    # Version ff is invalid; version 00 has no further fields; ids of all zeros are invalid.
    if found is None or found[1] == "ff" or (found[1] == "00" and found[4]):
        return ()
    if not int(found[2], 16) or not int(found[3], 16):
        return ()
    sound = isinstance(state, str) and 0 < len(state) <= TRACESTATE_CHARACTERS and state.isascii()
    return ((TRACEPARENT, found[0]), *(((TRACESTATE, str(state)),) if sound and str(state).isprintable() else ()))


def trace_id_of(context: Metadata) -> str:
    """Return the trace id of a trace context; "" if it has none."""
    return context[0][1].split("-")[1] if context else ""
