"""Functions of the Modal app beside training: list checkpoints, try an engine, try a reward function. Prints what it
returns, as `modal run` shows what is printed."""

import asyncio
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from birl.engines import names
from birl.errors import BirlError
from birl.process import ProcessGroup

START = 1200.0  # s that loading a model may take


def checkpoints(root: Path, run: str = "") -> list[dict[str, Any]]:
    """Checkpoints of all runs in `root`/runs, or of the one of this name: run, step, size [GiB], time [Unix s]."""
    result: list[dict[str, Any]] = []
    for manifest in sorted(root.glob(f"runs/{run or '*'}/checkpoints/step-*/manifest.json")):
        folder = manifest.parent
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**30
        step = folder.name.removeprefix("step-")
        if step.isdigit():
            name = folder.parent.parent.name
            result.append({"run": name, "step": int(step), "gib": round(size, 3), "saved": folder.stat().st_mtime})
    result.sort(key=lambda one: (one["run"], one["step"]))
    for one in result:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(one["saved"]))
        print(f"{one['run']}  step {one['step']}  {one['gib']:.2f} GiB  {when} UTC")
    if not result:
        print(f"no checkpoint of {run or 'any run'}")
    return result


def clear(root: Path, model: str = "") -> list[str]:
    """Remove downloaded models of the hub's cache (models--OWNER--NAME). Raises `BirlError`."""
    hub = root / "models" / "hub"
    kept = "models--" + model.replace("/", "--") if model else "*"
    if model and not all(part and part.strip(".") for part in model.split("/")):
        raise BirlError(f"model={model}: is not a model's name, such as Qwen/Qwen2.5-0.5B-Instruct")
    gone = sorted(path for path in hub.glob(kept) if path.is_dir())
    for path in gone:
        shutil.rmtree(path)
    named = [path.name.removeprefix("models--").replace("--", "/") for path in gone]
    print(f"removed: {', '.join(named) or 'nothing'}")
    return named


def rollout(model: str, prompt: str, max_tokens: int, words: tuple[str, ...] = ()) -> dict[str, Any]:
    """Start an engine as training would, and ask it. Raises `BirlError` with its output if it does not start."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BIRL_CACHE"] = folder
        command = [sys.executable, "-m", "birl", "serve", f"model.path={model}", "name=check/0", *words]
        child = ProcessGroup(command, log=Path(folder) / "engine.log", env={**os.environ, "BIRL_TOKEN": token})
        began = time.monotonic()
        try:
            while not (result := names.find("check/0")):
                if not child.alive or time.monotonic() - began > START:
                    raise BirlError(f"model={model}: no engine started.\n{child.tail(2000)}")
                time.sleep(0.1)
            ready = time.monotonic() - began
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "seed": 0}
            answer = httpx.post(
                f"{result[0]}/v1/chat/completions", json=body | {"return_token_ids": True}, timeout=600.0,
                headers={"Authorization": f"Bearer {token}"}, trust_env=False,
            )  # fmt: skip
            choice = answer.raise_for_status().json()["choices"][0]
            seconds = time.monotonic() - began - ready
        finally:
            child.end(30.0)
    result = {
        "text": choice["message"]["content"],
        "tokens": len(choice["token_ids"]),
        "seconds": round(seconds, 3),
        "ready_after": round(ready, 1),
    }
    print(json.dumps(result))
    return result


def reward(name: str, completion: str, gold: str) -> dict[str, Any]:
    """The reward of an answer as in training: value, outcome, and detail of a failure."""
    from birl.rewards.score import Rewards

    async def ask() -> dict[str, Any]:
        async with Rewards([name], timeout=60.0) as rewards:
            (score,) = await rewards.score([""], [completion], {}, [gold])
            return {"value": score.value, "outcome": str(score.outcome.value), "detail": score.detail}

    result = asyncio.run(ask())
    print(json.dumps(result))
    return result
