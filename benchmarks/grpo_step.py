"""One GRPO step, birl against TRL: 4 prompts x 4 answers x 64 tokens of SmolLM2-135M in bfloat16, in turns.

    python -m benchmarks.grpo_step [--rounds 5] [--threads 2] [--json FILE]
    python -m benchmarks.grpo_step --group 16 --prompt-tokens 512 --rounds 1 --steps 2 --goal 4

A step is generation, reward and update; the first step of each process is not counted. Memory is the peak resident set
of the whole process. The goal: three times as fast, in no more memory; four times if 16 answers share a prompt of 512
tokens.
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.peers import OURS, in_turns, run, verdict

GOAL = 3.0


def long_prompts(file: Path, model: Path, tokens: int) -> None:
    """Eight different prompts of `tokens` tokens, chat template included: worked examples, then a question."""
    from birl.models.load import load_tokenizer
    from birl.text.chat import Chat
    from birl.types import Message

    chat = Chat(load_tokenizer(model))

    def length(text: str) -> int:
        return len(chat.render((Message(role="user", content=text),)))

    with file.open("w") as out:
        for i in range(8):
            examples = [f"{a} + {b + i} = {a + b + i}" for a in range(2, 60) for b in range(2, 9)]
            question = f" What is {i + 2} + {i + 5}?"
            count = next(n for n in range(len(examples)) if length("; ".join(examples[:n]) + question) > tokens) - 1
            text = "; ".join(examples[:count])
            while length(text + question) < tokens:
                text += " so"
            assert length(text + question) == tokens
            out.write(json.dumps({"prompt": text + question, "answer": str(2 * i + 7)}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of each process, the first one not timed")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--precision", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt-tokens", type=int, default=0, help="0: the prompts of --data, about 45 tokens")
    parser.add_argument("--goal", type=float, default=GOAL)
    parser.add_argument("--data", default="recipes/data/arithmetic/train.jsonl")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    from birl.models.load import resolve

    if args.prompt_tokens:
        args.data = str(Path(tempfile.mkdtemp()) / "long.jsonl")
        long_prompts(Path(args.data), resolve("smollm2"), args.prompt_tokens)
    sizes = {k: getattr(args, k) for k in ("prompts", "group", "tokens", "steps", "precision", "data")}
    work = {"model": resolve("smollm2"), "threads": args.threads, **sizes}
    ours, peer = in_turns(
        partial(run, "benchmarks.our_grpo", python=OURS, **work),
        partial(run, "benchmarks.peer_trl", **work),
        args.rounds,
    )
    memory = [median(r["peak_rss_gb"] for r in side) for side in (ours, peer)]
    print(f"memory: ours {memory[0]:.2f} GB peer {memory[1]:.2f} GB ratio {memory[1] / memory[0]:.2f} goal 1.00")
    details = {"memory_gb": {"ours": memory[0], "peer": memory[1]}, "runs": {"ours": ours, "peer": peer}}
    slow = verdict(
        "grpo_step",
        [r["step_s"] for r in ours],
        [r["step_s"] for r in peer],
        goal=args.goal,
        unit="s",
        lower_is_better=True,
        json_file=args.json,
        details=details,
    )
    return slow or int(memory[0] > memory[1])


if __name__ == "__main__":
    sys.exit(main())
