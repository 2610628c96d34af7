"""magentic: functions answered by a model, as text and as structured values."""

from magentic import OpenaiChatModel, prompt

from tests.clients.checks.uses import QUESTION, TOKENS, same_text, server, use, weather
from tests.clients.checks.weather import Weather

SERVER = server()
model = OpenaiChatModel(SERVER.model, base_url=SERVER.base, api_key=SERVER.key, max_tokens=TOKENS, temperature=0)


@use("chat")
def chat() -> None:
    @prompt(QUESTION, model=model)
    def ask() -> str: ...  # type: ignore[empty-body]

    same_text(ask(), SERVER.answer)


@use("structured output")
def structured_output() -> None:
    @prompt(QUESTION, model=model)
    def ask() -> Weather: ...  # type: ignore[empty-body]

    weather(ask())
