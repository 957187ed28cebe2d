"""The model's actions: BrowserGym's action functions, called with parsed arguments. A model's text is never run as
code."""
# pyright: reportMissingImports=false

import inspect
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from browsergym.core.action import functions
from browsergym.core.action.highlevel import ACTION_SUBSETS, HighLevelActionSet
from browsergym.core.action.parsers import NamedArgument, highlevel_action_parser

FILES = ("upload_file", "mouse_upload_file")  # would load any file of this machine into a page
LONGEST = 4000  # of an action [characters]
LONGEST_WAIT = 2000  # of noop [ms]
NAVIGATION = ("goto", "go_back", "go_forward", "new_tab", "tab_close", "tab_focus")


class Invalid(Exception):
    """The message says in one line why this is no action."""


class Actions:
    """The actions of `subsets`, without those that read files, and without navigation if `hosts` is empty."""

    def __init__(self, subsets: list[str], hosts: Collection[str]) -> None:
        if unknown := [s for s in subsets if s not in ACTION_SUBSETS]:
            raise LookupError(f"env.actions: there is no action set {unknown[0]!r}. Known: {', '.join(ACTION_SUBSETS)}")
        left_out = FILES if hosts else (*FILES, *NAVIGATION)
        result = {f.__name__: f for s in subsets for f in ACTION_SUBSETS[s] if f.__name__ not in left_out}
        if not result:
            raise LookupError(f"env.actions={subsets}: no action of these sets is allowed here.")
        self.functions, self.hosts = {"noop": functions.noop, **result}, frozenset(hosts)
        self.set = HighLevelActionSet(
            subsets=["custom"], custom_actions=list(result.values()), multiaction=False, demo_mode="off"
        )

    def describe(self, how: str) -> str:
        """Description for the prompt. `how`: none, examples (one line each), signatures or full."""
        if how == "none":
            return ""
        if how == "full":
            return self.set.describe().strip()
        if how == "signatures":
            return "\n".join(action.signature for action in self.set.action_set.values())
        return "\n".join(action.examples[0] for action in self.set.action_set.values() if action.examples)

    def parse(self, text: str) -> tuple[str, list[Any], dict[str, Any]]:
        """(name, arguments, named arguments) of the one action in `text`. Raises `Invalid`."""
        try:
            matches = highlevel_action_parser.search_string(text[:LONGEST])
            calls = [call for match in matches for call in match.as_list()]
        except Exception as error:  # the text is arbitrary, and the parser raises many kinds of errors
            raise Invalid(f"{type(error).__name__}: {error}") from error
        if len(calls) != 1:
            raise Invalid("there is no action in it" if not calls else "there are several actions in it; give one")
        name, arguments = calls[0]
        if name not in self.functions:
            raise Invalid(f"there is no action {name}; known are {', '.join(self.functions)}")
        named = {a.name: a.value for a in arguments if isinstance(a, NamedArgument)}
        plain = [a for a in arguments if not isinstance(a, NamedArgument)]
        try:
            bound = inspect.signature(self.functions[name]).bind(*plain, **named).arguments
        except TypeError as error:
            raise Invalid(f"{name}: {error}") from error
        if name == "goto":
            self._check_address(str(bound["url"]))
        wait = bound.get("wait_ms", 0)
        if not (isinstance(wait, int | float) and 0 <= wait <= LONGEST_WAIT):
            raise Invalid(f"{name}: takes 0 to {LONGEST_WAIT} ms")
        return name, plain, named

    def _check_address(self, url: str) -> None:
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise Invalid(f"goto: {error}") from error
        if parts.scheme not in ("http", "https") or parts.netloc not in self.hosts:
            raise Invalid(f"goto: only pages of {', '.join(sorted(self.hosts))} may be opened")

    def run(self, call: tuple[str, list[Any], dict[str, Any]], page: Any, send: Any, infeasible: Any) -> None:
        """Raises whatever the browser raises."""
        name, plain, named = call
        # BrowserGym pastes this before the source of these functions
        functions.page, functions.demo_mode, functions.retry_with_force = page, "off", False
        functions.send_message_to_user, functions.report_infeasible_instructions = send, infeasible
        self.functions[name](*plain, **named)
