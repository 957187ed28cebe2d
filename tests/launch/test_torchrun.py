"""The ranks of a learner under torchrun, by hand and by `birl launch torchrun`: the figures of the same ranks that birl
starts itself."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from birl.cli import main
from birl.errors import BirlError
from birl.launch import torchrun
from birl.launch.command import keys_of
from birl.launch.job import derive
from birl.launch.plan import FOLDER
from birl.process import free_port
from tests.launch.jobs import Launched, alive, children_of, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks end with torchrun on Linux only")
WORDS = ("batch_size=4", "model.dtype=float32", "optimizer.lr=3e-3")
FIGURES = ("loss", "grad_norm", "entropy", "tokens/trained")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.fixture
def job(tiny: Path, tmp_path: Path) -> Iterator[Launched]:
    made = Launched("torchrun", "sft", tiny, tmp_path, *WORDS)
    try:
        yield made
    finally:
        made.end()


def figures(job: Launched) -> list[float]:
    return [row[name] for row in job.rows()[:3] for name in FIGURES]


def test_the_same_figures_by_hand_launched_and_without_torchrun(tiny: Path, tmp_path: Path, job: Launched) -> None:
    jobs = [
        Launched("torchrun", "sft", tiny, folder, *WORDS, "steps=3") for folder in folders(tmp_path, "birl", "hand")
    ]
    plain, hand = jobs
    assert main([*plain.words[2:], "parallel.fsdp=2"]) == 0
    words = ["--nproc-per-node", "2", f"--master-port={free_port()}", "-m", "birl", *hand.words[2:]]
    ran = subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], capture_output=True, timeout=300)
    assert ran.returncode == 0, ran.stderr.decode()[-3000:]

    job.launch("parallel.fsdp=2", "steps=100000", "checkpoint.every=50")
    job.wait(lambda: job.step >= 3)
    ranks = children_of(job.pid("learner"))
    assert len(ranks) == 2
    assert main(["stop", str(job.run)]) == 0  # rank 0 saves, which takes all ranks
    assert job.state.state == "stopped" and not any(map(alive, ranks))
    assert (job.run / "checkpoints" / f"step-{job.step:06d}").is_dir()
    assert figures(plain) == figures(hand) == figures(job)


def test_ranks_do_not_outlive_a_torchrun_that_is_killed(job: Launched) -> None:
    job.launch("parallel.ddp=2", "steps=100000", "launch.restarts=0")
    job.wait(lambda: job.step >= 1)
    agent = job.pid("learner")
    ranks = children_of(agent)
    os.kill(agent, signal.SIGKILL)
    until(lambda: not any(map(alive, ranks)), 10)
    job.wait(lambda: job.state.state != "running")
    assert job.state.state == "failed" and "SIGKILL" in job.state.detail


def folders(root: Path, *names: str) -> list[Path]:
    made = [root / name for name in names]
    for folder in made:
        folder.mkdir()
    return made


def test_what_is_run(tmp_path: Path) -> None:
    def command(*more: str) -> str:
        keys, rest = keys_of(torchrun.Keys, ["data.train=a.jsonl", f"run={tmp_path}/run", *more])
        plan = torchrun.plan_of(derive("sft", rest, keys), keys)
        assert str(plan.folder) == f"{tmp_path}/run/{plan.place or '.'}/{FOLDER}".replace("/./", "/")
        return " ".join(plan.learner)

    alone = command("parallel.fsdp=4")
    assert (
        "--nnodes=1 --nproc-per-node=4" in alone and "--rdzv-endpoint=127.0.0.1:" in alone and " -m birl sft " in alone
    )
    many = [
        command("parallel.fsdp=4", "launch.nodes=2", "launch.rendezvous=a:29500", f"launch.node={n}") for n in (0, 1)
    ]
    assert all("--nnodes=2 --nproc-per-node=2" in c and "--rdzv-endpoint=a:29500" in c for c in many)
    assert "--node-rank=0" in many[0] and "--node-rank=1" in many[1]
    for more, reason in [
        (("parallel.fsdp=3", "launch.nodes=2", "launch.rendezvous=a:1"), "spread evenly"),
        (("parallel.fsdp=2", "launch.nodes=2"), "name HOST:PORT"),
        (("parallel.fsdp=2", "launch.nodes=2", "launch.rendezvous=a:1", "launch.node=2"), "numbered from 0"),
    ]:
        with pytest.raises(BirlError, match=reason):
            command(*more)
