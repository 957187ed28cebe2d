"""`benchmarks/gpu.py` runs to its end on a CPU: what is left for the card is the figures."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_bench import Bench, samples
from benchmarks.gpu_training import flops
from birl.data.pack import pack
from birl.models.device import choose


def test_every_section_fills_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["gpu", "--device", "cpu", "--tiny", "--out", str(tmp_path), "--sections", "machine,decode,training,grpo"]
    monkeypatch.setattr(sys, "argv", words)
    assert gpu.main() == 0
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {r["section"] for r in rows} == {"machine", "decode", "training", "GRPO step", "mismatch", "memory"}
    assert all(r["share"] > 0 for r in rows if r["goal"])
    assert "| decode | tiny, 4 sequences |" in (tmp_path / "gpu.md").read_text()


def test_a_section_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(bench: Bench) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(gpu, "SECTIONS", {"machine": gpu.limits, "decode": broken, "trl": lambda bench: None})
    monkeypatch.setattr(sys, "argv", ["gpu", "--device", "cpu", "--tiny"])
    assert gpu.main() == 1
    out = capsys.readouterr().out
    assert "decode   FAILED" in out and "no such kernel" in out


def test_flops_count_what_must_be_computed() -> None:
    """Of a tree, each pair of tokens that sees each other once."""
    data = samples(1, 2, 3, 2, 512)
    (batch,) = pack(data, [1.0, 1.0], 100)
    bench = Bench.__new__(Bench)
    bench.device = choose("cpu")
    model = bench.model("tiny")
    prefix, branches = batch.trees[0]
    pairs = prefix * (prefix + 1) // 2 + sum(n * prefix + n * (n + 1) // 2 for n in branches)
    layer = (64 * 64 + 2 * 32 * 64 + 64 * 64) + 3 * 64 * 128
    expected = 6 * (2 * layer * len(batch.tokens) + 512 * 64 * len(batch.targets)) + 12 * 2 * 64 * pairs
    assert flops(model, batch) == expected
