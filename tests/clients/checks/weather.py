"""The structured answer as a class, for clients that take pydantic models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class Weather(BaseModel):
    """The weather in a city, as `WEATHER` in uses.py has it."""

    city: Literal["Paris", "Rome"]
    warm: bool
