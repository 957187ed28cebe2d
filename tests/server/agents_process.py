"""Runs in .venv-agents: trains one agent of `agents.py` after the other for two steps, then lets it talk to `birl
serve`, and says what came of it, a line of JSON each.

    python -m tests.server.agents_process FOLDER
"""

import asyncio
import importlib.util
import inspect
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from birl.cli import main
from birl.config.schema import Engine
from tests.server.agents import AGENTS
from tests.server.running import Running, running
from tests.tiny import tiny_model_folder

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "recipes" / "data" / "arithmetic" / "train.jsonl"
TASK = {"prompt": "What is 3 + 4?", "answer": "7"}


def trained(model: Path, run: Path, name: str) -> dict[str, Any]:
    """The exit code, and of each step how many episodes have a reward, and the tokens that were trained."""
    words = [
        *(
            "rl",
            f"env={ROOT}/tests/server/agents.py:{name}",
            f"model.path={model}",
            f"data.train={ROWS}",
            "reward=length",
        ),
        *("rollout.prompts=1", "rollout.group_size=2", "rollout.max_tokens=24", "steps=2", "validation.every=0"),
        *("validation.at_start=false", "threads=1", f"run={run}", "track.console=off", "track.tensorboard=false"),
        *("track.report=false", "engine.kv_cache_gb=0.2", "env.max_turns=30", "env.cut_turn=continue"),
    ]
    code = main(words)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]
    ended = [step["outcome/ok"] + step["outcome/truncated"] for step in steps]  # the others failed
    return {"code": code, "ended": ended, "tokens": [step["tokens/trained"] for step in steps]}


def served(server: Running, name: str) -> dict[str, Any]:
    import tests.server.agents as module

    try:
        worth = getattr(module, name)(TASK, f"{server.url}/v1", "-")
        return {"worth": asyncio.run(worth) if inspect.iscoroutine(worth) else worth}
    except Exception:
        return {"failed": traceback.format_exc()}


def both(folder: Path) -> None:
    model = tiny_model_folder(folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    with running(model, engine=Engine(kv_cache_gb=0.2, draft_rows=0)) as server:
        for package, function in AGENTS.items():
            if importlib.util.find_spec(package) is None:
                continue
            name = function.__name__
            told = {"name": name, "trained": trained(model, folder / f"run-{name}", name)}
            print("TOLD", json.dumps(told | {"served": served(server, name)}), flush=True)


if __name__ == "__main__":
    both(Path(sys.argv[1]))
