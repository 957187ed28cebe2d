"""One rank of a learner that trains on synthetic groups, started by `scaling`. Rank 0 prints JSON.

WORLD_SIZE=1 RANK=0 python -m benchmarks.scaling_rank --form fsdp --layers 4
"""

import argparse
import json
import os
import time
from dataclasses import asdict
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.traffic import Traffic, least
from benchmarks.training import group, loss
from birl.data.pack import Batch, pack
from birl.learner.learner import Learner, Stats
from birl.models import attention
from birl.models.shape import Shape
from birl.parallel.ranks import Grid, Ranks, join

SIZES: dict[str, Any] = {  # SmolLM2-135M except for the number of layers
    **{"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3},
    **{"vocab_size": 49152, "tie_word_embeddings": True},
}
TINY: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 512, "tie_word_embeddings": True},
}
EVEN = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}  # 9 and 3 cannot be split in two


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", default="ddp", choices=["ddp", "fsdp", "tp", "cp"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--groups", type=int, default=2, help="of the whole step; each is one micro-batch")
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=192, help="of the prompt and of each answer")
    parser.add_argument("--steps", type=int, default=4, help="the first is not timed")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


def work(args: argparse.Namespace, ranks: Ranks, vocabulary: int) -> list[Batch]:
    """Micro-batches of one group each, which is a tree."""
    samples = [s for g in range(args.groups) for s in group(g, args.answers, args.tokens, args.tokens, vocabulary)]
    trained = sum(sum(s.mask) for s in samples)
    full = (args.answers + 1) * args.tokens
    return pack(samples, [1 / trained] * len(samples), full, parts=ranks.shares)


def seconds_of(learner: Learner, batches: list[Batch]) -> float:
    """Seconds of one optimizer step."""
    start, stats = time.perf_counter(), Stats()
    learner.learn([(batch, loss) for batch in batches], stats)
    learner.optim_step(1e-5)
    return time.perf_counter() - start


def main() -> None:
    args, size = arguments(), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    form: dict[str, Any] = {args.form: size}
    ranks = join(Grid(**form), torch.device("cpu"), 600.0)
    sizes: dict[str, Any] = TINY if args.tiny else SIZES | (EVEN if args.form == "tp" else {})
    config = LlamaConfig(num_hidden_layers=args.layers, **sizes)
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(attention.NAME)
    learner = Learner(model, ranks=ranks)
    batches = work(args, ranks, config.vocab_size)
    shape = Shape.of(config.to_dict())
    found: list[float] = [seconds_of(learner, batches) for _ in range(args.steps)]
    with Traffic() as traffic:
        seconds_of(learner, batches)
    told: dict[str, Any] = {"seconds": found[1:], "bytes": dict(traffic.bytes)}
    own = len(batches) // ranks.shares
    tokens, trained = len(batches[0].tokens), len(batches[0].source)
    told["least"] = least(args.form, size, shape, own, tokens, trained) if size > 1 else 0.0
    told |= {"tokens": sum(len(b.tokens) for b in batches), "shape": asdict(shape)}
    if ranks.rank == 0:
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
