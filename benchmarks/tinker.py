"""Overhead of `birl tinker`: steps of GRPO through Tinker's client, as the cookbook's rl_basic makes them, against the
same steps by birl's learner and engine in this process, in turns, with the same rows and tokens.

    .venv-tinker/bin/python -m benchmarks.tinker [--model smollm2] [--prompts 8] [--group 8] [--tokens 16] [--steps 8]
    .venv/bin/python -m benchmarks.tinker --tenants 16   the same answers by one adapter, and by 16 with a share each

The service is a process of its own, on one thread as this one. `--tenants` compares two ways of the learner and engine
alone; goal: 16 adapters take at most 1.6 times as long.
"""

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers import OURS, ROOT, environment, rows, verdict

GOAL = 1 / 1.1  # at most 10 % over the learner's own loop
MANY = 1 / 1.6  # 16 adapters with four rows each, against one with 64
RANK, SEED, LR = 32, 7, 1e-5
Answer = tuple[list[int], list[float]]  # token ids and their log-probs


@contextmanager
def serving(args: argparse.Namespace, folder: str) -> Iterator[str]:
    """`birl tinker` in a process of its own; gives its address."""
    words = ["tinker", f"model.path={args.model}", f"folder={folder}/served", "port=0", "threads=1", "names=[model]"]
    command = [OURS, "-m", "birl", *words]
    child = subprocess.Popen(command, cwd=ROOT, env=environment(1), stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        said = ""
        for line in child.stdout:
            said += line
            if at := re.search(r" at (http://\S+?)(,|$)", line):
                yield at[1]
                return
        raise SystemExit(f"birl tinker ended:\n{said}")
    finally:
        child.terminate()
        child.wait()


def datum(prompt: list[int], answer: Answer, advantage: float) -> dict[str, list[Any]]:
    """As the cookbook has it: inputs and targets are shifted, and prompts have no advantage."""
    zeros, (tokens, logprobs) = [0.0] * (len(prompt) - 1), answer
    return {
        "tokens": [*prompt, *tokens[:-1]],
        "target_tokens": [*prompt[1:], *tokens],
        "logprobs": [*zeros, *logprobs],
        "advantages": [*zeros, *[advantage] * len(tokens)],
    }


class Client:
    """The service's side."""

    def __init__(self, args: argparse.Namespace, url: str) -> None:
        import tinker

        service: Any = tinker  # for a type checker this file itself has that name
        self.args, self.service = args, service.ServiceClient(base_url=url, api_key="tml-benchmark")
        self.training: Any = None

    async def step(self, prompts: list[list[int]], number: int) -> list[Answer]:
        from tinker import types  # pyright: ignore[reportAttributeAccessIssue]

        if self.training is None:
            self.training = await self.service.create_lora_training_client("model", rank=RANK, seed=SEED)
        sampler = await self.training.save_weights_and_get_sampling_client()
        asked = []
        for i, prompt in enumerate(prompts):
            params = types.SamplingParams(max_tokens=self.args.tokens, seed=number * len(prompts) + i, stop=[])
            asked.append(sampler.sample(types.ModelInput.from_ints(prompt), 1, params))
        answers = []
        for result in await asyncio.gather(*asked):
            (one,) = result.sequences
            answers.append((list(one.tokens), list(one.logprobs or ())))
        data = []
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            inputs = datum(prompt, answer, 1.0 if i % 2 else -1.0)
            ids = types.ModelInput.from_ints(inputs.pop("tokens"))
            data.append(types.Datum(model_input=ids, loss_fn_inputs=inputs))
        learned = self.training.forward_backward(data, "importance_sampling")
        stepped = self.training.optim_step(types.AdamParams(learning_rate=LR))
        await learned
        await stepped
        return answers


class Own:
    """The service's own learner and engine, without the service."""

    def __init__(self, args: argparse.Namespace, folder: str, compute: Executor) -> None:
        from birl.config import schema
        from birl.learner.low_rank_run import LowRankConfig
        from birl.server.tinker.command import load
        from birl.server.tinker.tenants import Tenants

        config = schema.Tinker(model=schema.Model(path=args.model))
        service = load(config, Tenants({}), Path(folder) / "own", compute)
        self.args, self.compute, self.engine = args, compute, service.sampling.engine
        self.base = service.work.passes.base
        self.runs = [self.base.run(LowRankConfig(rank=RANK, seed=SEED)) for _ in range(args.tenants or 1)]

    async def step(self, prompts: list[list[int]], number: int) -> list[Answer]:
        from birl.seeds import derive_seed
        from birl.types import SamplingParams

        params = SamplingParams(max_tokens=self.args.tokens, ignore_eos=True)
        seeds = (derive_seed(number * len(prompts) + i, 0) for i in range(len(prompts)))
        done = await asyncio.gather(
            *(self.engine.generate(tuple(p), replace(params, seed=s), adapter=self.run_of(i).weights)  # pyright: ignore
              for i, (p, s) in enumerate(zip(prompts, seeds, strict=True)))
        )  # fmt: skip
        answers = [(one.tokens.tolist(), one.logprobs.tolist()) for one in done]
        await asyncio.get_running_loop().run_in_executor(self.compute, self.learn, prompts, answers)
        return answers

    def run_of(self, answer: int) -> Any:
        """The adapter of an answer: each has as many neighbouring ones."""
        return self.runs[answer * len(self.runs) // (self.args.prompts * self.args.group)]

    def learn(self, prompts: list[list[int]], answers: list[Answer]) -> None:
        import torch

        from birl.learner.low_rank_run import AdamStep
        from birl.models.target_logprobs import TargetRow
        from birl.server.tinker.passes import cut

        data = [datum(p, a, 1.0 if i % 2 else -1.0) for i, (p, a) in enumerate(zip(prompts, answers, strict=True))]
        for run in self.runs:
            run.collect()
        for piece in cut([len(d["tokens"]) for d in data], self.base.max_tokens):
            own = [{key: torch.tensor(value) for key, value in d.items()} for d in data[piece]]
            work = dict[Any, tuple[list[TargetRow], list[Any]]]()
            for i, d in zip(range(len(data))[piece], own, strict=True):
                rows, inputs = work.setdefault(self.run_of(i), ([], []))
                rows.append(TargetRow(d["tokens"], d["target_tokens"][:, None]))
                inputs.append(d)
            inputs = [inputs for _, inputs in work.values()]

            def loss(number: int, logp: Any, inputs: Any = inputs) -> Any:
                old, advantages = (torch.cat([d[key] for d in inputs[number]]) for key in ("logprobs", "advantages"))
                return -((torch.cat([p[:, 0] for p in logp]) - old).exp() * advantages).sum()

            self.base.learn([(run.weights, rows) for run, (rows, _) in work.items()], loss)
        for run in self.runs:
            run.step(AdamStep(learning_rate=LR))


async def measured(args: argparse.Namespace, folder: str, url: str, compute: Executor) -> tuple[list, list]:
    """Seconds of the steps of both sides. `url`: of the service; empty with `--tenants`."""
    from transformers import AutoTokenizer

    from birl.models.load import resolve

    words: Any = AutoTokenizer.from_pretrained(resolve(args.model))
    texts = [words.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
             for row in rows(args.data)[: args.prompts]]  # fmt: skip
    prompts = [p for text in texts for p in [words.encode(text, add_special_tokens=False)] * args.group]
    own = await asyncio.to_thread(partial(Own, args, folder, compute))
    if args.tenants:
        one = argparse.Namespace(**{**vars(args), "tenants": 1})
        sides = (own, await asyncio.to_thread(partial(Own, one, folder + "/one", compute)))
    else:
        sides = (Client(args, url), own)
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(args.steps + 1):  # the first one warms up
        answers: dict[int, list[Answer]] = {}
        for side in (0, 1) if number % 2 else (1, 0):
            began = time.perf_counter()
            answers[side] = await sides[side].step(prompts, number)
            if number:
                seconds[side].append(time.perf_counter() - began)
        if not args.tenants and [a[0] for a in answers[0]] != [a[0] for a in answers[1]]:
            raise SystemExit(f"step {number}: the service and the learner's own loop sampled different tokens")
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", default="recipes/data/arithmetic/train.jsonl")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tenants", type=int, default=0, help="adapters, for the second comparison")
    parser.add_argument("--json", help="also write every figure into this file")
    args = parser.parse_args()
    from birl.allocator import keep_memory
    from birl.parallel.machine import compute_thread

    keep_memory()
    with (
        tempfile.TemporaryDirectory() as folder,
        compute_thread(1) as compute,
        nullcontext("") if args.tenants else serving(args, folder) as url,
    ):
        ours, peer = asyncio.run(measured(args, folder, url, compute))
    sizes = {name: getattr(args, name) for name in ("model", "prompts", "group", "tokens", "steps", "tenants")}
    how = {
        "goal": MANY if args.tenants else GOAL,
        "unit": "s",
        "lower_is_better": True,
        "json_file": args.json,
        "details": {"sizes": sizes},
    }
    name = f"tinker, {args.tenants} tenants" if args.tenants else "tinker"
    return verdict(name, ours, peer, **how)


if __name__ == "__main__":
    sys.exit(main())
