"""The fields of a response that repeat its request: limited, because a response is kept and sent several times."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.openai_api.errors import refused, wrong
from specdec.openai_api.json_text import EncodedList, Json

SUMMARIES = ("summary", "generate_summary")  # without effect: the answer has the reasoning itself

NESTED: Mapping[str, tuple[str, ...]] = {
    "reasoning": ("effort", *SUMMARIES),
    "stream_options": ("include_obfuscation", "include_usage"),
    "text": ("format", "verbosity"),
}
"""Object fields with their accepted members; other members are ignored."""

ECHOED: Json = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a response that repeat the request, and their defaults."""

LABELS = ("prompt_cache_key", "safety_identifier", "user")
MAX_LABEL_CHARACTERS = 4096
"""Fields for the caller's own use, and their maximum length."""

MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_TEXT = 512
"""OpenAI's limits on `metadata`: its entries, and the characters of a name and of a text."""


def check_labels(given: Json) -> None:
    """Refuse long values in fields that the response only repeats."""
    labels = {name: given.get(name) for name in LABELS}
    labels |= {f"reasoning.{name}": given.get("reasoning", {}).get(name) for name in SUMMARIES}
    for name, label in labels.items():
        _check_text(name, "" if label is None else label, MAX_LABEL_CHARACTERS)
    metadata = given.get("metadata", {})
    if not isinstance(metadata, dict):
        raise wrong("metadata", metadata, "an object of texts")
    if len(metadata) > MAX_METADATA:
        raise refused("metadata", f"has {len(metadata)} entries, must have at most {MAX_METADATA}")
    for name, text in metadata.items():
        if len(name) > MAX_METADATA_NAME:
            problem = f"has a name of {len(name)} characters, must have at most {MAX_METADATA_NAME}"
            raise refused("metadata", problem)
        _check_text(f"metadata.{name}", text, MAX_METADATA_TEXT)


def echoed(given: Json) -> Json:
    """Return the fields of a response that repeat the request, without unknown members. Tools are encoded once: a
    response is sent several times."""
    found: Json = ECHOED | {name: given[name] for name in ECHOED if name in given}
    for name in ("reasoning", "text"):
        found[name] = ECHOED[name] | {member: found[name][member] for member in NESTED[name] if member in found[name]}
    if isinstance(choice := found["tool_choice"], dict):
        found["tool_choice"] = {member: choice[member] for member in ("type", "name") if member in choice}
    if tools := found["tools"]:
        found["tools"] = EncodedList()
        found["tools"].extend(tools, ascii=True)
    return found


def _check_text(name: str, text: object, most: int) -> None:
    if not isinstance(text, str):
        raise wrong(name, text, "text")
    if len(text) > most:
        raise refused(name, f"has {len(text)} characters, must have at most {most}")
