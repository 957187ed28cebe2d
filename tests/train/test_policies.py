"""Several policies over one base, each with a LoRA of its own, through `birl rl` with tiny models."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from birl.cli import main
from birl.config import schema
from birl.config.load import load
from birl.errors import BirlError
from birl.learner import checkpoint, step_folders
from birl.rollout.ledger import audit
from birl.train.command import train

WORLDS = '''
from birl.types import Feedback, Message, Task

def told(*words): return tuple(Message(role="user", content=word) for word in words)
def letters(text): return float(sum(map(ord, text)) % 7)

class Pair:
    """The planner says something, then the worker; each earns what its own letters are worth."""
    policy = "planner"
    @staticmethod
    def tasks(config, split): return [{"prompt": f"Task {n}"} for n in range(6)]
    def __init__(self, task): self.task, self.turns = task, 0
    async def start(self): return told("Plan " + self.task.prompt[-1].content)
    async def step(self, reply):
        self.turns += 1
        if self.turns == 1:
            return Feedback(prompt=told("Do " + reply.content), policy="worker", done=False,
                            rewards={"planner": letters(reply.content)})
        return Feedback(rewards={"worker": letters(reply.content)})
    async def close(self): pass

class Alone(Pair):
    """The worker never says anything, and nobody is named where there is one policy."""
    async def step(self, reply): return Feedback(reward=letters(reply.content))

class Nameless(Alone):
    policy = ""

class Rivals(Pair):
    """The player against an earlier version of itself; whoever has more letters wins."""
    policy = "player"
    async def step(self, reply):
        self.turns += 1
        if self.turns == 1:
            self.first = letters(reply.content)
            return Feedback(prompt=told("Beat " + reply.content), policy="player@past", done=False)
        won = self.first - letters(reply.content)
        return Feedback(rewards={"player": won, "player@past": -won})

class Lost(Pair):
    policy = "nobody"

async def talk(base_url):
    """An agent that names the policy as OpenAI's clients name a model."""
    import httpx
    async with httpx.AsyncClient() as client:
        said = {}
        for name in ("planner", "worker"):
            body = {"model": name, "messages": [{"role": "user", "content": f"Hello {name}"}]}
            answer = (await client.post(base_url + "/chat/completions", json=body, timeout=60)).json()
            said[name] = letters(answer["choices"][0]["message"]["content"])
        wrong = await client.post(base_url + "/chat/completions", json={**body, "model": "other"}, timeout=60)
        assert wrong.status_code == 404 and "planner, worker" in wrong.text, wrong.text
        assert [m["id"] for m in (await client.get(base_url + "/models")).json()["data"]] == ["planner", "worker"]
    return said
