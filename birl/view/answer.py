"""JSON responses: NaN and infinity become null, numpy arrays become lists."""

import json
import math
from typing import Any

import numpy as np
from starlette.responses import Response


class Answer(Response):
    """JSON of values from a run's files or numpy. Lone surrogates, which have no UTF-8, become JSON escapes.

    Example: Answer({"values": np.array([0.5, np.nan])}).body == b'{"values":[0.5,null]}'
    """

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(_plain(content), separators=(",", ":"), allow_nan=False).encode("ascii")


def error(message: str, status: int = 400) -> Answer:
    """`message`: a sentence that says what to change."""
    return Answer({"error": message}, status_code=status)


def _plain(value: Any) -> Any:
    match value:
        case np.ndarray():
            return _numbers(value)
        case np.generic():
            return _plain(value.item())
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case str() | int() | bool() | None:
            return value
    return str(value)


def _numbers(values: np.ndarray) -> list[Any]:
    listed = values.tolist()
    if values.dtype.kind != "f" or bool(np.isfinite(values).all()):
        return listed
    return [_plain(value) for value in listed]
