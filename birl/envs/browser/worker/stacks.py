"""Playwright for Python looks up the source lines of all its callers, several times in every call, which is slow. It
needs file, line and name of each: they are in the frames."""
# pyright: reportMissingImports=false

import sys
import traceback
from types import FrameType, SimpleNamespace
from typing import NamedTuple

from playwright._impl import _connection, _sync_base


class Frame(NamedTuple):
    frame: FrameType
    filename: str
    lineno: int


def stack() -> list[Frame]:
    result, frame = [], sys._getframe(1)
    while frame is not None:
        result.append(Frame(frame, frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return result


def install() -> None:
    quiet = {**vars(traceback), "extract_stack": traceback.StackSummary}
    for module in (_connection, _sync_base):
        module.inspect = SimpleNamespace(stack=stack)  # pyright: ignore[reportAttributeAccessIssue]
        module.traceback = SimpleNamespace(**quiet)  # pyright: ignore[reportAttributeAccessIssue]
