"""Whole runs of several processes: SFT, reward models, DPO, GRPO and PPO give the figures of one process."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from birl.config import schema
from birl.config.load import load
from birl.engines.client import Client
from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.named import Given
from birl.rollout.ledger import audit
from birl.train.command import crew, train
from tests.train import test_offline as offline
from tests.train import test_rl as rl

pytestmark = pytest.mark.usefixtures("forking")

#: two of the forms at once where a run can have them
FSDP, COPIES = "parallel.fsdp=2", "parallel.ddp=2"


def figures(log: list[dict[str, Any]], *names: str) -> list[float]:
    return [step[name] for step in log for name in names]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("sft", (COPIES, "model.dtype=bfloat16")),
        ("rm", (FSDP,)),
        ("dpo", (FSDP,)),
        ("dpo", (COPIES, "preference.reference=precomputed")),
    ],
)
def test_training_on_rows(tiny: Path, tmp_path: Path, command: str, words: tuple[str, ...]) -> None:
    plain = tuple(w for w in words if not w.startswith("parallel."))
    rows = offline.TEXTS if command == "sft" else offline.PAIRS
    for folder, keys in (("one", plain), ("two", words)):
        (tmp_path / folder).mkdir()
        offline.run(tiny, tmp_path / folder, command, "validation.every=3", *keys, held_out=rows[:5])
    names = ("loss", "grad_norm") if command != "sft" else ("loss", "grad_norm", "entropy", "tokens/trained")
    coarse = "model.dtype=bfloat16" in words
    one, two = (figures(offline.log(tmp_path / f), *names) for f in ("one", "two"))
    first = len(names)  # bfloat16 weights differ by whole steps of rounding from the second step on
    assert two[:first] == pytest.approx(one[:first], rel=2e-3 if coarse else 2e-4)
    assert two == pytest.approx(one, rel=0.1 if coarse else 2e-4)
    assert not list((tmp_path / "two/run").glob("*.part"))


@pytest.mark.parametrize("form", [FSDP, COPIES])
def test_grpo_with_an_engine_on_every_rank(
    tiny: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over weights of their own where these are split: the same answers, and log-probs that agree at every step."""
    asked, generate = [], Client.generate

    async def counting(self: Client, *words: Any) -> Any:
        asked.append(words)
        return await generate(self, *words)

    monkeypatch.setattr(Client, "generate", counting)
    for folder, keys in (("one", ()), ("two", (form,))):
        (tmp_path / folder).mkdir()
        rl.run(tiny, tmp_path / folder, "steps=2", "track.rollouts=true", "validation.every=0", *keys)
    one, two = (rl.log(tmp_path / f) for f in ("one", "two"))
    names = ("reward/mean", "loss", "grad_norm", "tokens/generated", "entropy")
    assert figures(two[:1], *names) == pytest.approx(figures(one[:1], *names), rel=2e-4, abs=1e-6)
    assert max(figures(two, "mismatch/mean")) < 1e-5
    texts = [[r["samples"][0]["tokens"] for r in rl.log(tmp_path / f, "rollouts")[:16]] for f in ("one", "two")]
    assert texts[0] == texts[1]
    assert len(asked) == len(rl.log(tmp_path / "two", "rollouts")) / 2  # rank 1 answered half of them


def test_engines_of_all_ranks_run_ahead(tiny: Path, tmp_path: Path) -> None:
    rl.run(tiny, tmp_path, "steps=4", "rollout.max_staleness=2", "optimizer.lr=0.01", "validation.every=0", COPIES)
    found, steps = audit(tmp_path / "run"), rl.log(tmp_path)
    assert not found.problems and len(steps) == 4
    assert all(s["mismatch/mean"] is None or s["mismatch/mean"] < 1e-5 for s in steps)


def test_ppo_with_critic_and_reference(tiny: Path, tmp_path: Path) -> None:
    words = ("algorithm=ppo", "algorithm.kl_coef=0.05", "critic.lr=1e-3", "optimizer.lr=1e-3", "steps=1")
    for folder, keys in (("one", ()), ("two", (FSDP,))):
        (tmp_path / folder).mkdir()
        rl.run(tiny, tmp_path / folder, *words, *keys)
    names = ("loss", "grad_norm", "critic/loss", "critic/grad_norm")
    one, two = (rl.log(tmp_path / f) for f in ("one", "two"))
    assert figures(two, *names) == pytest.approx(figures(one, *names), rel=2e-4, abs=1e-6)
    same_weights(tmp_path)


