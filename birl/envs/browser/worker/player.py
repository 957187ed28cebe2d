"""All episodes of one worker, each in a separate context of one browser."""
# pyright: reportMissingImports=false

import sys
import traceback
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import browsergym.core
import chromium
from actions import Actions, Invalid
from playing import Playing
from playwright._impl import _connection, _sync_base
from playwright.sync_api import sync_playwright
from suites import SUITES


class Player:
    """`hello` is the first message to the parent."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.suite = SUITES[settings["benchmark"]](settings)
        hosts = [*self.suite.hosts, *settings["hosts"]]
        self.actions = Actions(settings["actions"] or self.suite.actions, hosts if self.suite.navigates else ())
        known = self.suite.tasks()
        if unknown := [name for name in settings["tasks"] if name not in known]:
            raise LookupError(self.suite.unknown(unknown[0], known))
        self.hello = {"tasks": settings["tasks"] or known, "actions": self.actions.describe(settings["describe"])}
        look_up_no_lines()
        self.playwright = sync_playwright().start()
        self.shared = chromium.Shared(self.playwright, settings["browser"], hosts)
        browsergym.core._set_global_playwright(self.shared)
        self.playing: dict[int, Playing] = {}

    @property
    def alive(self) -> bool:
        return self.shared.browser.is_connected()

    def do(self, do: str, episode: int, **more: Any) -> dict[str, Any]:
        match do:
            case "open":
                return self._open(episode, **more)
            case "step":
                try:
                    return self.playing[episode].act(**more)
                except Invalid as error:
                    return {"invalid": str(error)[:500]}
            case "close":
                if result := self.playing.pop(episode, None):
                    result.end()
                return {}
        raise ValueError(f"cannot {do}")

    def _open(self, episode: int, task: str, seed: int, pictures: str = "") -> dict[str, Any]:
        kind, arguments = self.suite.task(task)
        folder = Path(pictures) if pictures else None
        self.playing[episode] = made = Playing(kind, arguments, self.actions, self.settings, folder)
        try:
            return made.begin(seed)
        except BaseException:
            self.playing.pop(episode).end()
            raise

    def quit(self) -> None:
        self.shared.browser.close()
        self.playwright.stop()


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


def look_up_no_lines() -> None:
    """Playwright for Python looks up the source lines of all its callers, several times in every call, which is slow.
    It needs file, line and name of each, which the frames have."""
    quiet = {**vars(traceback), "extract_stack": traceback.StackSummary}
    for module in (_connection, _sync_base):
        module.inspect = SimpleNamespace(stack=stack)  # pyright: ignore[reportAttributeAccessIssue]
        module.traceback = SimpleNamespace(**quiet)  # pyright: ignore[reportAttributeAccessIssue]
