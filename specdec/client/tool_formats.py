"""The formats in which models write calls of functions into their texts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ToolFormat:
    """A format. A call is a JSON object with `name` and what `arguments` names.

    The calls follow `marker`: a list of them where they are `listed`, else one call, and a marker again for the next.
    """

    name: str
    marker: str  # empty: calls begin the text
    arguments: str
    listed: bool = False
    before: str = ""  # between marker and call
    after: str = ""  # a call, or the list
    between: str = ""  # two calls that are not listed


HERMES = ToolFormat("hermes", "<tool_call>", "arguments", before="\n", after="\n</tool_call>", between="\n")
"""Qwen 2.5 and 3, Hermes."""
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "arguments", listed=True)
"""Mistral, up to the third version of its tokenizer; later ones write `[TOOL_CALLS]name[ARGS]{...}`."""
LLAMA = ToolFormat("llama3_json", "", "parameters", between="; ")
"""Llama 3.1 to 3.3."""
GRANITE = ToolFormat("granite", "<|tool_call|>", "arguments", listed=True)
"""Granite 3, Phi 4 mini."""

FORMATS = {each.name: each for each in (HERMES, MISTRAL, LLAMA, GRANITE)}


def format_of(template: str) -> ToolFormat | None:
    """Return the format in which a chat template writes the calls of earlier turns; None if it knows no tools, or
    writes them in none of these."""
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template:
        return None if "<function=" in template else HERMES
    if "<|tool_call|>" in template:
        return GRANITE
    return LLAMA if "<|start_header_id|>" in template and '"parameters": ' in template else None
