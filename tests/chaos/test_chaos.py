"""One run, to which the worst things happen one after the other. `make chaos` does them at random, for minutes."""

import sys
from pathlib import Path

import pytest

from tests.chaos.chaos import Chaos
from tests.chaos.events import fill_disk
from tests.chaos.invariants import broken
from tests.chaos.processes import forked, preload

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it looks at processes in /proc")


def test_what_happens_to_a_run_changes_none_of_its_invariants(tmp_path: Path) -> None:
    preload()
    said: list[str] = []
    chaos = Chaos(tmp_path, 0, 100_000, attach=True, begin=forked, say=said.append, deadline=2.0)
    run = chaos.run

    def full_while_weights_are_saved() -> str | None:
        """Just after a checkpoint, so that the weights come next: they have more bytes, and the ledger less."""
        before = set(run.folder.glob("checkpoints/step-??????"))
        run.until(lambda: set(run.folder.glob("checkpoints/step-??????")) - before, 20.0, every=0.001)
        return fill_disk(run, 150_000)

    chaos.kinds["disk full"] = full_while_weights_are_saved
    try:
        for kind in (
            "engine killed while it generates",
            "answer cut in the middle",
            "engine killed while it loads",
            "learner killed while it syncs",
            "engine frozen beyond its deadline",
            "disk full",
        ):
            happened = (run.trains() and chaos.happen(kind) for _ in range(20))  # there may be no chance to, at first
            assert any(happened), "\n".join(said)
            run.until(lambda: False, 10.0 if kind.startswith("learner killed") else 0.2)  # until it is gone
        run.finish(60.0)
    finally:
        run.close()
    assert chaos.check() == [], "\n".join(said)
    assert run.ends == {"killed": 1, "stopped, the disk was full": 1, "saved": 1}, "\n".join(said)
    # whichever writer finds the disk full first: that of the weights, or that of the logs
    assert "of the weights could not be written" in run.told[0] or "cannot write" in run.told[0]
    metrics = run.folder / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines()
    metrics.write_bytes(b"\n".join([*lines[:-2], lines[-1]]) + b"\n")
    assert any("metrics.jsonl has the steps" in problem for problem in broken(run.folder, 2, 3))
