"""Whose weights a server holds. Two runs that trained on one server would overwrite each other's, so it belongs to the
one that came first, as long as that is heard from."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

from birl.engines.wire import HEADER
from birl.server.limits import Refused

LIFE = 30.0  # seconds; a router looks at its engines every two
GUARDED = (
    *("/generate", "/load", "/stage/{version:int}", "/join", "/leave"),
    *("/pause", "/resume", "/abort", "/sleep", "/wake"),
)
SHARED = ("/generate",)  # also for those who are no run: they change nothing


@dataclass(slots=True, kw_only=True)
class Owner:
    """`name` is empty where the server is free."""

    name: str = ""
    left: str = ""  # who gave it back last: what it had asked before may arrive after that
    heard: float = 0.0
    clock: Callable[[], float] = time.monotonic

    def now(self) -> str:
        """Whose it is; one that was not heard for `LIFE` seconds has lost it."""
        if self.name and self.clock() - self.heard > LIFE:
            self.name = ""
        return self.name

    def admit(self, path: str, headers: Mapping[str, str]) -> None:
        """Raises `Refused` where another run has the server. A run that asks for something which only its owner may do
        gets it, and so does one that claims it; one that gave it back has to claim it again."""
        run, owner = unquote(headers.get(HEADER, "")), self.now()
        if run and run == owner:
            self.heard = self.clock()
        elif (path in GUARDED and (run or path not in SHARED)) or path == "/claim":
            if owner:
                raise Refused(
                    409,
                    f"This server holds the weights of the run {owner}, heard {self.clock() - self.heard:.0f} s ago: "
                    "two runs on one server would train on each other's answers. Start another server, or wait until "
                    f"that run ends (or {LIFE:g} s after it was killed).",
                    "owned",
                )
            if run and (path == "/claim" or run != self.left):
                self.name, self.left, self.heard = run, "", self.clock()

    def release(self, headers: Mapping[str, str]) -> None:
        if unquote(headers.get(HEADER, "")) == self.name:
            self.name, self.left = "", self.name
