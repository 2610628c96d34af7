"""CrewAI: its LLM class, and a crew of one agent."""

from __future__ import annotations

import os
from typing import Any

os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TRACING_ENABLED": "false"}

from crewai import LLM, Agent, Crew, Task

from tests.clients.checks.uses import QUESTION, TOKENS, same_text, server, some_text, use

SERVER = server()


def model(**options: Any) -> Any:
    where = {"base_url": SERVER.base, "api_key": SERVER.key, "temperature": 0, "max_tokens": TOKENS}
    return LLM(model=f"openai/{SERVER.model}", **where, **options)


@use("chat")
def chat() -> None:
    same_text(model().call([{"role": "user", "content": QUESTION}]), SERVER.answer)


@use("chat, streamed")
def chat_streamed() -> None:
    same_text(model(stream=True).call([{"role": "user", "content": QUESTION}]), SERVER.answer)


@use("crew")
def crew() -> None:
    agent = Agent(role="Reader", goal="Read files.", backstory="It reads.", llm=model(), max_iter=2, verbose=False)
    task = Task(description=QUESTION, expected_output="A text.", agent=agent)
    some_text(Crew(agents=[agent], tasks=[task], verbose=False).kickoff().raw)