@pytest.mark.parametrize("keys", ["algorithm.teacher_rate=0.3", "algorithm.teacher_rate=0", "algorithm.teacher_rate=1"])
def test_a_policy_that_teaches_itself(tiny: Path, tmp_path: Path, keys: str) -> None:
    """Now, at first, or on an average, which the checkpoint has."""
    for folder, form in (("one", ()), ("two", (FSDP,))):
        (tmp_path / folder).mkdir()
        rl.run(tiny, tmp_path / folder, "algorithm=sdft", "optimizer.lr=1e-3", "checkpoint.every=2", keys, *form)
    one, two = (figures(rl.log(tmp_path / f), "divergence", "loss", "grad_norm") for f in ("one", "two"))
    assert two == pytest.approx(one, rel=2e-3, abs=1e-6)
    same_weights(tmp_path)


def same_weights(folder: Path) -> None:
    """The newest checkpoints of the runs `one` and `two` are the same model and optimizer."""
    ends = [step_folders.latest(folder / f / "run/checkpoints") for f in ("one", "two")]
    one, two = (checkpoint.read_tensors(end) for end in ends if end is not None)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_a_run_goes_on_with_another_number_of_ranks(tiny: Path, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    slow = ("batch_size=3", "optimizer.lr=1e-3")
    offline.run(tiny, tmp_path / "one", "sft", "steps=4", *slow)
    offline.run(tiny, tmp_path / "two", "sft", "steps=2", *slow, FSDP)
    offline.run(tiny, tmp_path / "two", "sft", "steps=3", *slow)
    offline.run(tiny, tmp_path / "two", "sft", "steps=4", *slow, COPIES)
    one, two = (figures(offline.log(tmp_path / f), "loss", "grad_norm") for f in ("one", "two"))
    assert two == pytest.approx(one, rel=2e-4)
    same_weights(tmp_path)


@pytest.mark.parametrize(
    ("module", "words", "names"),
    [
        (rl, ("algorithm.kl_coef=0.05",), ("kl",)),
        (rl, ("algorithm=sdft", "algorithm.teacher_rate=0"), ("divergence",)),
        (rl, ("algorithm=sdft", "algorithm.teacher_rate=0.3"), ("divergence",)),
        (offline, ("preference.reference=live",), ("reward/chosen", "reward/rejected")),
        (offline, ("preference.reference=precomputed",), ("reward/chosen", "reward/rejected")),
        (offline, ("preference.loss=kto",), ("kl", "reward/chosen", "reward/rejected")),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, tuple) else "",
)
def test_how_far_the_policy_has_moved_is_the_same_after_a_resume(
    tiny: Path, tmp_path: Path, module: Any, words: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """Figures that compare with the weights of the beginning, or their average, on two ranks with parts of both."""
    command = ("dpo",) if module is offline else ()
    for folder, ends in (("one", [4]), ("two", [2, 4])):
        (tmp_path / folder).mkdir()
        for end in ends:
            module.run(tiny, tmp_path / folder, *command, f"steps={end}", "optimizer.lr=1e-3", *words, FSDP)
    one, two = (module.log(tmp_path / f) for f in ("one", "two"))
    moved = figures(one[2:], *names)
    assert min(map(abs, moved)) > 1e-6 or ("kl" in names and max(moved) > 1e-6)
    assert figures(two, "step", "loss", "grad_norm", *names) == figures(one, "step", "loss", "grad_norm", *names)


def test_the_rank_that_fails_is_the_one_that_is_told_of(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 alone runs out of memory, in the middle of a step."""
    monkeypatch.setattr("birl.process.subprocess", subprocess)  # a new interpreter, which reads sitecustomize.py
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import birl.learner.learner as module\n"
        "    def forward_backward(self, *rest): raise MemoryError('the seventh layer')\n"
        "    module.Learner.forward_backward = forward_backward\n"
    )
    began = time.monotonic()
    with pytest.raises(BirlError, match=r"(?s)^rank 1 of 2: .*MemoryError: the seventh layer") as raised:
        offline.run(tiny, tmp_path, "sft", FSDP)
    last = re.findall(r"The last collectives of rank (\d), the newest first:\n +#\d+ gloo:(\w+) of", str(raised.value))
    assert [rank for rank, _ in last] == ["1", "0"]
    assert time.monotonic() - began < 3000


def test_nobody_waits_when_rank_0_ends_between_two_calls(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 fails, as when it reads a broken row, while the others build their part and want it in a collective."""
    monkeypatch.setattr("birl.process.subprocess", subprocess)  # a child of this process, not of the fork server
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is 1 + 1?", "response": "It is 2."}\n')
    config = load(schema.SFT, [f"model.path={tiny}", f"data.train={rows}", FSDP, "threads=1", f"run={tmp_path}/run"])
    began, before = time.monotonic(), {*children(os.getpid())}
    with pytest.raises(BirlError, match="a broken row"), crew(config, tmp_path / "run"):
        assert len({*children(os.getpid())} - before) == 1
        time.sleep(5)  # in which rank 1 gets there
        raise BirlError("a broken row")
    assert {*children(os.getpid())} <= before
    assert time.monotonic() - began < 300


def test_what_wrote_nothing_leaves_nothing(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run on two ranks, and a run whose rows are wrong, left a folder with an empty log."""
    monkeypatch.setattr("birl.process.subprocess", subprocess)  # a rank that is forked prints a warning
    words = [f"model.path={tiny}", "data.train=[given]", f"run={tmp_path}/run", "threads=1", COPIES]
    train(load(schema.DPO, words), dry_run=True, given=Given(train=offline.PAIRS))
    assert not (tmp_path / "run").exists(), [f.read_bytes() for f in (tmp_path / "run").rglob("*.*")]
    rows = [*offline.PAIRS, {"prompt": "Why?", "chosen": "So.", "rejected": "So."}]
    with pytest.raises(BirlError, match="row 13: `chosen` and `rejected` are the same"):
        train(load(schema.RM, words), given=Given(train=rows))
    assert not (tmp_path / "run").exists()


def test_a_rank_that_is_killed_ends_the_run(tiny: Path, tmp_path: Path) -> None:
    """From the command line, as the process of rank 0 may have to end itself."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "What is 1 + {i}?", "response": "It is."}}\n' for i in range(40)))
    words = [f"model.path={tiny}", f"data.train={rows}", "steps=100000", "batch_size=4", f"run={tmp_path}/run"]
    command = [sys.executable, "-m", "birl", "sft", *words, FSDP, "track.console=plain", "threads=1"]
    leader = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        metrics, until = tmp_path / "run/metrics.jsonl", time.monotonic() + 60
        while (not metrics.exists() or metrics.read_text().count("\n") < 3) and time.monotonic() < until:
            time.sleep(0.1)
        (child,) = children(leader.pid)
        assert not {address for pid in (leader.pid, child) for address in listening(pid)} - {"127.0.0.1"}
        os.kill(child, signal.SIGKILL)
        said = leader.communicate(timeout=60)[0]
        assert leader.returncode == 2, said
        assert "rank 1 was ended by SIGKILL" in said
    finally:
        leader.kill()


def test_no_rank_is_left_when_the_first_is_killed(tiny: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is 1 + 1?", "response": "It is 2."}\n' * 8)
    words = [f"model.path={tiny}", f"data.train={rows}", "steps=100000", "batch_size=4", f"run={tmp_path}/run"]
    leader = subprocess.Popen([sys.executable, "-m", "birl", "sft", *words, FSDP, "track.console=off", "threads=1"])
    try:
        until = time.monotonic() + 60
        while not (left := children(leader.pid)) and time.monotonic() < until:
            time.sleep(0.1)
        assert left
        leader.kill()
        leader.wait()
        while any(Path(f"/proc/{pid}").exists() for pid in left) and time.monotonic() < until:
            time.sleep(0.1)
        assert not any(Path(f"/proc/{pid}").exists() for pid in left)
    finally:
        leader.kill()


def listening(pid: int) -> list[str]:
    """Addresses (IPv4; any of IPv6 as it is written there) at which a process waits for connections."""
    own = {os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir() if f.is_symlink()}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in own:
                number = words[1].partition(":")[0]
                short = table == "tcp"
                found.append(socket.inet_ntoa(bytes.fromhex(number)[::-1]) if short else number)
    return found


def children(pid: int) -> list[int]:
    """Ranks that a process has started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == pid and b"birl.train.command" in words:
            found.append(int(folder.name))
    return found


def test_the_choice_of_prompts_does_not_depend_on_the_ranks(tiny: Path, tmp_path: Path) -> None:
    """Rewards that no rounding changes: the same tasks in the same order, and the same counts in the checkpoint."""

    def fixed(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(i % 2 <= int(a)) for i, a in enumerate(answer)]

    states = []
    for folder, keys in (("one", ()), ("two", (FSDP,)), ("copies", (COPIES,))):
        (tmp_path / folder).mkdir()
        rl.run(tiny, tmp_path / folder, "steps=5", "data.order=thompson", *keys, reward=fixed)
        tasks = [(r["group"], r["task"]) for r in rl.log(tmp_path / folder, "rollouts")]
        newest = step_folders.latest(tmp_path / folder / "run/checkpoints")
        assert newest is not None
        states.append((tasks, step_folders.read_state(newest)["extra"]["order"]))
    assert states[0] == states[1] == states[2]
