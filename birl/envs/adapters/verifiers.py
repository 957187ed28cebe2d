"""verifiers: an `Environment` that `load_environment` of an installed package or of a local file gives.

birl rl env=verifiers env.task=my_env.py env.parameters=[split=easy]

The environment runs its own rollout and scores it with its own rubric. The client that it is given is the session, in
this process, which keeps the exact tokens of all turns.
"""

from dataclasses import dataclass, field
from typing import Any

from birl.envs.adapters.verifiers_client import FAILURES, client_of
from birl.envs.adapters.verifiers_load import loaded
from birl.types import Model, Task


class Loaded:
    """The environment and its rows, for all episodes."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def read(self, split: str) -> list[dict[str, Any]]:
        if split not in self.rows:
            known = self.env.build_eval_dataset() if split == "validation" else self.env.build_dataset()
            self.rows[split] = [dict(row) for row in known or ()]
        return self.rows[split]

    async def close(self) -> None:
        await self.env._teardown()


class Verifiers:
    @dataclass
    class Config:
        task: str = ""
        """The environment's name, as for `verifiers.load_environment`, or my_env.py, which has that function."""
        parameters: list[str] = field(default_factory=list[str])
        """What `load_environment` takes."""
        rows: int = 0
        """Training rows. 0: all."""
        validation_rows: int = 100
        """Rows of its evaluation dataset, if it has one. 0: all."""

    @staticmethod
    def shared(config: Config) -> Loaded:
        return Loaded(loaded(config.task, config.parameters))

    @staticmethod
    def tasks(config: Config, split: str, shared: Loaded) -> list[dict[str, Any]]:
        most = (config.validation_rows if split == "validation" else config.rows) or None
        rows = shared.read(split)[:most]
        return [
            {"prompt": prompt_text(row["prompt"]), "answer": str(row.get("answer", "")), "split": split, "number": i}
            for i, row in enumerate(rows)
        ]

    def __init__(self, task: Task, shared: Loaded) -> None:
        self.env = shared.env
        self.row = shared.read(task.columns["split"])[task.columns["number"]]

    async def run(self, model: Model) -> float:
        failures: list[Exception] = []
        FAILURES.set(failures)
        state = await self.env.rollout(self.row, client_of(model), "policy", {})
        if state.get("error") is not None:
            raise state["error"]
        if state.get("timed_out"):
            raise RuntimeError("the environment's own timeout_seconds is over")
        await self.env.rubric.score_rollout(state)
        await self.env.rubric.cleanup(state)
        if failures:  # the rubric made 0 of it
            raise failures[0]
        return float(state["reward"])

    async def close(self) -> None:
        pass  # its rollout cleans up, in any case


def prompt_text(prompt: Any) -> str:
    """What a row asks, for its length and for the viewer; the environment renders it itself."""
    return prompt if isinstance(prompt, str) else "\n\n".join(str(m.get("content") or "") for m in prompt)
