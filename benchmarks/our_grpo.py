"""birl's side: GRPO with birl on a local model folder, through `birl.train.command.train` as in `birl rl`; prints JSON.

    .venv/bin/python -m benchmarks.our_grpo --model DIR --data prompts.jsonl --prompts 4 --group 4 --tokens 64

Every answer has exactly --tokens tokens (the end token is ignored). Rollout and metric logs are written as usual; no
reference model, no validation.
"""

import argparse
import dataclasses
import json
import os
import tempfile
import time
from pathlib import Path
from statistics import mean

from benchmarks.peers import peak_rss_gb, versions

START = time.perf_counter()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO with birl; prints one JSON object")
    parser.add_argument("--model", required=True, help="folder in Hugging Face format")
    parser.add_argument("--data", required=True, help="JSONL file")
    parser.add_argument("--precision", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=4, help="prompts per step")
    parser.add_argument("--group", type=int, default=4, help="answers per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer, exactly")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--more", default="", help="more keys, as in 'algorithm.kl_coef=0.1 optimizer.eps=1e-6'")
    return parser.parse_args()


def distinct(completions: list[str], **columns: object) -> list[float]:
    """Share of distinct characters: costs nothing, and differs between the answers of a group."""
    return [len(set(text)) / max(1, len(text)) for text in completions]


def main() -> None:
    args = arguments()
    from birl.config import schema
    from birl.config.load import load
    from birl.named import Given
    from birl.train import build
    from birl.train.command import train

    plain = build.sampling
    build.sampling = lambda rollout: dataclasses.replace(plain(rollout), ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder:
        config = load(
            schema.RL,
            [
                f"model.path={args.model}",
                f"model.dtype={args.precision}",
                f"data.train=[{args.data}]",
                "reward.functions=[given:distinct]",
                f"rollout.prompts={args.prompts}",
                f"rollout.group_size={args.group}",
                f"rollout.max_tokens={args.tokens}",
                f"optimizer.lr={args.lr}",
                f"steps={args.steps}",
                f"seed={args.seed}",
                "validation.every=0",
                "checkpoint.every=0",
                "checkpoint.asynchronous=false",  # the copy of the last one would be the peak of memory
                "track.console=off",
                f"run={folder}/run",
                *args.more.split(),
            ],
        )
        train(config, given=Given(rewards=[distinct]))
        steps = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    timed = steps[1:] or steps  # the first step warms up
    assert all(s["tokens/generated"] == args.prompts * args.group * args.tokens for s in steps)
    result = {
        "side": "birl",
        "precision": args.precision,
        "prompts": args.prompts,
        "group": args.group,
        "tokens": args.tokens,
        "step_s": mean(s["time/step"] for s in timed),
        "generate_s": mean(s["time/generate"] for s in timed),
        "train_s": mean(s["time/train"] for s in timed),
        "generate_tokens_per_s": mean(s["speed/generate"] for s in timed),
        "steps_s": [s["time/step"] for s in steps],
        "mismatch": mean(s["mismatch/mean"] for s in steps),
        "peak_rss_gb": peak_rss_gb(),
        "total_s": time.perf_counter() - START,
        "load": os.getloadavg(),
        "versions": versions(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
