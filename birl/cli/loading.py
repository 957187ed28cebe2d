"""Modules that take seconds to import."""

import signal
import threading
from importlib import import_module
from types import FrameType
from typing import Any

from birl.exits import Terminated, terminate


def load(name: str) -> Any:
    """Import a module. A signal meanwhile is one, whatever a library that is being imported makes of it: transformers
    turns the exception into a ModuleNotFoundError."""
    raised: list[type[KeyboardInterrupt]] = []

    def signalled(number: int, frame: FrameType | None) -> None:
        raised.append(Terminated if number == signal.SIGTERM else KeyboardInterrupt)
        raise raised[-1]

    main = threading.current_thread() is threading.main_thread()
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: terminate}
    ours = {number: handler for number, handler in usual.items() if main and signal.getsignal(number) is handler}
    for number in ours:
        signal.signal(number, signalled)
    try:
        return import_module(name)
    except Exception as error:
        if raised:
            raise raised[-1] from error
        raise
    finally:
        for number, handler in ours.items():  # asyncio looks for this very handler of SIGINT
            signal.signal(number, handler)
