"""Agents of real packages, unchanged, are trained and then talk to `birl serve`; lm-evaluation-harness and inspect ask
it, too."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from birl.cache import cache_folder
from tests.server.agents import AGENTS

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-agents" / "bin" / "python"
#: forced into their form by a server; the others may say anything, or call a tool too often
READ = ("openai_client", "openai_agents", "openai_responses", "langchain", "litellm", "instructor")
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no agent packages: make setup-agents"),
    pytest.mark.timeout(1300),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `agents_process` says of each."""
    return {line["name"]: line for line in lines("tests.server.agents_process", tmp_path_factory.mktemp("agents"))}


def lines(module: str, folder: Path) -> list[dict[str, Any]]:
    """What a process says, without the hub."""
    nobody = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9") | {"NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [str(PYTHON), "-m", module, str(folder)],
        cwd=ROOT,
        env={
            **os.environ,
            **nobody,
            "HOME": str(folder),
            "BIRL_CACHE": str(cache_folder("kernels").parent),  # compiled once, not within the time of a server's start
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "HAYSTACK_TELEMETRY_ENABLED": "False",
        },
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line.removeprefix("TOLD ")) for line in done.stdout.splitlines() if line.startswith("TOLD ")]


@pytest.mark.parametrize("name", [function.__name__ for function in AGENTS.values()])
def test_what_was_trained_runs_on_a_server(told: dict[str, Any], name: str) -> None:
    if name not in told:
        pytest.skip(f"the package of {name} is missing")
    found = told[name]
    assert found["trained"]["code"] == 0
    assert found["trained"]["ended"] == [2, 2] and all(found["trained"]["tokens"])
    assert "failed" not in found["served"], found["served"]["failed"]
    assert name not in READ or found["served"]["worth"] >= 0.5


def test_lm_eval_scores_a_server_as_it_scores_the_model(tmp_path: Path) -> None:
    """Choices and whole texts, with the tokenizer of the model and with the server's."""
    (told,) = lines("tests.server.lm_eval_process", tmp_path)
    assert set(told["itself"]) == {"choices", "texts"}
    for name in told["itself"]:
        for way in ("huggingface", "remote"):
            found, wanted = (np.array(told[kind][name], dtype=float) for kind in (way, "itself"))
            np.testing.assert_allclose(found, wanted, atol=1e-3)


def test_inspect_evaluates_a_server(tmp_path: Path) -> None:
    """Questions and its agent with a tool, in both of OpenAI's APIs; log-probs of each sampled token."""
    told = {line["way"]: line for line in lines("tests.server.inspect_process", tmp_path)}
    assert set(told) == {"chat", "responses"}
    for way in told:
        for what in ("questions", "agent"):
            found = told[way][what]
            assert found["status"] == "success" and all(found["scored"]) and all(found["tokens"]), found
    assert all(0 < n <= 24 for n in told["chat"]["questions"]["logprobs"])
    # prompts alone: inspect sends no seed in the Responses API, so answers there are as long as chance has it
    assert told["chat"]["questions"]["prompts"] == told["responses"]["questions"]["prompts"] != [0, 0]
