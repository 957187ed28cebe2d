"""A change of shape changes nothing: nine short runs, the same figures and the same bits before and after.

    python -m tests.golden COMMIT        # the runs of COMMIT (in a work tree of its own) and of this tree, compared

Figures that are times, speeds or memory are left out; everything else in metrics.jsonl, every trained token with its
log-prob, and the digest of the last checkpoint's tensors must be equal. It is a tool, not a test: what is right on one
processor is rounded otherwise on another.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.tiny import tiny_model_folder

#: figures that no two runs share
MEASURED = ("time", "speed/", "memory/", "wait/", "queue/", "sync/", "engine/", "load/", "cache/", "weights/paused")

CODE = """
def length(completions, **_):
    return [float(sum(map(ord, c)) % 7) for c in completions]

async def counts(state, action, extra_info):
    turn = extra_info.get("turn", 0) + 1
    reply = f"<|im_end|>\\n<|im_start|>user\\nAgain, {turn}<|im_end|>\\n<|im_start|>assistant\\n"
    reward = float(sum(map(ord, action)) % 5)
    return {"next_state": state + action + reply, "reward": reward, "score": reward, "done": turn == 3,
            "extra_info": {"turn": turn}}
"""

COMMON = (
    "model.dtype=float32 rollout.prompts=2 rollout.group_size=4 rollout.max_tokens=12 optimizer.lr=1e-3 steps=5 "
    "threads=1 track.console=plain track.tensorboard=false track.report=false checkpoint.every=5 validation.every=0"
)
RL = f"rl {COMMON} data.train=prompts.jsonl reward.functions=code.py:length"
STAGE = (
    "model.dtype=float32 batch_size=4 optimizer.lr=1e-3 steps=5 threads=1 track.console=plain track.tensorboard=false "
    "track.report=false checkpoint.every=5"
)
RUNS = {
    "sft": f"sft {STAGE} data.train=texts.jsonl",
    "dpo": f"dpo {STAGE} data.train=pairs.jsonl",
    "rm": f"rm {STAGE} data.train=pairs.jsonl",
    "grpo": f"{RL} lora.rank=4 algorithm.kl_coef=0.01",
    "ppo": f"{RL} algorithm=ppo",
    "server": f"{RL} engine.kind=birl",
    "asynchronous": f"{RL} engine.kind=birl rollout.max_staleness=1",
    "two_ranks": f"{RL} parallel.fsdp=2",
    "turns": f"rl {COMMON} data.train=prompts.jsonl env=code.py:counts env.max_turns=4 model.max_length=256",
}


def rows() -> dict[str, list[dict[str, str]]]:
    sums = [(f"What is {i} + {i % 3}?", str(i + i % 3)) for i in range(12)]
    return {
        "prompts": [{"prompt": question, "answer": answer} for question, answer in sums],
        "texts": [{"prompt": question, "response": f"The answer is {answer}."} for question, answer in sums],
        "pairs": [{"prompt": q, "chosen": f"It is {a}.", "rejected": "No."} for q, a in sums],
    }


def record(tree: Path, work: Path, names: list[str]) -> dict[str, Any]:
    """What the runs of the package in `tree` give."""
    work.mkdir(parents=True)
    tiny_model_folder(work / "tiny")
    (work / "code.py").write_text(CODE)
    for name, data in rows().items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    results = {}
    for name in names:
        command = [sys.executable, "-m", "birl", *RUNS[name].split(), "model.path=tiny", f"run={name}"]
        ended = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=300)
        if ended.returncode:
            raise SystemExit(
                f"{tree}: {name} ended with {ended.returncode}\n{ended.stdout[-1000:]}{ended.stderr[-3000:]}"
            )
        results[name] = outcome(work / name)
        print(f"{name}: {len(results[name]['figures'])} steps, weights {results[name]['weights'][:12]}", flush=True)
    return results


def outcome(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in lines_of(run / "metrics.jsonl")]
    figures = [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in lines]
    if run.name == "asynchronous":  # which weights sample a token depends on time
        return {"figures": [sorted(line) for line in figures], "weights": ""}
    episodes = [json.loads(line) for line in lines_of(run / "rollouts.jsonl")]
    return {"figures": figures, "episodes": episodes, "weights": digest(run)}


def lines_of(file: Path) -> list[str]:
    return [line for line in file.read_text().split("\n") if line] if file.exists() else []


def digest(run: Path) -> str:
    """Of all tensors of the last checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    sha = hashlib.sha256()
    for file in sorted((newest / "tensors").iterdir()):
        sha.update(file.name.encode() + file.read_bytes())
    return sha.hexdigest()


def differences(before: Any, after: Any, path: str = "") -> list[str]:
    if type(before) is not type(after):
        return [f"{path}: {before!r} was, {after!r} is"]
    if isinstance(before, dict):
        keys = sorted(before.keys() | after.keys())
        return [d for k in keys for d in differences(before.get(k), after.get(k), f"{path}/{k}")]
    if isinstance(before, list):
        if len(before) != len(after):
            return [f"{path}: {len(before)} entries were, {len(after)} are"]
        pairs = enumerate(zip(before, after, strict=True))
        return [d for i, (b, a) in pairs for d in differences(b, a, f"{path}/{i}")]
    same = before == after or (before != before and after != after)
    return [] if same else [f"{path}: {before!r} was, {after!r} is"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commit", help="what this tree is compared with")
    parser.add_argument("--only", nargs="+", default=list(RUNS), choices=list(RUNS), metavar="RUN")
    asked = parser.parse_args()
    here = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        subprocess.run(["git", "worktree", "add", "-q", "--detach", work / "tree", asked.commit], cwd=here, check=True)
        try:
            before = record(work / "tree", work / "before", asked.only)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", work / "tree"], cwd=here, check=True)
        after = record(here, work / "after", asked.only)
    different = differences(before, after)
    print("\n".join(different[:50]) or "Every figure, token and weight is equal.")
    raise SystemExit(bool(different))


if __name__ == "__main__":
    main()
