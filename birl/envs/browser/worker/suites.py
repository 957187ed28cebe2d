"""Sources of the tasks of a benchmark, and the hosts that its pages need."""
# pyright: reportMissingImports=false

import difflib
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import chromium
from playwright.sync_api import Error

SETTLED = 10_000  # ms; a site that is still busy then is not waited for
SITES = ("SHOPPING", "SHOPPING_ADMIN", "REDDIT", "GITLAB", "WIKIPEDIA", "MAP", "HOMEPAGE")


class MiniWob:
    """MiniWoB++: the pages of the `miniwob` wheel, served on loopback."""

    actions = ("bid",)
    navigates = False

    def __init__(self, settings: dict[str, Any]) -> None:
        import miniwob

        port = chromium.serve(Path(str(miniwob.__file__)).parent / "html")
        self.hosts = [f"127.0.0.1:{port}"]
        os.environ["MINIWOB_URL"] = f"http://127.0.0.1:{port}/miniwob/"
        from browsergym.miniwob import ALL_MINIWOB_TASKS

        self.kinds = {kind.get_task_id().removeprefix("miniwob."): kind for kind in ALL_MINIWOB_TASKS}

    def tasks(self) -> list[str]:
        return list(self.kinds)

    def unknown(self, name: str, known: list[str]) -> str:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"env.tasks: MiniWoB++ has no task {name!r}.{hint} It has: {', '.join(known)}"

    def task(self, name: str) -> tuple[Any, dict[str, Any]]:
        return self.kinds[name], {}


class Patient:
    """Replaces a page on which BrowserGym logs in: its context's new pages are closed only when they are idle.
    BrowserGym closes them right after the click, before the site has responded: the login may be lost, and Chromium
    sometimes never closes a page while its next one is loading."""

    def __init__(self, page: Any) -> None:
        self.context, self._inner = self, page.context

    def new_page(self) -> Any:
        page = self._inner.new_page()
        close = page.close

        def at_rest() -> None:
            with suppress(Error):
                page.wait_for_load_state("networkidle", timeout=SETTLED)
            close()

        page.close = at_rest
        return page


class WebArena:
    """WebArena's tasks and evaluators, on the sites of WA_SHOPPING and similar variables."""

    actions = ("webarena",)
    navigates = True

    def __init__(self, settings: dict[str, Any]) -> None:
        if missing := [f"WA_{site}" for site in SITES if not os.environ.get(f"WA_{site}")]:
            raise LookupError(f"env=webarena: {', '.join(missing)} must hold the addresses of the sites.")
        self.hosts = sorted({urlsplit(os.environ[f"WA_{site}"]).netloc for site in SITES} - {""})
        _offline_tokenizer()
        from browsergym.webarena.instance import WebArenaInstance

        log_in = WebArenaInstance.ui_login
        WebArenaInstance.ui_login = lambda own, site, page: log_in(own, site, Patient(page))
        self.instance = WebArenaInstance()
        self.configs = self._configs()

    def tasks(self) -> list[str]:
        return [name for name, config in self.configs.items() if not self._needs_judge(config)]

    def unknown(self, name: str, known: list[str]) -> str:
        if name in self.configs:
            return f"env.tasks: a language model judges WebArena's task {name} (fuzzy_match): set OPENAI_API_KEY."
        return f"env.tasks: WebArena's tasks are 0 to {len(self.configs) - 1}, not {name!r}."

    def task(self, name: str) -> tuple[Any, dict[str, Any]]:
        from browsergym.webarena.task import GenericWebArenaTask

        return GenericWebArenaTask, {"task_id": int(name)}

    def _configs(self) -> dict[str, dict[str, Any]]:
        import json
        from importlib import resources

        import webarena

        result = json.loads(resources.files(webarena).joinpath("test.raw.json").read_text())
        return {str(config["task_id"]): config for config in result}

    def _needs_judge(self, config: dict[str, Any]) -> bool:
        answers = config["eval"].get("reference_answers") or {}
        return "fuzzy_match" in answers and not os.environ.get("OPENAI_API_KEY")


class Verified(WebArena):
    """WebArena-Verified: the same sites, its own wording, and evaluators that need no language model."""

    def _configs(self) -> dict[str, dict[str, Any]]:
        import verified

        self.judge = verified.judge(self.instance)
        return {str(task.task_id): {"eval": {}} for task in self.judge.get_tasks()}

    def task(self, name: str) -> tuple[Any, dict[str, Any]]:
        import verified

        record = Path(tempfile.mkdtemp()) / "requests.har"
        return verified.Task, {"judge": self.judge, "instance": self.instance, "task_id": int(name), "record": record}


def _offline_tokenizer() -> None:
    """nltk would download this when BrowserGym's WebArena is imported. Empty tables split words in the same way."""
    folder = Path(tempfile.gettempdir()) / "nltk"
    tables = folder / "tokenizers" / "punkt_tab" / "english"
    tables.mkdir(parents=True, exist_ok=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (tables / name).touch()
    os.environ["NLTK_DATA"] = str(folder)


SUITES: dict[str, Any] = {"miniwob": MiniWob, "webarena": WebArena, "webarena_verified": Verified}
