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
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.peers import OURS, RESULTS, ROOT, curve_of, environment, machine, processor, run

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
    args = parser.parse_args()
    folder = RESULTS / processor() / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    measure(args, folder)
    return 0


def measure(args: argparse.Namespace, folder: Path) -> None:
    ours: list[Callable[[], None]] = []
    theirs: list[Callable[[], None]] = []
    with tempfile.TemporaryDirectory() as scratch:
        start = {name: begun(name, Path(scratch)) for name in TASKS}
        for seed, name in product(args.seeds, TASKS):
            side = partial(trl, name, seed, start[name], args.seconds)
            theirs.append(partial(kept, folder / f"{name}-trl-{seed}.json", side))
        for arm, seed, name in product(args.arms, args.seeds, TASKS):
            side = partial(birl, name, arm, seed, start[name], scratch)
            ours.append(partial(kept, folder / f"{name}-{arm}-{seed}.json", side))

        def queue(runs: list[Callable[[], None]], core: int) -> None:
            os.sched_setaffinity(0, {core})  # of this thread and the processes that it starts
            for each in runs:
                each()

        cores = sorted(os.sched_getaffinity(0))
        lanes = [threading.Thread(target=queue, args=x) for x in zip((ours, theirs), cores, strict=False)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()


def kept(file: Path, side: Callable[[], dict[str, Any]]) -> None:
    """Runs what is not there, and writes it with the machine's load."""
    if file.exists():
        return
    try:
        result: dict[str, Any] = side() | {"machine": machine()}
    except subprocess.CalledProcessError as error:
        print(f"{file.stem} ended with {error.returncode}: {(error.stderr or '')[-3000:]}", file=sys.stderr, flush=True)
        return
    except SystemExit as error:  # of `run`, with the words and the end of what it wrote
        print(f"{file.stem}: {error}", file=sys.stderr, flush=True)
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
    first, model = scratch / f"{name}-sft", scratch / f"{name}-model"
    command("sft", study.sft, f"run={first}", "track.console=off", threads=2)
    command("checkpoints", first, "export", "last", model, threads=2)
    return {"model": str(model), "data": str(data)}


def command(*words: Any, threads: int = 1) -> None:
    done = [str(OURS), "-m", "birl", *map(str, words)]
    subprocess.run(done, cwd=ROOT, env=environment(threads), capture_output=True, text=True, check=True)


def birl(name: str, arm: str, seed: int, start: dict[str, str], scratch: str) -> dict[str, Any]:
    study, folder, began = TASKS[name], Path(scratch, f"{name}-{arm}-{seed}"), time.time()
    words = [study.recipe, *study.words, *SAME, *ARMS[arm], f"model.path={start['model']}", f"optimizer.lr={study.lr}"]
    words += [f"data.train={start['data']}"] if name == "stories" else []
    command("rl", *words, f"seed={seed}", f"run={folder}")
    validations = map(json.loads, (folder / "validation.jsonl").read_text().splitlines())
    held_out = {v["step"]: v["validation/all/score"] for v in validations}
    return {"curve": curve_of(folder / "metrics.jsonl", began), "held_out": held_out, "words": words}


def trl(name: str, seed: int, start: dict[str, str], seconds: float) -> dict[str, Any]:
    study = TASKS[name]
    same: dict[str, Any] = {"learn": True, "precision": "mixed", "prompts": 8, "group": 8, "steps": 4 * STEPS}
    own: dict[str, Any] = {"task": name, "seed": seed, "tokens": study.tokens, "lr": study.lr, "seconds": seconds}
    result = run("benchmarks.peer_trl", threads=1, model=start["model"], data=start["data"], **same, **own)
    each = zip(result["learning"], result["tokens_of_steps"], strict=False)
    return {"curve": [step | {"tokens": tokens} for step, tokens in each]}


if __name__ == "__main__":
    sys.exit(main())
