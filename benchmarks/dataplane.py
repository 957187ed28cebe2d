"""From finished episodes to micro-batches: CPU time per token, and memory of rank 0.

    python -m benchmarks.dataplane [--episodes 1000] [--group 8] [--prompt 500] [--tokens 9500] [--turns 1]
                                   [--json FILE]

    assemble   turns -> flat samples            credit   rewards -> advantages (GRPO)
    pack       samples -> trees, balanced over 8 ranks and micro-batches, as tensors

Beside it the same work as in verl's DataProto (arXiv:2409.19256, verl/protocol.py and verl/trainer/ppo): answers padded
to the longest one as [episodes, length] tensors with masks and positions, an advantage broadcast over each row, rows
assigned to ranks by Karmarkar-Karp, and each rank's rows split into micro-batches. Each side runs in a separate
process; its memory is the peak, minus that before there were episodes. Goals: at most 0.15 microseconds a token, and 2
GB for ten million tokens.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers import machine, verdict

MICROSECONDS, GIGABYTES = 0.15, 2.0
RANKS, CAPACITY, PAIR_COST = 8, 32768, 4e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=500, help="tokens that a group has in common")
    parser.add_argument("--tokens", type=int, default=9500, help="of an episode's answers and of what came between")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--side", choices=SIDES, help="run this one here and print its figures")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(SIDES[args.side](args)))
        return 0
    load, words = machine()["load"], [word for word in sys.argv[1:] if word != "--json" and word != args.json]
    figures = {}
    for side in SIDES:
        command = [sys.executable, "-m", "benchmarks.dataplane", *words, "--side", side]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        figures[side] = json.loads(done.stdout.splitlines()[-1])
    print("| side | stage | microseconds a token |\n| --- | --- | --- |")
    for side, told in figures.items():
        for stage, seconds in told["seconds"].items():
            print(f"| {side} | {stage} | {seconds / told['tokens'] * 1e6:.3f} |")
    each, theirs = ([sum(f["seconds"].values()) / f["tokens"] * 1e6] for f in figures.values())
    held = figures["birl"]["gigabytes"]
    print(f"dataplane, memory: {held:.2f} GB goal {GIGABYTES:.2f} GB; padded {figures['padded']['gigabytes']:.2f} GB")
    details = {"sides": figures, "load_before": load, "args": vars(args)}
    slower = verdict(
        "dataplane, time", each, theirs, goal=1.0, unit="us a token", lower_is_better=True, json_file=args.json,
        details=details,
    )  # fmt: skip
    return slower or int(each[0] > MICROSECONDS or held > GIGABYTES)


def columns(args: argparse.Namespace, episode: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each turn the prompt ids and the answer ids. Lengths are within 20 % of the mean."""
    common = np.random.default_rng(episode // args.group).integers(3, 30000, args.prompt, np.int32)
    own = np.random.default_rng(10**6 + episode)
    seen, result = common, []
    for turn in range(args.turns):
        size = max(2, int(args.tokens / args.turns * own.uniform(0.8, 1.2)))
        said = size if turn == args.turns - 1 else size // 2
        answer = own.integers(3, 30000, said, np.int32)
        result.append((seen, answer))
        seen = np.concatenate([seen, answer, own.integers(3, 30000, size - said, np.int32)])
    return result


def resident() -> float:
    """Peak resident set so far [bytes]."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def timed(seconds: dict[str, float], stage: str, work: Callable[[], Any]) -> Any:
    start = time.process_time()
    result = work()
    seconds[stage] = time.process_time() - start
    return result


def packed(args: argparse.Namespace) -> dict[str, Any]:
    """birl's implementation."""
    import torch

    from birl.config import schema
    from birl.config.load import load
    from birl.data.pack import pack
    from birl.rollout.assemble import samples
    from birl.train.build_worker import credit_of
    from birl.types import Completion, Group, Outcome, Stop, Task, Trajectory, Turn

    torch.set_num_threads(1)
    words = "data.train=x", f"rollout.max_tokens={args.tokens * 2}", f"learner.tokens_per_microbatch={args.tokens * 3}"
    credit = credit_of(load(schema.RL, list(words)))
    started = resident()

    def turn(prompt: np.ndarray, answer: np.ndarray) -> Turn:
        n = len(answer)
        said = Completion(
            tokens=answer, logprobs=np.full(n, -0.5, np.float32), versions=np.zeros(n, np.int32), stop=Stop.STOP
        )
        return Turn(prompt=prompt, completion=said)

    def trajectory(episode: int) -> Trajectory:
        turns = tuple(turn(*told) for told in columns(args, episode))
        return Trajectory(turns=turns, reward=float(episode % 3), score=0.0, outcome=Outcome.OK)

    task = Task(id="t", prompt="?")
    groups = [
        Group(
            index=g, task=task, trajectories=tuple(map(trajectory, range(first, first + args.group))), start_version=0
        )
        for g, first in enumerate(range(0, args.episodes, args.group))
    ]
    seconds: dict[str, float] = {}
    alone = timed(seconds, "assemble", lambda: [samples(t, 0.0, g.index, 0) for g in groups for t in g.trajectories])
    tokens = sum(len(s.tokens) for own in alone for s in own)
    del alone
    credited = timed(seconds, "credit", lambda: credit.of(groups, {}, 0.0).samples)
    seconds["credit"] -= seconds["assemble"]  # which computes it, too
    weights = [1.0 / tokens] * len(credited)
    batches = timed(seconds, "pack", lambda: pack(credited, weights, CAPACITY, RANKS, PAIR_COST))
    computed = sum(len(b.tokens) for b in batches)
    return {"seconds": seconds, "tokens": tokens, "computed": computed, "gigabytes": (resident() - started) / 1e9}


def padded(args: argparse.Namespace) -> dict[str, Any]:
    """DataProto's implementation: the columns of a batch are tensors [episodes, longest]."""
    import torch

    from birl.data.balance import largest_differencing

    torch.set_num_threads(1)
    started = resident()
    episodes = [[(torch.from_numpy(p), torch.from_numpy(a)) for p, a in columns(args, e)] for e in range(args.episodes)]
    rewards = torch.tensor([float(e % 3) for e in range(args.episodes)])
    seconds: dict[str, float] = {}

    def assemble() -> dict[str, Any]:
        longest = max(len(p) + len(a) for turns in episodes for p, a in turns[-1:]) - args.prompt
        shape = len(episodes), args.prompt + longest
        batch = {
            "input_ids": torch.zeros(shape, dtype=torch.int64),
            "attention_mask": torch.zeros(shape, dtype=torch.int64),
            "response_mask": torch.zeros(shape, dtype=torch.int64),
            "rollout_log_probs": torch.zeros(shape, dtype=torch.float32),
        }
        for row, turns in enumerate(episodes):
            whole = torch.cat(turns[-1])
            batch["input_ids"][row, : len(whole)] = whole
            batch["attention_mask"][row, : len(whole)] = 1
            for prompt, answer in turns:
                at = slice(len(prompt), len(prompt) + len(answer))
                batch["response_mask"][row, at] = 1
                batch["rollout_log_probs"][row, at] = -0.5
        batch["position_ids"] = batch["attention_mask"].cumsum(1).sub_(1).clamp_(0)
        return batch

    def credit() -> None:
        each = rewards.view(-1, args.group)
        scores = (each - each.mean(1, keepdim=True)) / (each.std(1, keepdim=True) + 1e-6)
        batch["advantages"] = scores.view(-1, 1) * batch["response_mask"]

    def pack() -> list[dict[str, Any]]:
        lengths = batch["attention_mask"].sum(1).tolist()
        shares = largest_differencing(lengths, RANKS)
        order = torch.tensor([i for share in shares for i in share], dtype=torch.int64)
        dealt = {name: column[order] for name, column in batch.items()}  # DataProto.reorder
        result, first = [], 0
        for share in shares:
            mine = {name: column[first : first + len(share)] for name, column in dealt.items()}  # DataProto.chunk
            first += len(share)
            sizes = mine["attention_mask"].sum(1).tolist()
            count = max(1, -(-sum(sizes) // CAPACITY))
            for rows in largest_differencing(sizes, min(count, len(sizes))):  # rearrange_micro_batches
                result.append({name: column[rows] for name, column in mine.items()})
        return result

    batch = timed(seconds, "assemble", assemble)
    tokens = int(batch["attention_mask"].sum())
    timed(seconds, "credit", credit)
    batches = timed(seconds, "pack", pack)
    computed = sum(int(b["attention_mask"].sum()) for b in batches)
    return {"seconds": seconds, "tokens": tokens, "computed": computed, "gigabytes": (resident() - started) / 1e9}


SIDES = {"birl": packed, "padded": padded}

if __name__ == "__main__":
    sys.exit(main())
