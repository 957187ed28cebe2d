"""The peer's side: sampling with transformers' `generate`. Runs in .venv-trl and prints one JSON object.

    .venv-trl/bin/python -m benchmarks.peer_generate --model DIR --data prompts.jsonl --batch 16 --tokens 128

Every answer has exactly --tokens tokens (the end token is forbidden before that). `generate` computes no log-probs,
which is less work than an engine for reinforcement learning has to do.
"""

import argparse
import json
import os
import time
from statistics import median
from typing import Any

from benchmarks.peers import peak_rss_gb, rows, sampling_options, versions


def arguments() -> argparse.Namespace:
    parser = sampling_options("transformers' generate; prints one JSON object")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls, after one short one that warms up")
    parser.add_argument("--threads", type=int, default=0, help="0: what OMP_NUM_THREADS says")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.batch % args.group:
        raise SystemExit(f"--group {args.group} does not divide --batch {args.batch}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.precision))
    model = model.to(device).eval()
    data = rows(args.data)
    prompts = [data[i // args.group % len(data)]["prompt"] for i in range(args.batch)]
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)

    def sample(tokens: int) -> float:
        start = time.perf_counter()
        output = model.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        assert output.shape[1] == inputs["input_ids"].shape[1] + tokens
        return seconds

    sample(min(8, args.tokens))
    seconds = [sample(args.tokens) for _ in range(args.repeats)]
    made = args.batch * args.tokens
    result = {
        "peer": "transformers.generate",
        "precision": args.precision,
        "batch": args.batch,
        "group": args.group,
        "tokens": args.tokens,
        "prompt_tokens": int(inputs["attention_mask"].sum()),
        "threads": torch.get_num_threads(),
        "device": device,
        "seconds": seconds,
        "tokens_per_s": made / median(seconds),
        "best_tokens_per_s": made / min(seconds),
        "peak_rss_gb": peak_rss_gb(),
        "load": os.getloadavg(),
        "versions": versions(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
