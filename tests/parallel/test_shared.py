"""Rank 0 sends each rank what it trains: bit for bit, once, and nothing of what others train."""

import pickle
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.traffic import Traffic
from birl.config import schema
from birl.config.load import load
from birl.data.examples import load_examples
from birl.data.pack import Batch, pack
from birl.learner.policy import load_policy
from birl.parallel.crew import RankGroup
from birl.parallel.ranks import Grid, Ranks, Shared
from birl.parallel.shared import FEW, columns, restored, written
from birl.rollout import assemble
from birl.train import build_rows, build_worker
from birl.types import Completion, Group, Message, Outcome, Stop, Task, Trajectory, Turn
from tests.data.test_pack import groups
from tests.parallel.processes import on_ranks
from tests.train import test_offline as offline

COLUMNS = {
    "rising": torch.arange(5, 900),
    "pieces": torch.cat([torch.arange(400), torch.arange(9), torch.full((300,), 7)]),
    "ids": torch.randint(0, 150_000, (300,), generator=torch.Generator().manual_seed(1)),
    "large": torch.tensor([-(2**63), 2**63 - 1, 0] * 9),
    "int32": torch.tensor([-(2**31), 2**31 - 1, 5], dtype=torch.int32).repeat_interleave(40),
    "floats": torch.randn(99, generator=torch.Generator().manual_seed(2)),
    "runs": torch.tensor([0.0, -0.0, float("nan"), 1 / 3, float("-inf")]).repeat_interleave(50),
    "wide": torch.ones(30, 4, dtype=torch.int64),
    "bytes": torch.randint(0, 255, (20, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(3)),
    "bool": torch.tensor([True, False, True]),
    "double": torch.tensor([1 / 3, 2.0], dtype=torch.float64),
    "one": torch.tensor(3),
    "empty": torch.empty(0, dtype=torch.int64),
}


def bits(x: torch.Tensor) -> bytes:
    return x.numpy().tobytes()


@pytest.mark.parametrize("name", COLUMNS)
def test_what_is_sent_comes_bit_for_bit(name: str) -> None:
    given = COLUMNS[name]
    for x in (given, given[1::2] if given.dim() else given):
        found = restored(*columns(x.numpy()))
        assert (found.dtype, found.shape, bits(found)) == (x.dtype, x.shape, bits(x))
        (again,) = pickle.loads(bytes(written([x]).numpy()))
        assert bits(again) == bits(x)


def same(one: Any, other: Any) -> bool:
    return bytes(written([one]).numpy()) == bytes(written([other]).numpy())


def work(shares: int) -> Shared[Batch]:
    samples = groups(3, count=16)
    return Shared(pack(samples, [0.1] * len(samples), 60, parts=shares))


class Counter:
    """What a rank has been called with; `seen` by each call."""

    def __init__(self) -> None:
        self.seen: list[list[Batch]] = []

    def take(self, batches: Sequence[Batch], others: Sequence[int]) -> int:
        assert len(batches) == len(others)
        self.seen.append(list(batches))
        return len(self.seen)


def logprobs(batch: Batch) -> torch.Tensor:
    return batch.logprobs


def calls(ranks: Ranks) -> tuple[list[list[bytes]], int, int]:
    """A list is sent with two calls, and another with the third. What the rank computes in each, the bytes that came to
    it one by one, and how many lists it holds in the end."""
    crew, worker = RankGroup(ranks), Counter()
    forward = crew.each(logprobs)
    with Traffic() as traffic:
        if crew.leads:
            first = work(ranks.shares)
            numbers = Shared(range(len(first)))
            for _ in range(2):
                assert crew.call(worker, Counter.take, first, numbers) == len(worker.seen)
            result = forward(first)
            assert all(map(torch.equal, result, [b.logprobs for b in first]))
            held = first[:]
            del first, numbers
            second = Shared(held[::-1])
            crew.call(worker, Counter.take, second, second)
            crew.call(worker, Counter.take, second, Shared(range(len(second))))
            crew.call(worker, Counter.take, second, second)
            crew.close()
        else:
            with ThreadPoolExecutor(1) as compute:
                crew.follow(worker, compute)
    mine = [[bytes(written([batch]).numpy()) for batch in ranks.mine(seen)] for seen in worker.seen]
    return mine, traffic.bytes["receive"], len(crew._held)


@pytest.mark.parametrize("grid", [Grid(ddp=2), Grid(fsdp=2, cp=2)], ids=str)
def test_each_rank_is_sent_its_own_once(grid: Grid) -> None:
    batches, peers = work(grid.ddp * grid.fsdp), grid.cp * grid.tp
    shares = grid.size // peers
    for rank, (mine, came, held) in enumerate(on_ranks(grid, calls)):
        for seen, order in zip(mine, (batches, batches, *[batches[::-1]] * 3), strict=True):
            assert seen == [bytes(written([b]).numpy()) for b in order[rank // peers :: shares]]
        if rank == 0:
            assert came == 0 and held == 0
        else:
            part = [len(written(order[rank // peers :: shares])) for order in (batches, batches[::-1])]
            assert 0 <= came - sum(part) < 400  # the numbers, and how long each is
            assert held == 1  # what rank 0 has dropped is gone: two lists, and the numbers that the third one came with


def conversations(count: int = 4, answers: int = 8, turns: int = 3) -> list[Group]:
    """Long prompts, and answers of several turns, of which each prompt has all that came before."""
    draw = np.random.default_rng(0)

    def ids(n: int) -> np.ndarray:
        return draw.integers(3, 150_000, n, dtype=np.int32)

    result = []
    for index in range(count):
        beginning, trajectories = ids(400), []
        for _ in range(answers):
            prompt, own = beginning, []
            for _ in range(turns):
                n = int(draw.integers(60, 160))
                logprobs = -draw.random(n, dtype=np.float32)
                told = Completion(tokens=ids(n), logprobs=logprobs, versions=np.zeros(n, np.int32), stop=Stop.STOP)
                own.append(Turn(prompt=prompt, completion=told))
                prompt = np.concatenate([prompt, told.tokens, ids(20)])
            reward = random.Random(len(trajectories)).random()
            trajectories.append(Trajectory(turns=tuple(own), reward=reward, score=reward, outcome=Outcome.OK))
        task = Task(id=f"rows:{index}", prompt=(Message(role="user", content="What is 2 + 2? " * 20),), answer="4")
        result.append(Group(index=index, task=task, trajectories=tuple(trajectories), start_version=0))
    return result


@pytest.mark.parametrize("shares", [2, 8])
def test_a_step_takes_less_than_its_groups(shares: int) -> None:
    """Until 0.9 every rank was sent all groups, and packed all of them."""
    told = conversations()
    samples = [s for g in told for i, t in enumerate(g.trajectories) for s in assemble.samples(t, 0.5, g.index, i)]
    samples = [replace(s, advantage=0.1 * i) for i, s in enumerate(samples)]
    batches = pack(samples, [1 / len(samples)] * len(samples), 4096, parts=shares)
    parts = [len(written(batches[share::shares])) for share in range(1, shares)]
    trained = sum(len(b.entry) for b in batches)
    assert sum(parts) < 16 * trained * (shares - 1) / shares * 1.3
    before = len(pickle.dumps(told)) * (shares - 1)
    print(f"\n{shares} shares, {trained:,} trained tokens: {before:,} bytes before, {sum(parts):,} now")
    assert sum(parts) < before / (1.5 * shares)


def test_few_runs_are_short() -> None:
    x = torch.arange(1000).repeat_interleave(FEW + 1)
    assert len(written([x])) < 3000 + 300 and len(written([x[:: FEW + 1] % 7])) < 1300


def steps_on_rows(ranks: Ranks, model: Path, command: str, folder: Path) -> tuple[int, list[int], list[float]]:
    """Two optimizer steps and a validation of a run that has 480 rows. The bytes that rank 0 sent to this rank; of
    each verb those of its own micro-batches; the losses that rank 0 tells."""
    rows = offline.TEXTS if command == "sft" else offline.PAIRS
    words = [f"model.path={model}", "model.dtype=float32", "data.train=[given]", f"run={folder}", "threads=1"]
    config: Any = load(schema.TRAINING[command], [*words, f"parallel.ddp={ranks.shares}"])
    crew, own, losses = RankGroup(ranks), list[int](), list[float]()
    with Traffic() as traffic, ThreadPoolExecutor(1) as compute:
        policy = load_policy(config.model, compute, ranks)
        worker = build_rows.worker_of(config, policy, crew, folder)

        def noted(verb: Any, work: list[tuple[Batch, Any]], stats: Any) -> None:
            own.append(len(written([batch for batch, _ in ranks.mine(work)])))
            verb(work, stats)

        learner: Any = worker.learner
        learner.learn, learner.survey = partial(noted, learner.learn), partial(noted, learner.survey)
        if crew.leads:
            examples = list(load_examples(config.data, "train", chat=policy.chat, limit=512, given=rows * 40)[0])
            crew.call(worker, build_rows.RowsWorker.begin, folder)
            worker.total_updates = 2
            worker.objective.prepare(None, examples)
            losses = [worker.learn(examples[start : start + 6]).loss for start in (0, 6)]
            losses.append(worker.survey(examples[:6]).loss)
            crew.close()
        else:
            crew.follow(worker, compute)
    return traffic.bytes["receive"] + traffic.bytes["broadcast"], own, losses


@pytest.mark.parametrize("command", ["sft", "rm", "dpo"])
def test_rows_stay_with_rank_0(tiny: Path, tmp_path: Path, command: str) -> None:
    """Every rank was sent all rows of the run and those of each step, and packed these: 30 times as many bytes here."""
    (_, _, losses), (came, own, _) = on_ranks(Grid(ddp=2), steps_on_rows, tiny, command, tmp_path, timeout=300)
    assert len(own) == len(losses) == 3
    print(f"\n{command}: {came:,} bytes came, {sum(own):,} of them micro-batches")
    assert 0 < came - sum(own) < 3 * 2000  # what is called, and what a loss must know


def passes_over(ranks: Ranks, model: Path, folder: Path) -> list[int]:
    """Three passes over two parts of a batch: what rank 0 sent this rank before each gradient."""
    words = [f"model.path={model}", "model.dtype=float32", "env=addition", f"run={folder}", "threads=1"]
    words += [f"parallel.ddp={ranks.shares}", "algorithm.passes=3", "algorithm.updates_per_batch=2"]
    words += ["learner.max_logprob_gap=100"]  # log-probs are made up
    crew, came = RankGroup(ranks), list[int]()
    with Traffic() as traffic, ThreadPoolExecutor(1) as compute:
        config = load(schema.RL, words)
        worker = build_worker.worker_of(config, load_policy(config.model, compute, ranks), crew, folder)
        learner: Any = worker.learner
        learn = learner.learn

        def noted(*words: Any) -> None:
            came.append(traffic.bytes["receive"])
            learn(*words)

        learner.learn = noted
        if crew.leads:
            worker.total_updates, samples = 6, groups(3, count=16)
            stats = worker.update([replace(s, advantage=1.0 - i % 3) for i, s in enumerate(samples)])
            assert stats.updates == 6
            crew.close()
        else:
            crew.follow(worker, compute)
    return came


def test_passes_have_the_micro_batches_of_the_first(tiny: Path, tmp_path: Path) -> None:
    _, came = on_ranks(Grid(ddp=2), passes_over, tiny, tmp_path, timeout=300)
    second, *others = np.diff(came).tolist()
    print(f"\n{came}")
    assert min(came[0], second) > 1000 and all(more < 300 for more in others)
