"""Web tasks: the model sees a page as an accessibility tree and replies with an action; the task's evaluator rewards.

env=miniwob      MiniWoB++, small pages that come with the environment
env=webarena     WebArena and WebArena-Verified, on sites of your own
"""

import re
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from birl.config.schema.kinds import Amount, Count, Positive, Whole
from birl.envs.browser.pool import Page, Pool
from birl.errors import BirlError
from birl.types import Feedback, Message, Task

SHELL = "/usr/lib/chromium/chromium-headless-shell"  # Debian's, without its wrapper script
BROWSERS = (SHELL, "chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
VALIDATION = 1_000_000  # first seed of validation: no training page is used for validation
# what stands behind ``` or ~~~ is a language where a line ends behind it, or a call follows: ```python click("1")```
FENCE = re.compile(r"(`{3,}+|~{3,}+)(?:[\w+#.-]*[ \t]*\r?\n|[\w+#.-]+[ \t]+(?=\w+\())?(.*?)\1", re.DOTALL)
CALL = re.compile(r"\w\(")
LEFT_OUT = "(a page that is not shown any more)"


@dataclass
class Keys:
    """Keys of both benchmarks."""

    tasks: list[str] = field(default_factory=list)
    """Names or numbers of the training tasks. Empty: all."""
    validation_tasks: list[str] = field(default_factory=list)
    """Names or numbers of the validation tasks. Empty: those of training."""
    seeds: Count = 100
    """Number of different pages (seeds) per training task."""
    validation_seeds: Count = 5
    """Number of different pages per validation task; none of them is in training."""
    actions: list[str] = field(default_factory=list)
    """BrowserGym's action sets, such as miniwob_liu18. Empty: the default of the benchmark."""
    describe: Literal["examples", "signatures", "full", "none"] = "examples"
    """Description of the actions in the prompt: examples (one each) | signatures | full (with descriptions) | none."""
    page: Literal["tree", "list"] = "tree"
    """Format of a page: tree (BrowserGym's accessibility tree) | list (shorter: one line per text and per interactive
    element, its number after its text)."""
    max_observation: Count = 4000
    """Maximum length of a page in a prompt [characters]; whole lines are cut at its end."""
    history: Whole = 0
    """Number of newest pages in a prompt; leaving out older ones starts a new Sample each turn. 0: all."""
    workers: Count = 2
    """Browser processes."""
    contexts: Count = 8
    """Concurrent episodes per browser, each with its own cookies and pages."""
    restart_every: Count = 500
    """Episodes after which a browser is restarted."""
    call_timeout: Positive = 60.0
    """Timeout of an action, or of opening a page; then the browser is killed [s]."""
    pre_observation_delay: Amount = 0.02
    """Delay between an action and the observation of the page [s]. BrowserGym's default is 0.5."""
    screenshots: bool = False
    """Save a screenshot of every observed page."""
    screenshot_folder: str = ""
    """Folder of screenshots, FOLDER/EPISODE-TASK-SEED/000.png. Empty: screenshots/ in the run folder, where `birl view`
    shows them with the episode; without a run, in the current folder."""
    python: str = ""
    """Python interpreter with BrowserGym. Empty: .venv-browser, from `make setup-browser`."""
    browser: str = ""
    """Chromium executable. Empty: the first of chromium-headless-shell, chromium, google-chrome on PATH."""


class Web:
    """One episode. `benchmark` is the worker's name of the source of tasks."""

    benchmark: ClassVar[str] = ""
    Config: ClassVar[type] = Keys

    @classmethod
    async def shared(cls, config: Any, folder: Path | None = None) -> Pool:
        pictures = Path(config.screenshot_folder or (folder or Path()) / "screenshots").absolute()
        settings = {
            "benchmark": cls.benchmark_of(config),
            "tasks": [*config.tasks, *config.validation_tasks],
            "hosts": list(getattr(config, "hosts", ())),
            "actions": list(config.actions),
            "describe": config.describe,
            "page": config.page,
            "browser": program(config.browser),
            "pre_observation_delay": config.pre_observation_delay,
            "max_observation": config.max_observation,
        }
        pool = Pool(
            interpreter(config.python),
            settings,
            workers=config.workers,
            contexts=config.contexts,
            restart_every=config.restart_every,
            timeout=config.call_timeout,
            pictures=str(pictures) if config.screenshots else "",
        )
        await pool.start()
        config.tasks = config.tasks or pool.hello["tasks"]  # the worker knows the tasks
        return pool

    @classmethod
    def benchmark_of(cls, config: Any) -> str:
        return cls.benchmark

    @classmethod
    def tasks(cls, config: Any, split: str) -> list[dict[str, Any]]:
        training = split == "train"
        names = config.tasks if training else config.validation_tasks or config.tasks
        first, n = (0, config.seeds) if training else (VALIDATION, config.validation_seeds)
        return [
            {"prompt": f"{cls.benchmark} {name}, seed {seed}", "task": name, "seed": seed, "data_source": name}
            for seed in range(first, first + n)
            for name in names
        ]

    def __init__(self, task: Task, config: Any, shared: Pool) -> None:
        self.task, self.config, self.pool = task, config, shared
        self.page: Page | None = None
        self.talk: list[Message] = []  # the conversation with every page in it
        self.shown = ""  # the current page
        self.invalid = 0
        self.pictures: list[str] = []

    async def start(self) -> tuple[Message, ...]:
        columns = self.task.columns
        if "task" not in columns:
            raise BirlError(f"{self.task.place} has no column `task`, which names a task of {self.benchmark}")
        self.page = await self.pool.open(str(columns["task"]), int(columns.get("seed") or 0))
        self.shown = self.page.first["page"]
        self.talk = [Message(role="user", content=self._first(self.shown))]
        return tuple(self.talk)

    def _first(self, page: str) -> str:
        actions = self.pool.hello["actions"]
        listed = f"Actions:\n{actions}\n\n" if actions else ""
        return f"Goal: {self.page.first['goal']}\n\n{listed}{told(page)}"  # pyright: ignore[reportOptionalMemberAccess]

    async def step(self, reply: Message) -> Feedback:
        assert self.page is not None
        result = await self.page.step(action_of(reply.content))
        error = result.get("error", "")
        if "invalid" in result:
            self.invalid += 1
            error = f"invalid action: {result['invalid']}"
        else:
            self.shown = result["page"]
        done = result.get("done", False)
        new = Message(role="user", content=(f"Error: {error}\n\n" if error else "") + told(self.shown))
        self.talk += [reply, new]
        return Feedback(
            messages=(new,),
            prompt=None if done or not self.config.history else self._recent(),
            reward=result.get("reward", 0.0),
            done=done,
            info={"invalid_actions": float(self.invalid)},
        )

    def _recent(self) -> tuple[Message, ...] | None:
        """The conversation without the older pages; None if there are none."""
        pages = (len(self.talk) + 1) // 2
        old = pages - self.config.history
        if old <= 0:
            return None
        first = Message(role="user", content=self._first(LEFT_OUT))
        hidden = Message(role="user", content=told(LEFT_OUT))
        return tuple(first if i == 0 else hidden if i % 2 == 0 and i // 2 < old else m for i, m in enumerate(self.talk))

    async def close(self) -> None:
        page, self.page = self.page, None
        if page is not None:
            try:
                await page.close()
            finally:
                self.pictures = page.saved()


class MiniWob(Web):
    benchmark = "miniwob"


class WebArena(Web):
    benchmark = "webarena"

    @dataclass
    class Config(Keys):
        seeds: Count = 1
        """Number of rows per training task; its page is always the same."""
        validation_seeds: Count = 1
        """Number of rows per validation task."""
        max_observation: Count = 16000
        """Maximum length of a page in a prompt [characters]; whole lines are cut at its end."""
        pre_observation_delay: Amount = 0.5
        """Delay between an action and the observation of the page [s]."""
        verified: bool = False
        """Use WebArena-Verified's tasks and evaluators, which need no language model, instead of WebArena's."""
        hosts: list[str] = field(default_factory=list)
        """Further hosts, as host:port, that pages may load from, besides the sites themselves."""

    @classmethod
    def benchmark_of(cls, config: Any) -> str:
        return "webarena_verified" if config.verified else "webarena"


def told(page: str) -> str:
    return f"Page:\n{page}\n\nNext action:"


def action_of(text: str) -> str:
    """Find the action in a reply: in its last code fence, else in its last line with a call, else in the last line."""
    if fences := FENCE.findall(text):
        return fences[-1][1].strip()
    lines = [line.strip().strip("`") for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if CALL.search(line)), lines[-1] if lines else "")


def interpreter(named: str) -> str:
    if named:
        result = shutil.which(str(Path(named).expanduser()))
        if result is None:
            raise BirlError(f"env.python={named}: there is no such program.")
        return result
    for folder in (Path.cwd(), Path(__file__).parents[3], Path(sys.prefix)):
        if (own := folder / ".venv-browser" / "bin" / "python").exists():
            return str(own)
    return sys.executable


def program(named: str) -> str:
    if named and shutil.which(named) is None:
        raise BirlError(f"env.browser={named}: there is no such program.")
    result = next(filter(None, map(shutil.which, [named] if named else BROWSERS)), None)
    if result is None:
        raise BirlError(
            "Browser tasks need Chromium, and none is on PATH. On Debian: apt-get install -y --no-install-recommends "
            "chromium-headless-shell. Or name it: env.browser=PATH."
        )
    return result
