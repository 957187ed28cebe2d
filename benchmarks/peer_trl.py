"""The peer's side: GRPO with TRL on a local model folder. Runs in .venv-trl and prints one JSON object.

    speed     .venv-trl/bin/python -m benchmarks.peer_trl --model DIR --data prompts.jsonl \
                  --prompts 4 --group 4 --tokens 64
    learning  .venv-trl/bin/python -m benchmarks.peer_trl --learn --model DIR --data train.jsonl \
                  --prompts 8 --group 8 --tokens 32 --lr 1e-5 --steps 30 --target 0.95

    tasks     ... --learn --task calculator --seconds 600: a task of benchmarks.tasks, for ten minutes

For speed, every answer has exactly --tokens tokens (the end token is forbidden before that), prompts come in the file's
order, and the reward is cheap and differs within a group, so that no step is without a gradient. For learning, the
reward is math-verify's, and every second since the process started counts: imports, model loading, all.

TRL gets its best settings for this size: no gradient checkpointing, no reference model, no logging beyond its own.
"""

import time

START = time.perf_counter()

import argparse  # noqa: E402
import asyncio  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from benchmarks.peers import peak_rss_gb, rows, versions  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO with TRL; prints one JSON object")
    parser.add_argument("--model", required=True, help="folder in Hugging Face format")
    parser.add_argument("--data", required=True, help="JSONL file, see benchmarks.peers.rows")
    parser.add_argument(
        "--precision",
        default="bfloat16",
        choices=["float32", "bfloat16", "mixed"],
        help="bfloat16: weights and compute (TRL's fastest); mixed: float32 weights, bfloat16 autocast",
    )
    parser.add_argument("--prompts", type=int, default=4, help="prompts per step")
    parser.add_argument("--group", type=int, default=4, help="answers per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer: exactly, or with --learn at most")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--microbatch", type=int, default=16, help="answers per pass, or all of a step if fewer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="0: what OMP_NUM_THREADS says")
    parser.add_argument("--learn", action="store_true", help="train on the answers of --data, and report rewards")
    parser.add_argument("--target", type=float, default=0.0, help="with --learn: stop at this mean reward; 0: never")
    parser.add_argument("--task", default="stories", choices=list(REWARDS), help="with --learn: what the reward is")
    parser.add_argument("--seconds", type=float, default=0.0, help="with --learn: stop after these; 0: never")
    return parser.parse_args()


def distinct(completion_ids: list[list[int]], **columns: object) -> list[float]:
    """Share of distinct tokens: costs nothing, and differs between the answers of a group."""
    return [len(set(ids)) / max(1, len(ids)) for ids in completion_ids]


def right(completions: list[list[dict[str, str]]], answer: list[str], **columns: object) -> list[float]:
    """1 if math-verify finds the answer in the text, else 0."""
    from math_verify import parse, verify

    return [
        float(verify(parse(f"${gold}$"), parse(messages[-1]["content"])))
        for messages, gold in zip(completions, answer, strict=True)
    ]


def made(completions: list[list[dict[str, str]]], numbers: list, target: list, **columns: object) -> list[float]:
    """1 if the expression uses the given numbers and has the target as its value, else 0: birl's own function."""
    from birl.envs.tasks.countdown import Countdown
    from birl.types import Message, Task

    async def reward(text: str, given: dict) -> float:
        env = Countdown(Task(id="0", prompt=(), columns=given), Countdown.Config(count=2, largest=20))
        return (await env.step(Message(role="assistant", content=text))).reward

    asked = zip(completions, numbers, target, strict=True)
    return [asyncio.run(reward(m[-1]["content"], {"numbers": n, "target": t})) for m, n, t in asked]


def computed(completions: list[list[dict[str, str]]], answer: list[str], **columns: object) -> list[float]:
    """1 if the last number of the last reply is the result, else 0: birl's own function."""
    from birl.envs.tasks.rows import number

    return [float(number(m[-1].get("content") or "") == number(a)) for m, a in zip(completions, answer, strict=True)]


def calculator(expression: str) -> str:
    """The exact value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses, as in (12 + 3) * 4.
    """
    from birl.envs.tasks.calculator import Calculator
    from birl.types import Task

    return asyncio.run(Calculator(Task(id="0", prompt=()), Calculator.Config()).use(expression))


REWARDS = {"stories": right, "countdown": made, "calculator": computed}
COLUMNS = {"countdown": ("numbers", "target")}


