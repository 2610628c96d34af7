"""Schemas written by pydantic: dumps of its models are allowed, and allowed texts are valid."""

from __future__ import annotations

import enum
import json
from decimal import Decimal
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from jsonschema import Draft202012Validator
from pydantic import UUID4, BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.rewriting import supported
from tests.grammar.followed import Followed


class Colour(enum.Enum):
    RED = "red"
    GREEN = "green"


Name = Annotated[str, StringConstraints(pattern="^[a-z]+$", max_length=5)]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=0, lt=2**63)] = 9


class Dog(BaseModel):
    kind: Literal["dog"]
    colours: set[Colour] = Field(default_factory=set)


class Owner(BaseModel):
    """A closed object that refers to itself."""

    model_config = ConfigDict(extra="forbid")

    id: UUID4
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []
    ages: dict[Name, int] = {}
    favourites: dict[Literal["food", "toy"], str | None] = {}
    friend: Owner | None = None


OWNER = Owner(
    id=UUID("12345678-1234-4234-8234-123456789abc"),
    pets=[Cat(lives=3), Dog(kind="dog", colours={Colour.GREEN})],
    ages={"ann": 5},
    favourites={"food": "fish"},
    friend=Owner(id=UUID("12345678-1234-4234-8234-123456789abd")),
)


@pytest.mark.parametrize(
    ("kind", "value", "others"),
    [
        (Owner, OWNER, [{"ages": {}}, {"id": str(OWNER.id), "ages": {"A": "5"}}]),
        (dict[Colour, int], {Colour.RED: 1}, [{"blue": 1}]),
        (dict[Name, set[Literal["a", "b"]]], {"x": {"a"}}, [{"x": ["a", "a"]}, {"toolong": []}]),
        (Decimal, Decimal("-1.5"), ["x", "-"]),
        (tuple[int, str], (1, "x"), [[1], [1, "x", 2]]),
        (frozenset[bool], frozenset([True]), [[True, True]]),
        (Annotated[float, Field(gt=-1e300, lt=1e300)], 0.5, ["x"]),
    ],
    ids=["models", "enum as names", "constrained names", "decimal", "tuple", "set", "bounds"],
)
def test_what_a_model_dumps_is_allowed(kind: Any, value: Any, others: list[Any]) -> None:
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema(mode="serialization")
    validator, followed = Draft202012Validator(schema), Followed.of_schema(schema)
    assert followed.takes_value(json.loads(adapter.dump_json(value)))
    assert [other for other in others if followed.takes_value(other) != validator.is_valid(other)] == []
    drawn = [json.loads(text) for text in map(followed.text, range(5)) if text is not None]
    assert [value for value in drawn if not validator.is_valid(value)] == []


def test_a_set_of_open_values_is_refused() -> None:
    with pytest.raises(GrammarError, match=r"^/uniqueItems: cannot be enforced: items must be an enum"):
        supported(TypeAdapter(set[str]).json_schema())
