"""Three tasks that SmolLM2-135M learns, by birl's presets and by TRL's GRPO; curves into results/<processor>/tasks/.

    python -m benchmarks.tasks [--seeds 0 1 2] [--seconds 900] [--arms grpo ...]    measures what is missing

Two runs at a time, each on one core with one thread: TRL's, which end after --seconds, and birl's, of 40 steps. Both
have the same weights, problems, 8 prompts x 8 answers a step, lengths, learning rate, float32 weights and bfloat16
compute, and rewards by the same functions. Each starts from the weights of its recipe's SFT. Every second since the
start of a process counts, including birl's five validations and its checkpoint. A run of birl takes 6 to 10 minutes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.peers import OURS, RESULTS, ROOT, curve_of, environment, machine, processor, run

STEPS, ROWS, LR = 40, 120, 1e-5
STORIES = "recipes/data/arithmetic_stories"


@dataclass(frozen=True)
class Study:
    """`sft`: recipe of the first stage; `recipe`: of birl's run, with `words`; `tokens`: of an answer, over all turns
    and (for TRL) including the tool's answer."""

    sft: str
    recipe: str
    words: tuple[str, ...]
    tokens: int


TASKS = {
    "countdown": Study("recipes/countdown/sft.yaml", "recipes/countdown/rl.yaml", (f"env.rows={ROWS}",), 112),
    "calculator": Study(
        "recipes/calculator/sft.yaml",
        "recipes/calculator/rl.yaml",
        (f"env.rows={ROWS}", "env.validation_rows=100", "algorithm.entropy_coef=0"),
        144,
    ),
    "stories": Study("recipes/stories/sft.yaml", "recipes/stories/rl.yaml", (), 48),
}
ARMS = {
    "grpo": (),
    "thompson": ("data.order=thompson",),
    "sdpo": ("algorithm=sdpo", "algorithm.advantage=relative", "algorithm.teacher_coef=0.1"),
    "rloo": ("algorithm=rloo",),
}
SAME = (
    "algorithm.kl_coef=0",
    "optimizer.schedule=constant",
    "optimizer.warmup_steps=0",
    f"steps={STEPS}",
    f"validation.every={STEPS // 4}",
    f"checkpoint.every={STEPS}",
    "threads=1",
    "track.console=off",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=900.0, help="of a run of TRL")
    parser.add_argument("--arms", nargs="+", default=[*ARMS, "trl"], choices=[*ARMS, "trl"])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    args = parser.parse_args()
    folder = RESULTS / processor() / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    measure(args, folder)
    return 0


def measure(args: argparse.Namespace, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        start = {name: begun(name, Path(scratch)) for name in args.tasks}
        runs: list[tuple[Path, Callable[[], dict[str, Any]]]] = []
        for name, arm, seed in product(args.tasks, args.arms, args.seeds):
            if arm == "trl":
                side = partial(trl, name, seed, start[name], args.seconds)
            else:
                side = partial(birl, name, arm, seed, start[name], scratch)
            runs.append((folder / f"{name}-{arm}-{seed}.json", side))
        waiting = iter(runs)

        def lane(core: int) -> None:
            os.sched_setaffinity(0, {core})  # of this thread and the processes that it starts
            for file, side in waiting:
                kept(file, side)

        lanes = [threading.Thread(target=lane, args=(core,)) for core in sorted(os.sched_getaffinity(0))[:2]]
        for each in lanes:
            each.start()
        for each in lanes:
            each.join()


def kept(file: Path, side: Callable[[], dict[str, Any]]) -> None:
    """Run a side if its file is missing, and write its result with the machine's load."""
    if file.exists():
        return
    try:
        result: dict[str, Any] = side() | {"machine": machine()}
    except subprocess.CalledProcessError as error:
        print(f"{file.stem} ended with {error.returncode}: {(error.stderr or '')[-3000:]}", file=sys.stderr, flush=True)
        return
    except SystemExit as error:  # of `run`, with the command and the end of its output
        print(f"{file.stem}: {error}", file=sys.stderr, flush=True)
        return
    file.write_text(json.dumps(result, indent=1) + "\n")
    last: dict[str, float] = result["curve"][-1]
    print(f"{file.stem}: {last['step']} steps, {last['seconds']:.0f} s, reward {last['reward']:.3f}", flush=True)


def begun(name: str, scratch: Path) -> dict[str, str]:
    """Folder of the weights that both sides start from, and file of the problems."""
    from birl.envs.tasks.calculator import Calculator
    from birl.envs.tasks.countdown import Countdown

    study, data = TASKS[name], scratch / f"{name}.jsonl"
    if name == "stories":
        lines = Path(ROOT, STORIES, "train.jsonl").read_text().splitlines()
    elif name == "countdown":
        config = Countdown.Config(count=2, largest=20, target=100, rows=ROWS, validation_rows=80)
        lines = [json.dumps(row) for row in Countdown.tasks(config, "train")]
    else:
        lines = [json.dumps(row) for row in Calculator.tasks(Calculator.Config(digits=2, turns=2, rows=ROWS), "train")]
    data.write_text("\n".join(lines) + "\n")
    first, model = scratch / f"{name}-sft", scratch / f"{name}-model"
    command("sft", study.sft, f"run={first}", "track.console=off", threads=2)
    command("checkpoints", first, "export", "last", model, threads=2)
    return {"model": str(model), "data": str(data)}


def command(*words: Any, threads: int = 1) -> None:
    done = [str(OURS), "-m", "birl", *map(str, words)]
    subprocess.run(done, cwd=ROOT, env=environment(threads), capture_output=True, text=True, check=True)


def birl(name: str, arm: str, seed: int, start: dict[str, str], scratch: str) -> dict[str, Any]:
    study, folder, began = TASKS[name], Path(scratch, f"{name}-{arm}-{seed}"), time.time()
    words = [study.recipe, *study.words, *SAME, *ARMS[arm], f"model.path={start['model']}", f"optimizer.lr={LR}"]
    command("rl", *words, f"seed={seed}", f"run={folder}")
    validations = map(json.loads, (folder / "validation.jsonl").read_text().splitlines())
    held_out = {v["step"]: v["validation/all/score"] for v in validations}
    return {"curve": curve_of(folder / "metrics.jsonl", began), "held_out": held_out, "words": words}


def trl(name: str, seed: int, start: dict[str, str], seconds: float) -> dict[str, Any]:
    study = TASKS[name]
    same: dict[str, Any] = {"learn": True, "precision": "mixed", "prompts": 8, "group": 8, "steps": 4 * STEPS}
    own: dict[str, Any] = {"task": name, "seed": seed, "tokens": study.tokens, "lr": LR, "seconds": seconds}
    result = run("benchmarks.peer_trl", threads=1, model=start["model"], data=start["data"], **same, **own)
    each = zip(result["learning"], result["tokens_of_steps"], strict=False)
    times = {key: result[key] for key in ("generate_s", "train_s", "peak_rss_gb")}
    return {"curve": [step | {"tokens": tokens} for step, tokens in each], **times}


if __name__ == "__main__":
    sys.exit(main())
