"""The benchmarks that need no other package than ours run, on a tiny model; their figures mean nothing then."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import all as whole
from benchmarks import peers
from birl import kernels

ROOT = Path(__file__).parents[1]


def run(module: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.{module}", *map(str, words)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


ONEDNN = pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN's bfloat16 needs AVX-512")


@pytest.mark.skipif(bool(kernels.problem()), reason="needs birl's kernels")
@pytest.mark.parametrize(
    ("module", "tables", "verdicts"), [("shared_prefix", 2, 1), pytest.param("ceiling", 1, 2, marks=ONEDNN)]
)
def test_it_prints_tables_and_verdicts(module: str, tables: int, verdicts: int, tiny: Path, tmp_path: Path) -> None:
    done = run(module, "--tiny", "--model", tiny, "--threads", 1, "--json", tmp_path / "figures.json")
    lines = done.stdout.splitlines()
    assert sum(line.startswith("| ---") for line in lines) == tables, done.stderr
    assert sum(line.startswith(f"{module}, ") and " ratio " in line for line in lines) == verdicts
    assert "NOT EQUAL" not in done.stdout
    assert json.loads((tmp_path / "figures.json").read_text())["machine"]["load"]


def test_generate_knows_no_uneven_lengths() -> None:
    done = run("rollout", "--peer", "generate", "--lengths", "uneven")
    assert done.returncode == 2 and "--lengths uneven needs --peer vllm" in done.stderr


SMALL = (
    "--prompts",
    2,
    "--group",
    4,
    "--tokens",
    6,
    "--max-batch",
    16,
    "--data",
    "recipes/data/arithmetic/train.jsonl",
)


def test_weights_are_sent_and_every_second_is_told(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "weights.json"
    words = ("--methods", "reload", "direct", "--dtypes", "float32", "--rounds", 1, "--answers", 2, "--json", file)
    done = run("weights", "--model", tiny, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())
    assert [row["method"] for row in found["table"]] == ["reload", "direct"]
    for row in found["table"]:
        parts = sum(row[part] for part in ("digest", "expect", "write", "load", "settle", "canary"))
        assert 0.5 * row["total"] < parts < 1.05 * row["total"] and row["gap"] < 1e-4
        assert row["bytes"] == found["table"][0]["bytes"] > 0


@pytest.mark.skipif(bool(kernels.problem()), reason="needs birl's kernels")
def test_asynchronous_runs_are_compared_and_can_be_simulated(tiny: Path, tmp_path: Path) -> None:
    words = ("--quick", "--parts", "components", "tails", "--steps", 2, "--warm", 1, "--out", tmp_path)
    done = run("async", "--model", tiny, *SMALL, *words)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "async_tails.json").read_text())
    assert list(found["results"]) == ["staleness 0", "staleness 2, window 2"] and found["machine"]["load"]
    for result in found["results"].values():
        assert result["ideal"] > 0 and 0 < result["reached"] <= 1.05 and result["tokens"] > 0
        assert len({length for group in result["answers"] for length in group}) > 3  # they are uneven
    part = json.loads((tmp_path / "async_tails_staleness_2_window_2.json").read_text())
    assert part["run"]["order_window"] == 2 and part["result"]["max_staleness"] == 2
    assert part["engine"]["table"] and part["learner"]["per_token"] > 0 and part["sync"]["bandwidth"] > 0


def test_waits_and_lengths_depend_on_the_episode_alone() -> None:
    from benchmarks.uneven import length

    lengths = [length(seed, 64, 1.0, 512) for seed in range(400)]
    assert lengths == [length(seed, 64, 1.0, 512) for seed in range(400)]
    assert 45 < sorted(lengths)[200] < 90 and max(lengths) == 512 and min(lengths) < 20
    assert {length(seed, 64, 0.0, 64) for seed in range(9)} == {64}


def test_packers_are_compared(tmp_path: Path) -> None:
    """With so few sequences the goals are not reached; the figures are there."""
    file = tmp_path / "packing.json"
    done = run("packing", "--sequences", 300, "--rounds", 1, "--json", file)
    assert sum(line.startswith(("| lognormal |", "| pareto |")) for line in done.stdout.splitlines()) == 18, done.stderr
    found = json.loads(file.read_text())
    for case in found["table"].values():
        assert max(case["ours"]["bins"]) <= max(case["first-fit decreasing"]["bins"])
        assert max(case["ours"]["imbalance"]) <= max(case["first-fit decreasing"]["imbalance"]) + 1e-9
    assert found["waiting"] >= 0 and found["seconds"] > 0 and found["machine"]["load"]


def test_scaling_counts_what_ranks_send(tmp_path: Path) -> None:
    file = tmp_path / "scaling.json"
    done = run("scaling", "--tiny", "--forms", "fsdp", "--rounds", 1, "--json", file)
    assert "| fsdp=2 |" in done.stdout, done.stderr
    row = json.loads(file.read_text())["table"]["fsdp"]
    assert row["weak"] > 0 and row["strong"] > 0 and 1 <= row["of_least"] < 1.1


def test_the_data_plane_is_compared_with_padded_columns(tmp_path: Path) -> None:
    file = tmp_path / "dataplane.json"
    done = run("dataplane", "--episodes", 16, "--tokens", 300, "--turns", 3, "--json", file)
    assert done.stdout.count("| birl |") == done.stdout.count("| padded |") == 3, done.stderr
    ours, theirs = (json.loads(file.read_text())["sides"][side] for side in ("birl", "padded"))
    assert ours["tokens"] == theirs["tokens"] == theirs["computed"] > ours["computed"] > 0


@pytest.mark.timeout(300)
def test_agents_turns_are_computed_once(tiny: Path, tmp_path: Path) -> None:
    """Four episodes of four turns that part one turn after another: 10 of 16 turns."""
    file = tmp_path / "agents.json"
    done = run("agents", "--tiny", "--model", tiny, "--threads", 1, "--json", file)
    assert "| training |" in done.stdout, done.stderr
    found = json.loads(file.read_text())
    assert found["training"]["tokens"] == [2 * 10 * 68, 2 * 16 * 68]


@pytest.mark.skipif(not peers.VLLM.exists(), reason="needs .venv-vllm (make bench-setup)")
@pytest.mark.timeout(1800)
def test_agents_turns_are_cached_by_vllm_as_by_birl(tiny: Path, tmp_path: Path) -> None:
    """Of 20 turns in pages of 32 tokens; a verdict needs a quiet machine."""
    file = tmp_path / "agents.json"
    done = run("agents", "--tiny", "--peer", "vllm", "--model", tiny, "--threads", 1, "--json", file)
    assert "agents against vllm: ours" in done.stdout, done.stderr
    ours, theirs = (side[0] for side in json.loads(file.read_text())["runs"].values())
    assert ours["tokens"] == theirs["tokens"] == 2 * 10 * 8 and ours["prompts"] == theirs["prompts"]
    assert theirs["cached"] == ours["cached"] > ours["prompts"] / 2


def figures(ratio: float) -> dict[str, Any]:
    return {"ratio": ratio}


def test_the_whole_table_keeps_what_is_there_and_what_has_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tmp_path / "results" / peers.processor()
    other = tmp_path / "results" / "0-another"
    for folder in (done, other):
        folder.mkdir(parents=True)
    (done / "learning.json").write_text(json.dumps(figures(5.5)))
    rates = {"64": [[300, 200, 210], [100, 100, 90]], "16": [[150], [100]]}
    (other / "rollout_vllm.json").write_text(json.dumps({"tokens_per_s": rates}))
    share = {"real": [3.0, 2.0, 1.0], "ceiling": 4.0}
    (other / "ceiling.json").write_text(json.dumps({"decoding": {"32": share}, "training": share}))
    called = []

    def process(command: list[str], **_: Any) -> Any:
        """Three benchmarks: reached, not reached, disturbed."""
        called.append(command)
        Path(command[-1]).write_text(json.dumps(figures(7.0)))
        return subprocess.CompletedProcess(command, {"grpo_step": 0, "rollout": 1}.get(command[2].split(".")[1], 3))

    monkeypatch.setattr(whole, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(whole, "taken_by_others", lambda: 0.0)
    monkeypatch.setattr(whole.time, "sleep", lambda _: None)
    monkeypatch.setattr(whole.subprocess, "run", process)
    monkeypatch.setattr(sys, "argv", ["all", "learning", "grpo_step", "rollout_few", "ceiling"])
    assert whole.main() == peers.NO_VERDICT
    assert [c[2] for c in called] == ["benchmarks.grpo_step", "benchmarks.rollout", "benchmarks.ceiling"]
    assert sorted(path.stem for path in done.iterdir()) == ["grpo_step", "learning", "rollout_few"]
    rows = {line.split(" | ")[0]: line.split(" | ")[1:] for line in capsys.readouterr().out.splitlines()}
    assert rows["| GRPO step against TRL"] == ["", "7.00 |"]
    assert rows["| sampling against vLLM"] == ["1.50 (16) 2.10 (64)", " |"]
    assert rows["| share of what the products alone allow"] == ["0.50 (32) 0.50 (training)", " |"]


def test_a_busy_machine_gives_no_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for others, expected in ((0.0, 0), (1.5, peers.NO_VERDICT)):
        monkeypatch.setattr(peers, "taken_by_others", lambda others=others: others)
        assert peers.verdict("x", [1.0], [3.0], goal=2.0, unit="s", lower_is_better=True) == expected
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "x: ours 1 s peer 3 s ratio 3.00 goal 2.00"
    assert said[1] == "x: ours 1 s peer 3 s ratio 3.00; no verdict: other work took 1.5 cores meanwhile"
    monkeypatch.undo()
    assert 0 <= peers.taken_by_others() <= 2 * (os.cpu_count() or 1)
