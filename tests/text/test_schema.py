"""Schemas of tools from Python functions."""

from enum import Enum
from typing import Literal

import pytest

from birl.errors import BirlError
from birl.text.schema import tool
from tests.text.families import chat


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


def measure(a: float, unit: Unit, names: list[str], mode: Literal["x", "y"] = "x", note: str | None = None) -> str:
    """Measures something.

    Args:
        a: How long it is
            in all.
        unit: Of what.
        names: Who asks.
        mode: Which way.
        note: What else.

    Returns:
        A text.
    """
    return f"{a}{unit}{names}{mode}{note}"


def test_a_signature_and_a_docstring_make_a_schema() -> None:
    assert tool(measure) == {
        "type": "function",
        "function": {
            "name": "measure",
            "description": "Measures something.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "number", "description": "How long it is in all."},
                    "unit": {"type": "string", "enum": ["m", "ft"], "description": "Of what."},
                    "names": {"type": "array", "items": {"type": "string"}, "description": "Who asks."},
                    "mode": {"type": "string", "enum": ["x", "y"], "description": "Which way."},
                    "note": {"type": "string", "nullable": True, "description": "What else."},
                },
                "required": ["a", "unit", "names"],
            },
        },
    }


def test_an_enum_is_refused_where_transformers_makes_an_object_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 5.23: the model was not told the choices."""
    foreign = "transformers.utils.chat_template_utils._get_json_schema_type"
    monkeypatch.setattr(foreign, lambda kind: {"type": {float: "number", str: "string"}.get(kind, "object")})
    with pytest.raises(BirlError, match=r"tool measure: .*Unit.* needs transformers 5\.23"):
        tool(measure)


def test_methods_leave_out_themselves_and_schemas_are_rendered() -> None:
    class World:
        def look(self, place: str) -> str:
            """Looks.

            Args:
                place: Where.
            """
            return place

    schema = tool(World().look)
    assert list(schema["function"]["parameters"]["properties"]) == ["place"]
    from birl.types import Message

    own = chat("hermes")
    assert '"place"' in own.decode(own.render((Message(role="user", content="Hi"),), (schema,)))


def bare(a: int) -> int:
    return a


def unhinted(a) -> int:
    """Adds.

    Args:
        a: One.
    """
    return a


def undescribed(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
    """
    return a + b


def odd(a: BirlError) -> int:
    """Adds.

    Args:
        a: One.
    """
    return 1


def unknown(a: "Nothing") -> int:  # type: ignore[name-defined]  # noqa: F821
    """Adds.

    Args:
        a: One.
    """
    return 1


def wild(*numbers: int) -> int:
    """Adds.

    Args:
        numbers: All.
    """
    return sum(numbers)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (bare, "tool bare: .*no docstring.*Args:"),
        (unhinted, "tool unhinted: Argument a is missing a type hint"),
        (undescribed, "tool undescribed: .*no description for the argument 'b'.*Args:"),
        (odd, "tool odd: .*BirlError"),
        (unknown, "tool unknown: .*Nothing"),
        (wild, r"tool wild takes \*args"),
    ],
)
def test_a_function_that_does_not_say_what_it_takes_is_refused(function, said: str) -> None:
    with pytest.raises(BirlError, match=said):
        tool(function)
