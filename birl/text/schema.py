"""The JSON schema of a tool from a Python function: its type hints, and the `Args:` of its docstring."""

import inspect
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

from transformers.utils import chat_template_utils as foreign
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException

from birl.errors import BirlError

ARGS = "Write its docstring as: what it does, an empty line, `Args:`, and `    name: what it is` for each argument."


def tool(function: Callable[..., Any]) -> dict[str, Any]:
    """The tool's schema, as for `tools` of an environment and of OpenAI's API. Raises `BirlError` for a function
    without descriptions of its arguments.

    Example: tool(add)["function"]["parameters"]["required"] == ["a", "b"]
    """
    name = getattr(function, "__name__", type(function).__name__)
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in inspect.signature(function).parameters.values()):
        raise BirlError(f"The tool {name} takes *args or **kwargs, which have no schema. Name each argument.")
    try:
        for hint in (part for whole in get_type_hints(function).values() for part in (whole, *get_args(whole))):
            if (
                isinstance(hint, type)
                and hint is not dict
                and foreign._get_json_schema_type(hint) == {"type": "object"}
            ):
                raise TypeHintParsingException(f"{hint} needs transformers 5.23, which reads Enum; or typing.Literal.")
        result = get_json_schema(function)
    except DocstringParsingException as error:
        raise BirlError(f"The tool {name}: {_line(error)} {ARGS}") from error
    except TypeHintParsingException as error:
        raise BirlError(f"The tool {name}: {_line(error)}") from error
    except (NameError, TypeError, ValueError) as error:  # undefined type hints, or (choices: ...) that are no JSON
        raise BirlError(f"The tool {name}: its type hints or choices cannot be read: {_line(error)}") from error
    result["function"].pop("return", None)  # templates would print it, but models were not trained with it
    return result


def _line(error: Exception) -> str:
    return " ".join(str(part) for part in error.args).split("\n")[0]
