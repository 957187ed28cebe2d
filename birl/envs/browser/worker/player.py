"""All episodes of one worker, each in a separate context of one browser: BrowserGym's environment without parts that
cost time and that no model sees."""
# pyright: reportMissingImports=false

import pkgutil
import sys
import time
import traceback
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import browsergym.core
import browsergym.core.env as gym_env
import chromium
from actions import Actions, Invalid
from browsergym.core import observation
from browsergym.utils.obs import IGNORED_AXTREE_PROPERTIES, flatten_axtree_to_str
from listing import listed
from PIL import Image
from playwright._impl import _connection, _sync_base
from playwright.sync_api import Error, sync_playwright
from suites import SUITES

TRIES = 5
ROLES = ("LineBreak", "InlineTextBox")  # not shown: the second repeats the text above it, since Chromium 130 or so
CLICKABLE = ("clickable", "button", "link", "textbox", "checkbox", "radio", "combobox", "option", "tab", "menuitem")
PASSING = (  # errors that a changing page may cause; it is then observed again
    "Frame was detached",
    "Frame with the given frameId is not found",
    "Execution context was destroyed",
    "Frame has been detached",
    "Cannot mark a child frame without a bid",
    "Cannot read properties of undefined",
)


class Scripts:
    """BrowserGym's scripts, read once. Its marking polls every 40 ms for completion, which takes a frame."""

    def __init__(self) -> None:
        self.read: dict[tuple[str, str], bytes] = {}

    def get_data(self, package: str, name: str) -> bytes:
        if (package, name) not in self.read:
            text = pkgutil.get_data(package, name) or b""
            self.read[package, name] = text.replace(b"interval=40", b"interval=4")
        return self.read[package, name]


observation.pkgutil = Scripts()
gym_env.Chat = chromium.Messages


class Playing(gym_env.BrowserEnv):
    """One episode. `pictures`: a folder for screenshots, or None."""

    def __init__(
        self, task: Any, task_kwargs: dict[str, Any], actions: Actions, settings: dict[str, Any], pictures: Path | None
    ) -> None:
        super().__init__(
            task,
            task_kwargs,
            action_mapping=None,
            pre_observation_delay=settings["pre_observation_delay"],
            pw_context_kwargs={"record_har_path": task_kwargs["record"]} if "record" in task_kwargs else {},
        )
        self.actions, self.most, self.pictures = actions, settings["max_observation"], pictures
        self.tabs = bool(actions.hosts)
        # If no address can be opened, addresses contain nothing but this process's port.
        self.hidden = IGNORED_AXTREE_PROPERTIES if self.tabs else (*IGNORED_AXTREE_PROPERTIES, "url")
        self.as_list = settings["page"] == "list"
        self.ended, self.shown = False, 0
        self.views: dict[Any, View] = {}

    def begin(self, seed: int) -> dict[str, Any]:
        page, _ = self.reset(seed=seed)
        goal = "\n".join(part["text"] for part in self.goal_object if part["type"] == "text")
        return {"goal": goal, "page": page}

    def act(self, action: str) -> dict[str, Any]:
        """Run an action and return the result. Raises `Invalid`; failures in the browser are in `error`."""
        call = self.actions.parse(action)
        self.last_action, self.last_action_error = action, ""
        info, send, infeasible = self.pre_step()
        try:
            self.actions.run(call, self.page, send, infeasible)
        except Exception as error:
            self.last_action_error = f"{type(error).__name__}: {error}"
        page, reward, done, _, _ = self.post_step(info)
        if done and hasattr(self.task, "evaluate"):
            context: Any = self.context
            context.close()  # writes the record that evaluate reads
            self.context = None
            reward = self.task.evaluate(self.chat.messages)
        return {"page": page, "reward": float(reward), "done": bool(done), "error": self.last_action_error[:500]}

    def end(self) -> None:
        task = self.task
        try:
            self.close()
        finally:
            if file := getattr(task, "config_file", None):
                Path(file).unlink(missing_ok=True)

    def _task_validate(self) -> tuple[Any, ...]:
        result = super()._task_validate()
        self.ended = bool(result[1]) or self.infeasible_message_received
        return result

    def _get_obs(self) -> str:
        if self.pictures is not None:
            self._picture(self.pictures)
        if self.ended:
            return ""  # it is not shown
        tree, extra = self._extract()
        name_clickable(tree, extra)
        if self.as_list:
            text = listed(tree, extra, CLICKABLE, (*self.hidden, "url"))
        else:
            text = flatten_axtree_to_str(
                tree, extra_properties=extra, with_clickable=True, ignored_roles=ROLES, ignored_properties=self.hidden
            )
        if self.tabs:
            pages = self.page.context.pages
            text = "".join(f"Tab {i}{' (this one)' * (p == self.page)}: {p.url}\n" for i, p in enumerate(pages)) + text
        return cut(text, self.most)

    def _extract(self) -> tuple[Any, Any]:
        """Extract without the focus, which the tree also has."""
        for left in reversed(range(TRIES)):
            try:
                observation._pre_extract(self.page, tags_to_mark=self.tags_to_mark, lenient=left == 0)
                view = self._view()
                dom = observation.extract_dom_snapshot(view)
                tree = observation.extract_merged_axtree(view)
                break
            except (Error, observation.MarkingError) as error:
                if not left or not any(reason in str(error) for reason in PASSING):
                    raise
                observation._post_extract(self.page)
                time.sleep(0.1)
        extra = observation.extract_dom_extra_properties(dom, scale_factor=1.0)
        observation._post_extract(self.page)
        return tree, extra

    def _view(self) -> "View":
        if self.page not in self.views:
            self.views[self.page] = View(self.page.context.new_cdp_session(self.page))
        return self.views[self.page]

    def _picture(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(observation.extract_screenshot(self.page)).save(folder / f"{self.shown:03d}.png")
        self.shown += 1


class View:
    """A page for the extracting functions: a session of Chromium's protocol. They open and close four for each
    observation; this one is kept."""

    def __init__(self, session: Any) -> None:
        self.context, self.send = self, session.send

    def new_cdp_session(self, _: Any) -> "View":
        return self

    def detach(self) -> None:
        pass


def name_clickable(tree: Any, extra: Any) -> None:
    """Plain elements that react to clicks, such as a span with a handler, become `[14] clickable 'text'`. BrowserGym
    leaves them out, so that they could not be clicked by id. Kinds that are always clickable are not marked."""
    nodes = {node["nodeId"]: node for node in tree["nodes"]}
    for node in tree["nodes"]:
        role, result = node["role"], extra.get(node.get("browsergym_id"))
        if role["value"] == "StaticText" and not node["name"]["value"].strip():
            role["value"] = "LineBreak"
        if result is None or not result["clickable"]:
            continue
        if role["value"] == "generic" and "name" in node:
            inside = [nodes[i] for i in node.get("childIds", ()) if i in nodes]
            texts = [n["name"]["value"].strip() for n in inside if n["role"]["value"] == "StaticText" and "name" in n]
            role["value"] = "clickable"
            node["name"]["value"] = node["name"]["value"] or " ".join(texts)
        if role["value"] in CLICKABLE:
            result["clickable"] = False


def cut(text: str, most: int) -> str:
    """Truncate to at most `most` characters, at the end of a line if possible."""
    if len(text) <= most:
        return text
    kept = text[:most]
    kept = kept[: kept.rfind("\n")] if "\n" in kept else kept
    return f"{kept}\n... ({text.count(chr(10)) - kept.count(chr(10))} more lines)"


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
