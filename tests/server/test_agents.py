"""Agents of real packages, unchanged, are trained and then talk to `birl serve`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.agents import AGENTS

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-agents" / "bin" / "python"
#: forced into their form by a server; the others may say anything, or call a tool too often
READ = ("openai_client", "openai_agents", "langchain", "litellm")
pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="no agent packages: make setup-agents"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `agents_process` says of each."""
    folder = tmp_path_factory.mktemp("agents")
    nobody = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9") | {"NO_PROXY": "127.0.0.1"}
    done = subprocess.run(
        [str(PYTHON), "-m", "tests.server.agents_process", str(folder)],
        cwd=ROOT,
        env={
            **os.environ,
            **nobody,
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    lines = [json.loads(line.removeprefix("TOLD ")) for line in done.stdout.splitlines() if line.startswith("TOLD ")]
    assert done.returncode == 0, done.stderr[-3000:]
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", [function.__name__ for function in AGENTS.values()])
def test_what_was_trained_runs_on_a_server(told: dict[str, Any], name: str) -> None:
    if name not in told:
        pytest.skip(f"the package of {name} is missing")
    found = told[name]
    assert found["trained"]["code"] == 0
    assert found["trained"]["ended"] == [2, 2] and all(found["trained"]["tokens"])
    assert "failed" not in found["served"], found["served"]["failed"]
    assert name not in READ or found["served"]["worth"] >= 0.5
