"""The peer's side: sampling with vLLM's CPU build. Runs in .venv-vllm and prints one JSON object.

    .venv-vllm/bin/python -m benchmarks.peer_vllm --model DIR --data prompts.jsonl --batch 16 --tokens 128

Every answer has exactly the requested number of tokens (the end token is ignored), by `--lengths`:

    same     answer i gets --tokens
    uneven   answer i gets --tokens * (i % 4 + 1) // 4: a quarter, a half, three quarters, all, a quarter, ...

The prefix cache is emptied in each timed call, because an optimizer step invalidates all of it. Without --logprobs 0 no
log-probs are computed, which is less work than reinforcement learning has to do. Everything runs in this process: with
vLLM's default of three, two threads on two cores stall each other. `--mismatch` compares the log-probs of the sampled
tokens with those of transformers' forward pass, same precision.
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.peers import rows, sampling_options, versions


def arguments() -> argparse.Namespace:
    parser = sampling_options("vLLM on CPU; prints one JSON object")
    parser.add_argument("--lengths", default="same", choices=["same", "uneven"], help="see above")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--logprobs", type=int, help="0: also the chosen tokens' log-probs")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls, after one of the same shape that warms up")
    parser.add_argument("--threads", type=int, default=0, help="0: what OMP_NUM_THREADS says")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--processes", action="store_true", help="vLLM's default: engine and worker in their own")
    parser.add_argument("--block", type=int, default=32, help="tokens per block of the KV cache")
    parser.add_argument("--mismatch", action="store_true", help="compare the log-probs with transformers'")
    return parser.parse_args()


def settings(args: argparse.Namespace) -> int:
    """Set environment variables that vLLM reads, unless they are set already. Returns the number of threads."""
    cores = sorted(os.sched_getaffinity(0))
    threads = args.threads or int(os.environ.get("OMP_NUM_THREADS", len(cores)))
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores[:threads])))
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1" if args.processes else "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # the last line of stdout is the result
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return threads


def peak_rss_gb() -> float:
    """Sum of the largest resident sets of this process and of those it started [GB = 10^9 bytes]."""
    import psutil

    this = psutil.Process()
    total = 0
    for process in (this, *this.children(recursive=True)):
        status = Path(f"/proc/{process.pid}/status").read_text()
        total += int(status.split("VmHWM:")[1].split()[0]) * 1024
    return total / 1e9


def mismatch(args: argparse.Namespace, outputs: list[Any]) -> dict[str, float]:
    """|log-prob of vLLM - log-prob of transformers| of the sampled tokens, one sequence at a time (no padding)."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.precision)).eval()
    differences: list[float] = []
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0]
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
        ours = logits.float().log_softmax(-1).gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        theirs = [entry[token].logprob for entry, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        differences += (ours - torch.tensor(theirs)).abs().tolist()
    return {"tokens": len(differences), "mean": mean(differences), "max": max(differences)}


def main() -> None:
    args = arguments()
    if args.batch % args.group:
        raise SystemExit(f"--group {args.group} does not divide --batch {args.batch}")
    threads = settings(args)
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    data = rows(args.data)
    chosen = [data[i // args.group % len(data)]["prompt"] for i in range(args.batch)]
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in chosen]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    lengths = [args.tokens * (i % 4 + 1) // 4 if args.lengths == "uneven" else args.tokens for i in range(args.batch)]

    start = time.perf_counter()
    llm = LLM(
        model=args.model,
        dtype=args.precision,
        seed=args.seed,
        enforce_eager=args.eager,
        max_model_len=max(map(len, prompts)) + args.tokens,
        max_num_seqs=args.batch,
        kv_cache_memory_bytes=2**30,
        block_size=args.block,
    )
    start_seconds = time.perf_counter() - start
    params = [
        SamplingParams(
            temperature=args.temperature,
            max_tokens=n,
            ignore_eos=True,
            logprobs=0 if args.mismatch else args.logprobs,
            detokenize=False,
        )
        for n in lengths
    ]

    def sample() -> tuple[float, list[Any]]:
        start = time.perf_counter()
        llm.reset_prefix_cache()
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
        return seconds, outputs

    sample()
    calls = [sample() for _ in range(args.repeats)]
    seconds = [s for s, _ in calls]
    result = {
        "peer": "vllm",
        "precision": args.precision,
        "batch": args.batch,
        "group": args.group,
        "tokens": args.tokens,
        "lengths": args.lengths,
        "temperature": args.temperature,
        "logprobs": params[0].logprobs,
        "eager": args.eager,
        "processes": args.processes,
        "block": args.block,
        "prompt_tokens": sum(map(len, prompts)),
        "threads": threads,
        "device": "cpu",
        "start_seconds": start_seconds,
        "seconds": seconds,
        "tokens_per_s": sum(lengths) / median(seconds),
        "best_tokens_per_s": sum(lengths) / min(seconds),
        "peak_rss_gb": peak_rss_gb(),
        "load": os.getloadavg(),
        "versions": versions(),
    }
    if args.mismatch:
        result["mismatch"] = mismatch(args, calls[-1][1])
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
