"""Guidance with its model for OpenAI's API."""

from __future__ import annotations

import guidance
from guidance import assistant, gen, user
from guidance.models import OpenAI

from tests.clients.checks.uses import QUESTION, TOKENS, WEATHER, same_text, server, use, weather

SERVER = server()
model = OpenAI(SERVER.model, base_url=SERVER.base, api_key=SERVER.key, echo=False)


@use("chat")
def chat() -> None:
    with user():
        asked = model + QUESTION
    with assistant():
        asked += gen("answer", max_tokens=TOKENS, temperature=0)
    same_text(asked["answer"], SERVER.answer)


@use("JSON schema")
def json_schema() -> None:
    with user():
        asked = model + QUESTION
    with assistant():
        asked += guidance.json(name="answer", schema=WEATHER, max_tokens=TOKENS)
    weather(asked["answer"])
