"""Runs in .venv-agents: inspect evaluates questions, and an agent with a tool, by `birl serve` in both of OpenAI's
APIs. Gives what came of it as a line of JSON.

    python -m tests.server.inspect_process FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

from inspect_ai import Task, eval
from inspect_ai.agent import AgentPrompt, react
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate
from inspect_ai.tool import Tool, tool

from tests.server.running import running
from tests.tiny import tiny_model_folder


@tool
def add() -> Tool:
    async def execute(a: bool) -> str:
        """Adds.

        Args:
            a: Whether to add.
        """
        return "7" if a else "0"

    return execute


def told(folder: Path, url: str, way: str, solver: Any, **config: Any) -> dict[str, Any]:
    """Of one evaluation: its status, and of each sample the tokens of prompt and answer and the log-probs."""
    model = get_model(
        "openai/any", base_url=f"{url}/v1", api_key="-", responses_api=way == "responses",
        config=GenerateConfig(max_tokens=24, temperature=1.0, max_retries=0, **config),
    )  # fmt: skip
    task = Task(
        dataset=[Sample(input="What is 3 + 4?", target="7"), Sample(input="What is 2 + 2?", target="4")],
        solver=solver, scorer=includes(), message_limit=6,
    )  # fmt: skip
    (log,) = eval(task, model=model, log_dir=str(folder / "logs"), display="none", fail_on_error=True)
    samples: list[Any] = log.samples or []
    return {
        "status": log.status, "error": log.error and log.error.message[:2000],
        "scored": [bool(s.scores) for s in samples],
        "tokens": [sum(u.total_tokens for u in s.model_usage.values()) for s in samples],
        "prompts": [sum(u.total_tokens - u.output_tokens for u in s.model_usage.values()) for s in samples],
        "logprobs": [len(c.logprobs.content) if (c := s.output.choices[0]).logprobs else 0 for s in samples],
    }  # fmt: skip


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    path = tiny_model_folder(folder / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    with running(path) as server:
        for way in ("chat", "responses"):
            agent = react(prompt=AgentPrompt(instructions="Add."), tools=[add()], attempts=1)
            result = {
                "way": way,
                "questions": told(folder, server.url, way, generate(), logprobs=way == "chat", seed=3),
                "agent": told(folder, server.url, way, agent),
            }
            print("TOLD", json.dumps(result), flush=True)