def with_calls(tokenizer: Any) -> None:
    """Set the chat template of birl's run, and TRL's parser of such calls."""
    from trl.chat_template_utils import qwen3_template  # pyright: ignore[reportMissingImports]

    tokenizer.chat_template = Path("birl/text/templates/hermes.jinja").read_text(encoding="utf-8")
    tokenizer.response_template = qwen3_template


def main() -> None:
    args = arguments()
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    dtype = torch.bfloat16 if args.precision == "bfloat16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
    data = rows(args.data, COLUMNS.get(args.task, ()))
    calls = args.task == "calculator"
    if calls:
        with_calls(tokenizer)
    if args.learn:
        data = [r for r in data if r["answer"] is not None]
    else:
        data = [data[i % len(data)] for i in range(args.prompts * args.steps)]
    batch = args.prompts * args.group
    microbatch = min(args.microbatch, batch)
    if batch % microbatch:
        raise SystemExit(f"--microbatch {microbatch} does not divide the {batch} answers of a step")
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(prefix="peer_trl_"),
        per_device_train_batch_size=microbatch,
        gradient_accumulation_steps=batch // microbatch,
        num_generations=args.group,
        max_completion_length=args.tokens,
        generation_kwargs=None if args.learn else {"min_new_tokens": args.tokens},
        max_steps=args.steps,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        shuffle_dataset=args.learn,
        seed=args.seed,
        bf16=args.precision != "float32",
        use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing=False,
        beta=0.0,
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        max_tool_calling_iterations=1 if calls else None,
    )

    generation: list[float] = []  # seconds of each call of generate
    produced: list[int] = []  # tokens of each step
    ends: list[float] = []  # seconds since the start at the end of each step
    rewards: list[float] = []
    began = [0.0]

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *a, **k):
            t = time.perf_counter()
            result = super()._generate_single_turn(*a, **k)
            generation.append(time.perf_counter() - t)
            return result

        def _generate_and_score_completions(self, inputs):
            result = super()._generate_and_score_completions(inputs)
            produced.append(int(result["completion_mask"].sum()))
            return result

    class Clock(TrainerCallback):
        def on_train_begin(self, *a, **k):
            began[0] = time.perf_counter() - START

        def on_step_end(self, *a, **k):
            ends.append(time.perf_counter() - START)

        def on_log(self, _, state, control, logs=None, **k):
            if logs and "reward" in logs:
                rewards.append(float(logs["reward"]))
                print(f"step {len(rewards)} {ends[-1]:.1f} s reward {rewards[-1]:.3f}", file=sys.stderr, flush=True)
                late = args.seconds and ends[-1] >= args.seconds
                if late or (args.target and rewards[-1] >= args.target):
                    control.should_training_stop = True
            return control

    trainer = Timed(
        model=model,
        reward_funcs=REWARDS[args.task] if args.learn else distinct,
        args=config,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
        callbacks=[Clock()],
        tools=[calculator] if calls else None,
    )
    trainer.train()

    steps = [b - a for a, b in zip([began[0], *ends], ends, strict=False)]
    first = 1 if len(steps) > 1 else 0  # the first step warms up
    mean = lambda xs: sum(xs) / len(xs)  # noqa: E731
    result = {
        "peer": "trl",
        "precision": args.precision,
        "prompts": args.prompts,
        "group": args.group,
        "tokens": args.tokens,
        "microbatch": microbatch,
        "threads": torch.get_num_threads(),
        "device": str(model.device),
        "before_training_s": began[0],
        "step_s": mean(steps[first:]),
        "generate_s": mean(generation[first:]),
        "train_s": mean(steps[first:]) - mean(generation[first:]),
        "generate_tokens_per_s": sum(produced[first:]) / sum(generation[first:]),
        "steps_s": steps,
        "tokens_of_steps": produced,
        "peak_rss_gb": peak_rss_gb(),
        "total_s": time.perf_counter() - START,
        "load": os.getloadavg(),
        "versions": versions(),
    }
    if args.learn:
        result["learning"] = [
            {"step": i + 1, "seconds": t, "reward": r} for i, (t, r) in enumerate(zip(ends, rewards, strict=True))
        ]
        reached = [x for x in result["learning"] if args.target and x["reward"] >= args.target]
        result["reached"] = reached[0] if reached else None
    print(json.dumps(result))


if __name__ == "__main__":
    main()
