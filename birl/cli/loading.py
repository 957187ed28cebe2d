"""Modules that take seconds to import."""

import signal
import threading
from importlib import import_module
from types import FrameType
from typing import Any


def load(name: str) -> Any:
    """Import a module. Ctrl-C meanwhile is one, whatever a library that is being imported makes
    of it: transformers turns it into a ModuleNotFoundError."""
    pressed: list[int] = []

    def press(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ours = ours and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, press)
    try:
        return import_module(name)
    except Exception as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        if ours:  # asyncio looks for this very handler
            signal.signal(signal.SIGINT, signal.default_int_handler)
