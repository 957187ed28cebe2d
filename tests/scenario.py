"""A coroutine with a deadline: a test that waits for ever says so, and where."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def scenario(main: Callable[[], Coroutine[Any, Any, T]], seconds: float = 60.0) -> T:
    """What `main()` gives. Raises `TimeoutError` after so many seconds."""
    return asyncio.run(asyncio.wait_for(main(), seconds))
