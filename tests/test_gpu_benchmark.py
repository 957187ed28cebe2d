"""`benchmarks/gpu.py` runs to its end on a CPU: what is left for the card is the figures."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_bench import Bench, samples
from benchmarks.gpu_predicted import card
from benchmarks.gpu_training import flops
from birl.data.pack import pack
from birl.models.attention import tree_mask
from birl.models.device import choose

SECTIONS = [
    *("machine", "decode", "contexts", "prefill", "training", "sampler", "GRPO step", "mismatch", "memory"),
    *("workload", "sleep", "transfer"),
]


def test_every_section_fills_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process of its own, with a prediction that was stated before."""
    words = ["gpu", "--device", "cpu", "--tiny", "--out", str(tmp_path), "--sections"]
    words.append(",".join(name for name in gpu.SECTIONS if name != "trl"))
    monkeypatch.setattr(sys, "argv", words)
    assert gpu.main() == 0
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {r["section"] for r in rows} == set(SECTIONS)
    for r in rows:
        assert r["predicted"] > 0 and r["measured"] > 0 and r["ratio"] > 0 and r["unit"], r
    assert "| decode | tiny, 4 sequences |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize(
    ("end", "word"), [("raise ValueError('no such kernel')", "no such kernel"), ("os._exit(7)", "exit code 7")]
)
def test_a_section_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str, word: str
) -> None:
    """Nor one whose process is gone, as with an error that the card's context keeps."""
    program = "import os, sys\nfrom benchmarks import gpu\n"
    program += f"def broken(bench):\n    bench.add('decode', 'half')\n    {end}\n"
    program += "gpu.SECTIONS['decode'] = broken\nsys.exit(gpu.main())"
    (tmp_path / "program.py").write_text(program)
    run = subprocess.run

    def instead(command: list[str], **more: Any) -> Any:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        return run([command[0], str(tmp_path / "program.py"), *command[3:]], **(more | {"env": env}))  # pyright: ignore

    monkeypatch.setattr(gpu.subprocess, "run", instead)
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--tiny", "--sections", "decode,machine"])
    assert gpu.main() == 1
    out = capsys.readouterr().out
    assert word in out and "decode   FAILED" in out
    assert "half" in out.partition("FAILED")[0].rpartition("predicted")[2]  # what it had measured
    assert "bf16 product" in out.partition("FAILED")[2]


def test_predictions_need_no_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: Qwen2.5-0.5B has 0.494e9 weights in bfloat16, and 12,288 bytes of keys and values a token."""
    monkeypatch.setattr(sys, "argv", ["gpu", "--predict", "--card", "h200"])
    assert gpu.main() == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "qwen2-0.5b, 64 sequences" in x]
    rate = 64 / ((2 * 494e6 + 64 * (512 + 128) * 12288) / 4.8e12)
    assert float(line.split()[4]) == pytest.approx(rate, rel=0.01)
    names = {"NVIDIA H100 80GB HBM3": 80e9, "NVIDIA A100-SXM4-40GB": 40e9, "Tesla T4": 16e9, "NVIDIA GB200": 186e9}
    assert {name: card(name).memory for name in names} == names


def test_flops_count_what_must_be_computed() -> None:
    """Of a tree, each pair of tokens that sees each other once."""
    data = samples(1, 2, 3, 2, 512)
    (batch,) = pack(data, [1.0, 1.0], 100)
    bench = Bench.__new__(Bench)
    bench.device = choose("cpu")
    model = bench.model("tiny")
    pairs = int(tree_mask(batch.trees[0], None).sum())
    layer = (64 * 64 + 2 * 32 * 64 + 64 * 64) + 3 * 64 * 128
    expected = 6 * (2 * layer * len(batch.tokens) + 512 * 64 * len(batch.targets)) + 12 * 2 * 64 * pairs
    assert flops(model, batch) == expected
