"""The peer's side of agents.py: vLLM's CPU build with its prefix cache. Runs in .venv-vllm and prints one JSON object.

    .venv-vllm/bin/python -m benchmarks.peer_vllm_agents --model DIR [--tasks 8] [--branches 4] [--turns 8] ...

The episodes of `agents.sampled`: the same tool outputs, each turn requested after the previous answer, the cache empty
at the start. No log-probs, no seeds, no text. Start-up, compilation and a short warm-up episode are not timed. The
engine is stepped in this process, so that a turn joins the next step: `LLM.generate` would hold all turns until the
last one is answered, and AsyncLLM computes in a separate process, beside the one that sends requests.
"""

import asyncio
import json
import os
import time
from argparse import Namespace
from typing import Any

from benchmarks.agents import counted, longest, options, sampled
from benchmarks.peer_vllm import peak_rss_gb, settings
from benchmarks.peers import versions


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--processes", action="store_true", help="vLLM's default: engine and worker in their own")
    parser.add_argument("--batched", type=int, help="max_num_batched_tokens, tokens a step; without it vLLM's 4096")
    parser.add_argument("--block", type=int, default=32, help="tokens per block of the KV cache")
    parser.set_defaults(threads=0)  # what OMP_NUM_THREADS says
    args = parser.parse_args()
    settings(args)
    from transformers import AutoConfig
    from vllm import LLM  # pyright: ignore[reportMissingImports]

    shape, episodes = AutoConfig.from_pretrained(args.model), args.tasks * args.branches
    token = 4 * shape.num_hidden_layers * shape.num_key_value_heads * shape.hidden_size // shape.num_attention_heads
    llm = LLM(
        model=args.model,
        dtype="bfloat16",
        max_model_len=args.turns * (args.tool + args.answer),
        max_num_seqs=episodes,
        max_num_batched_tokens=args.batched,
        kv_cache_memory_bytes=token * episodes * (longest(args) + args.block),  # for all episodes: nothing is evicted
        block_size=args.block,
        enable_prefix_caching=True,
    )
    generation(llm, Namespace(**{**vars(args), "tasks": 1, "branches": 1, "turns": 2}), shape.vocab_size)
    found = generation(llm, args, shape.vocab_size)
    print(json.dumps({**found, "peak_rss_gb": peak_rss_gb(), "load": os.getloadavg(), "versions": versions()}))


def generation(llm: Any, args: Namespace, vocabulary: int) -> dict[str, Any]:
    """All episodes from an empty cache, and their figures."""
    from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

    assert llm.reset_prefix_cache()
    answers: dict[str, asyncio.Future[tuple[int, ...]]] = {}
    asked = cached = 0
    final = RequestOutputKind.FINAL_ONLY
    params = SamplingParams(max_tokens=args.answer, ignore_eos=True, detokenize=False, output_kind=final)

    async def ask(seen: tuple[int, ...], seed: int) -> tuple[int, ...]:
        nonlocal asked
        asked, name = asked + 1, str(asked)
        answers[name] = asyncio.get_running_loop().create_future()
        llm.llm_engine.add_request(name, {"prompt_token_ids": list(seen)}, params)
        return await answers[name]

    async def all_of_them() -> Any:
        nonlocal cached
        episodes = asyncio.ensure_future(sampled(ask, args, vocabulary))
        while not episodes.done():
            for output in llm.llm_engine.step() if answers else ():
                cached += output.num_cached_tokens
                answers.pop(output.request_id).set_result(tuple(output.outputs[0].token_ids))
            for _ in range(4):  # an answered episode requests, its branches start and request, before the next step
                await asyncio.sleep(0)
        return episodes.result()

    start = time.perf_counter()
    episodes = asyncio.run(all_of_them())
    return {"seconds": time.perf_counter() - start, "cached": cached, **counted(episodes)}


if __name__ == "__main__":
    main()
