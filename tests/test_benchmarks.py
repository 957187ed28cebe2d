"""The benchmarks that need no other package than ours run, on a tiny model; their figures mean nothing then."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from birl import kernels

ROOT = Path(__file__).parents[1]


def run(module: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.skipif(bool(kernels.problem()), reason="needs birl's kernels")
@pytest.mark.parametrize(("module", "tables", "verdicts"), [("shared_prefix", 2, 1), ("ceiling", 1, 2)])
def test_it_prints_tables_and_verdicts(module: str, tables: int, verdicts: int, tiny: Path, tmp_path: Path) -> None:
    done = run(module, "--tiny", "--model", tiny, "--threads", 1, "--json", tmp_path / "figures.json")
    lines = done.stdout.splitlines()
    assert sum(line.startswith("| ---") for line in lines) == tables, done.stderr
    assert sum(line.startswith(f"{module}, ") and " ratio " in line and " goal " in line for line in lines) == verdicts
    assert "NOT EQUAL" not in done.stdout
    assert json.loads((tmp_path / "figures.json").read_text())["machine"]["load"]


def test_generate_knows_no_uneven_lengths() -> None:
    done = run("rollout", "--peer", "generate", "--lengths", "uneven")
    assert done.returncode == 2 and "--lengths uneven needs --peer vllm" in done.stderr