'''


def words(model: Path, folder: Path, *more: str) -> list[str]:
    (folder / "worlds.py").write_text(WORLDS)
    return [
        *(f"model.path={model}", "model.dtype=bfloat16", "rollout.prompts=2", "rollout.group_size=4"),
        *("rollout.max_tokens=8", "optimizer.lr=0.02", "lora.rank=4", "engine.kv_cache_gb=0.02", "checkpoint.every=0"),
        *("steps=2", "threads=1", "track.console=off", "track.tensorboard=false", "track.report=false"),
        *more,
    ]


def run(model: Path, folder: Path, world: str, name: str, *more: str) -> Path:
    there = [f"env={folder}/worlds.py:{world}", *(() if world == "talk" else ("env.cut_turn=continue",))]
    train(load(schema.RL, words(model, folder, *there, f"run={folder}/{name}", *more)))
    return folder / name


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()]


def tensors(run: Path, prefix: str = "") -> dict[str, Tensor]:
    newest = step_folders.latest(run / "checkpoints")
    assert newest is not None
    return checkpoint.read_tensors(newest, prefix)


def digest(of: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(of[name].float().numpy().tobytes() for name in sorted(of))).hexdigest()


def figures(run: Path) -> list[dict[str, float]]:
    """All but times."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time", "speed/", "memory/", "engine/"))}
        for row in metrics(run)
    ]


BOTH = "policies=[planner,worker]"


def test_each_policy_learns_from_its_own_turns(tiny: Path, tmp_path: Path) -> None:
    done = run(tiny, tmp_path, "Pair", "both", BOTH)
    rows = metrics(done)
    for row in rows:
        for name in ("planner", "worker"):
            assert row[f"mismatch/{name}"] == 0.0  # on the kernels: the engine's log-probs bit for bit
            assert row[f"learned/{name}"] > 0 and row[f"grad_norm/{name}"] > 0
        assert row["score/planner"] != row["score/worker"]
        assert row["tokens/planner"] + row["tokens/worker"] == row["tokens/generated"]
        assert row["loss"] == pytest.approx(row["loss/planner"] + row["loss/worker"], abs=1e-9)
    matrices = tensors(done, "model.")
    first, second = (
        {n.partition("/")[2]: t for n, t in matrices.items() if n.startswith(f"{name}/")}
        for name in ("planner", "worker")
    )
    assert first.keys() == second.keys() and digest(first) != digest(second)
    assert audit(done).problems == []


def test_a_reference_and_checkpointing_know_the_policies(plain: Path, tmp_path: Path) -> None:
    keys = ["algorithm.kl_coef=0.1", "learner.gradient_checkpointing=true"]
    rows = metrics(run(plain, tmp_path, "Pair", "more", BOTH, "model.dtype=float32", *keys))
    assert all(row[f"mismatch/{name}"] < 1e-5 for row in rows for name in ("planner", "worker"))
    assert rows[0]["kl"] < 1e-6 < rows[1]["kl"]  # the reference is the base, whatever the policies add


def test_models_without_kernels_agree_within_rounding(plain: Path, tmp_path: Path) -> None:
    rows = metrics(run(plain, tmp_path, "Pair", "plain", BOTH, "model.dtype=float32"))
    assert all(row[f"mismatch/{name}"] < 1e-5 for row in rows for name in ("planner", "worker"))


def test_a_policy_that_says_nothing_is_not_moved(tiny: Path, tmp_path: Path) -> None:
    """Nor does it change what the other becomes."""
    two = run(tiny, tmp_path, "Alone", "two", BOTH)
    three = run(tiny, tmp_path, "Alone", "three", "policies=[judge,planner,worker]")
    matrices = tensors(two)
    still = {n: t for n, t in matrices.items() if ".worker/" in n or n.startswith("worker/")}
    assert len(still) > 10
    assert all(not t.any() for n, t in still.items() if "lora_B" in n or "exp_avg" in n or n.endswith(".step"))
    own = [{n: t for n, t in tensors(r, "model.").items() if n.startswith("planner/")} for r in (two, three)]
    assert digest(own[0]) == digest(own[1])
    assert any(t.any() for n, t in own[0].items() if n.endswith("lora_B"))


def test_one_policy_with_a_name_is_the_run_without(tiny: Path, tmp_path: Path) -> None:
    named = run(tiny, tmp_path, "Alone", "named", "policies=[planner]")
    plain = run(tiny, tmp_path, "Nameless", "plain")
    assert digest(tensors(named)) == digest(tensors(plain))
    own = [{k: v for k, v in row.items() if not k.endswith("/planner")} for row in figures(named)]
    assert own == figures(plain)


def test_added_matrices_are_the_merged_ones_within_rounding(plain: Path, tmp_path: Path) -> None:
    added = run(plain, tmp_path, "Alone", "added", BOTH, "model.dtype=float32", "steps=1", "optimizer.eps=0.1")
    merged = run(plain, tmp_path, "Nameless", "merged", "model.dtype=float32", "steps=1", "optimizer.eps=0.1")
    one, other = tensors(added, "model."), tensors(merged, "model.")
    assert max((one[f"planner/{n}"] - t).abs().max().item() for n, t in other.items() if "lora_" in n) < 1e-6


def test_a_league_plays_against_earlier_versions(tiny: Path, tmp_path: Path) -> None:
    done = run(tiny, tmp_path, "Rivals", "league", "policies=[player]", "league.every=1", "league.size=2", "steps=3")
    rows = metrics(done)
    assert all(row["tokens/player@past"] > 0 and row["mismatch/player"] == 0.0 for row in rows)
    assert not any("learned/player@past" in name for row in rows for name in row)
    assert all(row["score/player"] == pytest.approx(-row["score/player@past"]) for row in rows)
    marks, now = tensors(done, "league.player."), tensors(done, "model.player/")
    kept = [{n.partition(".")[2]: t for n, t in marks.items() if n.startswith(f"{i}.")} for i in (0, 1)]
    assert digest(kept[0]) == digest(now)  # step 3 took the place of step 1
    assert digest(kept[1]) not in (digest(now), digest(kept[0]))  # step 2
    assert audit(done).tokens["frozen"] == sum(row["tokens/player@past"] for row in rows)
    assert audit(done).problems == []


@pytest.mark.parametrize(
    ("world", "keys"),
    [
        ("Pair", [BOTH, "algorithm.updates_per_batch=2"]),
        ("Rivals", ["policies=[player]", "league.every=1", "league.size=2"]),
    ],
)
def test_resumed_is_uninterrupted(tiny: Path, tmp_path: Path, world: str, keys: list[str]) -> None:
    whole = run(tiny, tmp_path, world, "whole", *keys, "steps=4")
    run(tiny, tmp_path, world, "parts", *keys, "steps=2")
    again = run(tiny, tmp_path, world, "parts", *keys, "steps=4")
    assert digest(tensors(whole)) == digest(tensors(again))
    assert figures(whole) == figures(again)


def test_an_agent_names_the_policy_as_the_model(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"prompt": f"{n}"}) + "\n" for n in range(4)))
    done = run(tiny, tmp_path, "talk", "agent", BOTH, f"data.train={tmp_path}/data.jsonl")
    assert all(row["outcome/ok"] + row["outcome/truncated"] == row["outcome/asked"] for row in metrics(done))
    assert all(row[f"mismatch/{name}"] == 0.0 for row in metrics(done) for name in ("planner", "worker"))


def test_one_policy_plays_all_roles_without_names(tiny: Path, tmp_path: Path) -> None:
    rows = metrics(run(tiny, tmp_path, "Pair", "shared"))
    assert {"reward/agent/planner", "reward/agent/worker"} <= rows[0].keys()
    assert not any(name.startswith("loss/") for name in rows[0])


def test_a_name_that_nobody_has_is_told(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(BirlError, match=r"there is no policy 'nobody'; there are planner, worker \(policies=...\)"):
        run(tiny, tmp_path, "Lost", "lost", BOTH)
    with pytest.raises(BirlError, match="the request names no policy; there are planner, worker"):
        run(tiny, tmp_path, "Nameless", "nameless", BOTH)


def test_one_policy_is_exported(tiny: Path, tmp_path: Path) -> None:
    """Merged, and as an adapter for peft, whose log-probs are those of the engine within rounding."""
    done = run(tiny, tmp_path, "Pair", "exported", BOTH, "model.dtype=float32")
    export = ["checkpoints", str(done), "export", "last", str(tmp_path / "whole")]
    assert main(export) == 2
    assert main([*export, "--policy", "nobody"]) == 2
    assert main([*export, "--policy", "worker"]) == 0
    assert main(["checkpoints", str(done), "export-adapter", "last", str(tmp_path / "part"), "--policy", "worker"]) == 0
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    peft: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "part")
    trajectories = [json.loads(line) for line in (done / "rollouts.jsonl").read_bytes().splitlines()]
    base: Any = AutoModelForCausalLM.from_pretrained(tiny)
    ids = torch.tensor([trajectories[0]["samples"][1]["tokens"]], dtype=torch.int64)
    one, other, first = (model(ids).logits.log_softmax(-1) for model in (merged, peft, base))
    assert (one - other).abs().max() < 1e-4 < (one - first).abs().max()


REFUSED = {
    "lora.rank=0": "set lora.rank=16",
    "lora.dora=true": "set lora.dora=false",
    "lora.quantize=nf4": "set lora.quantize=none",
    "engine.kind=birl": "set engine.kind=embedded",
    "parallel.ddp=2": "remove parallel",
    "rollout.max_staleness=1": "set rollout.max_staleness=0",
    "algorithm=ppo": "does not support a critic",
    "algorithm.baseline=greedy": "set algorithm.baseline=group",
    "algorithm.kl_target=0.1": "set algorithm.kl_target=0",
    "algorithm=sdft": "algorithm.teacher=self",
    "algorithm.router_replay=rollout": "set algorithm.router_replay=none",
    "policies=[a,a]": "give each its own",
    "policies=[a@b,c]": "'a@b' is not a valid name",
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_not_built_is_refused_by_name(tiny: Path, tmp_path: Path, key: str) -> None:
    with pytest.raises(BirlError, match=f"policies.*{re.escape(REFUSED[key])}"):
        load(schema.RL, words(tiny, tmp_path, BOTH, "env=countdown", key))
