"""DSPy: language models by chats, completions and responses."""

from __future__ import annotations

from typing import Any

import dspy

from tests.clients.checks.uses import PROMPT, QUESTION, TOKENS, equal, same_text, server, use

SERVER = server()
WHERE: Any = {"api_base": SERVER.base, "api_key": SERVER.key, "temperature": 0, "max_tokens": TOKENS, "cache": False}


def text_of(answer: Any) -> str:
    """Return the text of the first answer, which is a string or a mapping."""
    return str(answer[0]["text"] if isinstance(answer[0], dict) else answer[0])


@use("chat")
def chat() -> None:
    same_text(text_of(dspy.LM(f"openai/{SERVER.model}", **WHERE)(QUESTION)), SERVER.answer)


@use("completion")
def completion() -> None:
    """DSPy adds words of its own to the prompt; the model may end immediately after them."""
    model = dspy.LM(f"openai/{SERVER.model}", model_type="text", **WHERE)
    equal(isinstance(text_of(model(PROMPT)), str), True)


@use("responses")
def responses() -> None:
    model = dspy.LM(f"openai/{SERVER.model}", model_type="responses", **WHERE)
    same_text(text_of(model(QUESTION)), SERVER.answer)
