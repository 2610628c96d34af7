"""Outlines: its models for OpenAI's API and for vLLM's."""

from __future__ import annotations

import re
from typing import Literal

import openai
import outlines
from outlines.types import CFG, Regex

from tests.clients.checks.uses import CITIES, QUESTION, TOKENS, equal, joined, same_text, server, use, weather
from tests.clients.checks.weather import Weather

SERVER = server()
client = openai.OpenAI(base_url=SERVER.base, api_key=SERVER.key, max_retries=0)


@use("chat")
def chat() -> None:
    same_text(outlines.from_openai(client, SERVER.model)(QUESTION, max_tokens=TOKENS, temperature=0), SERVER.answer)


@use("chat, streamed")
def chat_streamed() -> None:
    model = outlines.from_openai(client, SERVER.model)
    joined(list(model.stream(QUESTION, max_tokens=TOKENS, temperature=0)), SERVER.answer)


@use("JSON schema")
def json_schema() -> None:
    for model in (outlines.from_openai(client, SERVER.model), outlines.from_vllm(client, SERVER.model)):
        weather(model(QUESTION, Weather, max_tokens=TOKENS))


@use("choice, regular expression, grammar")
def grammars() -> None:
    model = outlines.from_vllm(client, SERVER.model)
    equal(model(QUESTION, Literal["Paris", "Rome"], max_tokens=TOKENS) in CITIES, True)
    equal(bool(re.fullmatch("[a-z]{3}", model(QUESTION, Regex("[a-z]{3}"), max_tokens=TOKENS))), True)
    equal(model(QUESTION, CFG('start: "yes" | "no"'), max_tokens=TOKENS) in ("yes", "no"), True)
