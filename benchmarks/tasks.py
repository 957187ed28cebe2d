"""Three tasks that SmolLM2-135M learns, by birl's presets and by TRL's GRPO; curves into results/<processor>/tasks/.

    python -m benchmarks.tasks [--seeds 0 1 2] [--seconds 600] [--arms grpo ...]    measures what is not there yet

Two queues, each on a core of its own with one thread: TRL's runs, which end after --seconds, and birl's, of 40 steps.
Both have the same weights, problems, 8 prompts x 8 answers a step, lengths, learning rate, float32 weights and bfloat16
compute, and rewards by the same functions. Countdown and the calculator begin from what their recipes' SFT makes. Every
second since the start of a process counts, birl's two validations and its checkpoint too. About 100 minutes.
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
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.peers import OURS, PEER, RESULTS, ROOT, environment, machine, processor

STEPS, ROWS = 40, 120
STORIES = "recipes/data/arithmetic_stories"


@dataclass(frozen=True)
class Study:
    """`sft`: recipe of the first stage; `recipe`: of birl's run, with `words`; `tokens`: of an answer, all turns and
    (for TRL) the tool's answer included."""

    sft: str | None
    recipe: str
    words: tuple[str, ...]
    tokens: int
    lr: float = 1e-5


TASKS = {
    "countdown": Study("recipes/countdown/sft.yaml", "recipes/countdown/rl.yaml", (f"env.rows={ROWS}",), 112),
    "stories": Study(None, "recipes/smollm2_stories_grpo_cpu2.yaml", (), 48, 3e-5),
    "calculator": Study(
        "recipes/calculator/sft.yaml",
        "recipes/calculator/rl.yaml",
        (f"env.rows={ROWS}", "env.validation_rows=100", "algorithm.entropy_coef=0"),
        144,
    ),
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
    f"validation.every={STEPS}",
    f"checkpoint.every={STEPS}",
    "threads=1",
    "track.console=off",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=600.0, help="of a run of TRL")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--until", type=float, default=1e9, help="minutes after which no run begins")
    args = parser.parse_args()
    folder = RESULTS / processor() / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    measure(args, folder)
    return 0


def measure(args: argparse.Namespace, folder: Path) -> None:
    ours: list[Callable[[], None]] = []
    theirs: list[Callable[[], None]] = []
    cores = sorted(os.sched_getaffinity(0))
    end = time.monotonic() + 60 * args.until
    with tempfile.TemporaryDirectory() as scratch:
        start = {name: begun(name, Path(scratch)) for name in TASKS}
        for seed in args.seeds:
            for name in TASKS:
                theirs.append(
                    lambda n=name, s=seed: kept(folder / f"{n}-trl-{s}.json", lambda: trl(n, s, start[n], args))
                )
        for arm in args.arms:
            for seed in args.seeds:
                for name in TASKS:
                    file = folder / f"{name}-{arm}-{seed}.json"
                    ours.append(lambda f=file, a=arm, n=name, s=seed: kept(f, lambda: birl(n, a, s, start[n], scratch)))

        def queue(runs: list[Callable[[], None]], core: int) -> None:
            os.sched_setaffinity(0, {core})  # of this thread and the processes that it starts
            for run in runs:
                if time.monotonic() < end:
                    run()

        lanes = [
            threading.Thread(target=queue, args=(runs, core)) for runs, core in zip((ours, theirs), cores, strict=False)
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()


def kept(file: Path, run: Callable[[], dict[str, Any]]) -> None:
    """Runs what is not there, and writes it with the machine's load."""
    if file.exists():
        return
    try:
        result: dict[str, Any] = run() | {"machine": machine()}
    except subprocess.CalledProcessError as error:
        print(f"{file.stem} ended with {error.returncode}: {(error.stderr or '')[-3000:]}", file=sys.stderr, flush=True)
        return
    file.write_text(json.dumps(result, indent=1) + "\n")
    last: dict[str, float] = result["curve"][-1]
    print(f"{file.stem}: {last['step']} steps, {last['seconds']:.0f} s, reward {last['reward']:.3f}", flush=True)


def begun(name: str, scratch: Path) -> dict[str, str]:
    """Folder of the weights that both sides begin with, and file of the problems."""
    from birl.envs.tasks.calculator import Calculator
    from birl.envs.tasks.countdown import Countdown
    from birl.models.load import resolve

    study, data = TASKS[name], scratch / f"{name}.jsonl"
    if name == "stories":
        lines = Path(ROOT, STORIES, "train.jsonl").read_text().splitlines()[:ROWS]
    elif name == "countdown":
        config = Countdown.Config(count=2, largest=20, target=100, rows=ROWS, validation_rows=80)
        lines = [json.dumps(row) for row in Countdown.tasks(config, "train")]
    else:
        lines = [json.dumps(row) for row in Calculator.tasks(Calculator.Config(digits=2, turns=2, rows=ROWS), "train")]
    data.write_text("\n".join(lines) + "\n")
    if study.sft is None:
        return {"model": str(resolve("smollm2")), "data": str(data)}
    run, model = scratch / f"{name}-sft", scratch / f"{name}-model"
    command([OURS, "-m", "birl", "sft", study.sft, f"run={run}", "track.console=off"], threads=2)
    command([OURS, "-m", "birl", "checkpoints", str(run), "export", "last", str(model)], threads=2)
    return {"model": str(model), "data": str(data)}


def command(words: list[Any], threads: int = 1) -> str:
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, env=environment(threads), capture_output=True, text=True, check=True
    )
    return done.stdout


def birl(name: str, arm: str, seed: int, start: dict[str, str], scratch: str) -> dict[str, Any]:
    study, run = TASKS[name], Path(scratch, f"{name}-{arm}-{seed}")
    data = [f"data.train={start['data']}"] if name == "stories" else []
    words = [
        study.recipe,
        *study.words,
        *data,
        *SAME,
        *ARMS[arm],
        f"model.path={start['model']}",
        f"optimizer.lr={study.lr}",
    ]
    began = time.time()
    command([OURS, "-m", "birl", "rl", *words, f"seed={seed}", f"run={run}"])
    read = lambda file: [json.loads(line) for line in (run / file).read_text().splitlines()]  # noqa: E731
    curve = [
        {
            "step": m["step"],
            "seconds": datetime.fromisoformat(m["time"]).timestamp() - began,
            "reward": m["reward/mean"],
            "tokens": m["tokens/generated"],
        }
        for m in read("metrics.jsonl")
    ]
    held_out = {v["step"]: v["validation/all/score"] for v in read("validation.jsonl")}
    return {"curve": curve, "held_out": held_out, "words": words}


def trl(name: str, seed: int, start: dict[str, str], args: argparse.Namespace) -> dict[str, Any]:
    words = [PEER, "-m", "benchmarks.peer_trl", "--learn", "--precision", "mixed", "--task", name, "--seed", seed]
    words += ["--model", start["model"], "--data", start["data"], "--seconds", args.seconds, "--steps", 4 * STEPS]
    words += ["--prompts", 8, "--group", 8, "--tokens", TASKS[name].tokens, "--lr", TASKS[name].lr, "--threads", 1]
    result = json.loads(command(words).strip().splitlines()[-1])
    tokens = result["tokens_of_steps"]
    return {"curve": [x | {"tokens": t} for x, t in zip(result["learning"], tokens, strict=False)]}


if __name__ == "__main__":
    sys.exit(main())
