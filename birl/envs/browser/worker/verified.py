"""WebArena-Verified's tasks on WebArena's sites: the answer is JSON, and the browser's requests are evidence."""
# pyright: reportMissingImports=false

import json
from pathlib import Path
from typing import Any

from browsergym.core.task import AbstractBrowserTask
from webarena_verified.api import WebArenaVerified
from webarena_verified.types.config import WebArenaVerifiedConfig

FORM = (
    "\n\nWhen you are done, send one message with this JSON and nothing else: "
    '{"task_type": "RETRIEVE" | "MUTATE" | "NAVIGATE", "status": "SUCCESS" | "ACTION_NOT_ALLOWED_ERROR" | '
    '"PERMISSION_DENIED_ERROR" | "NOT_FOUND_ERROR" | "DATA_VALIDATION_ERROR" | "UNKNOWN_ERROR", '
    '"retrieved_data": [...] or null, "error_details": null or text}'
)


def judge(instance: Any) -> WebArenaVerified:
    """The evaluator, with the addresses of the sites."""
    sites = {f"__{name.upper()}__": {"urls": [url.rstrip("/")]} for name, url in instance.urls.items()}
    return WebArenaVerified(config=WebArenaVerifiedConfig.model_validate({"environments": sites}))


class Task(AbstractBrowserTask):
    """One task. BrowserGym calls `validate` after each action; the score comes from `evaluate`, after the context is
    closed and its record of requests is written."""

    def __init__(self, seed: int, judge: WebArenaVerified, instance: Any, task_id: int, record: Path) -> None:
        super().__init__(seed)
        self.viewport, self.slow_mo, self.timeout = {"width": 1280, "height": 720}, 0, 10000
        self.judge, self.instance, self.task = judge, instance, judge.get_task(task_id)
        self.record = record

    def setup(self, page: Any) -> tuple[str, dict[str, Any]]:
        for site in self.task.sites:
            self.instance.ui_login(site=site.value, page=page)
        first, *others = [self.judge.config.render_url(url, list(self.task.sites)) for url in self.task.start_urls]
        page.goto(first)
        for url in others:
            page.context.new_page().goto(url)
        return self.task.intent + FORM, {}

    def validate(self, page: Any, chat_messages: list[dict[str, Any]]) -> tuple[float, bool, str, dict[str, Any]]:
        return 0.0, chat_messages[-1]["role"] == "assistant", "", {}

    def evaluate(self, messages: list[dict[str, Any]]) -> float:
        last = messages[-1]
        answer = last["message"]
        if last["role"] == "infeasible":
            answer = json.dumps({"task_type": "RETRIEVE", "status": "UNKNOWN_ERROR", "error_details": answer})
        self._drop_blocked()
        result = self.judge.evaluate_task(task_id=self.task.task_id, agent_response=answer, network_trace=self.record)
        if result.status.value == "error":
            raise RuntimeError(f"WebArena-Verified could not judge: {result.error_msg}")
        return float(result.score)

    def _drop_blocked(self) -> None:
        """Remove requests that never left the browser from the evidence: they would count as the last request."""
        record = json.loads(self.record.read_text())
        log = record["log"]
        log["entries"] = [entry for entry in log["entries"] if entry["response"]["status"] > 0]
        self.record.write_text(json.dumps(record))

    def teardown(self) -> None:
        self.record.unlink(missing_ok=True)
