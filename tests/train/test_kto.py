"""KTO's reference point z = max(0, 1/m sum_i log pi(y_{i+1} | x_i) / pi_ref(y_{i+1} | x_i)), i + 1 modulo m
(arXiv:2402.01306 section 4.1; TRL 1.16: i - 1, within the batch of a device), against transformers and Python floats;
neither micro-batches nor ranks change it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from birl.config import schema
from birl.config.load import load
from birl.data.examples import Example, load_examples
from birl.learner.learner import Learner
from birl.learner.policy import load_policy
from birl.parallel.crew import RankGroup
from birl.parallel.ranks import Grid, Ranks
from birl.train.build_rows import preferences
from tests.parallel.processes import on_ranks

VOTES = [
    {"prompt": p, "completion": a, "label": bool(i % 2)}
    for i, (p, a) in enumerate(
        [
            ("What is 3 + 4?", "7"),
            ("What is 3 + 4?", "The sum of two numbers is what you get when you add them."),
            ("Anna", "has three apples"),
            ("What is 12 * 5? " * 6, "60"),
            ("Say yes.", "The answer is 60. " * 5),
        ]
    )
]
PAIRS = [{"prompt": f"What is {i} + 2?", "chosen": f"{i + 2}.", "rejected": "apples" * (i + 1)} for i in range(3)]
ROWS = {
    "one row": VOTES[:1],
    "two": VOTES[2:4],
    "odd": VOTES,
    "one prompt": [{**v, "prompt": "Anna"} for v in VOTES[:3]],
    "equal rows": [VOTES[1], VOTES[1], VOTES[2]],
    "pairs": PAIRS,
    "a vote and pairs": None,
}


def examples(policy: Any, config: schema.DPO, rows: list[dict[str, Any]] | None) -> list[Example]:
    if rows is None:
        return [*examples(policy, config, PAIRS[:1]), *examples(policy, config, VOTES[:2])]
    return list(load_examples(config.data, "train", policy.chat, config.model.max_length or 512, rows)[0])


def reference_points(ranks: Ranks, tiny: Path, scale: float, capacity: int, limit: int = 0) -> dict[str, float]:
    """What birl computes on rank 0 for each set of rows, with norms scaled in the policy but not in its reference."""
    words = [f"model.path={tiny}", "model.dtype=float32", "data.train=[given]", "preference.loss=kto", "threads=1"]
    words += [f"learner.tokens_per_microbatch={capacity}", f"model.max_length={limit}"]
    words += [f"parallel.ddp={ranks.grid.ddp}", f"parallel.fsdp={ranks.grid.fsdp}"]
    config = load(schema.DPO, words)
    with ThreadPoolExecutor(1) as pool:
        policy, crew = load_policy(config.model, pool, ranks), RankGroup(ranks)
        learner, objective = preferences(config, policy, crew)
        scaled(learner, scale)
        if ranks.rank:
            crew.follow(None, pool)
            return {}
        points: Any = objective
        result = {name: points._divergence(examples(policy, config, rows)) for name, rows in ROWS.items()}
        crew.close()
        return result


def scaled(learner: Learner, scale: float) -> None:
    for name, tensor in learner.masters.tensors.items():
        tensor.data.mul_(scale if "norm" in name else 1.0)
    learner.loaded(1)


def by_definition(tiny: Path, scale: float, limit: int = 512) -> dict[str, float]:
    """Unclipped means, by loops over tokens."""
    config = load(schema.DPO, [f"model.path={tiny}", "data.train=[given]", "preference.loss=kto"])
    with ThreadPoolExecutor(1) as pool:
        policy = load_policy(config.model, pool)
    models = [AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32) for _ in range(2)]
    for name, tensor in models[0].named_parameters():
        tensor.data.mul_(scale if "norm" in name else 1.0)
    result = {}
    for case, rows in ROWS.items():
        read, ratios = examples(policy, config, rows), []
        for i, row in enumerate(read):
            other = read[(i + 1) % len(read)]
            for side, own in enumerate(row.sequences):
                answered = other.sequences[min(side, len(other.sequences) - 1)]
                prompt, start = list(own.ids)[: own.mask.index(1)], answered.mask.index(1)
                ids, learned = (prompt + list(answered.ids)[start:])[:limit], answered.mask[start:]
                with torch.no_grad():
                    tables = [
                        m(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1).tolist() for m in models
                    ]
                total = 0.0
                for at in range(len(prompt), len(ids)):
                    if learned[at - len(prompt)]:
                        total += tables[0][at - 1][ids[at]] - tables[1][at - 1][ids[at]]
                ratios.append(total)
        result[case] = sum(ratios) / len(ratios) if len(read) > 1 else 0.0
    return result


@pytest.mark.parametrize("scale", [0.7, 1.2])
def test_the_reference_point_is_the_papers(tiny: Path, scale: float) -> None:
    wanted = by_definition(tiny, scale)
    assert all(abs(z) > 0.1 for case, z in wanted.items() if case != "one row")
    got = reference_points(Ranks(), tiny, scale, 4096)
    assert got == pytest.approx({case: max(0.0, z) for case, z in wanted.items()}, abs=1e-3, rel=1e-5)


def test_micro_batches_that_hold_no_mixture_change_nothing(tiny: Path) -> None:
    whole = reference_points(Ranks(), tiny, 0.7, 4096)
    assert reference_points(Ranks(), tiny, 0.7, 64) == pytest.approx(whole, abs=1e-4, rel=1e-5)


def test_a_mixture_beyond_max_length_is_cut(tiny: Path) -> None:
    """128: the longest row fits, but not the prompt of the fourth with the answer of the fifth."""
    wanted = {case: max(0.0, z) for case, z in by_definition(tiny, 0.7, limit=128).items()}
    assert wanted["odd"] != pytest.approx(max(0.0, by_definition(tiny, 0.7)["odd"]), abs=1e-2)
    assert reference_points(Ranks(), tiny, 0.7, 4096, limit=128) == pytest.approx(wanted, abs=1e-3, rel=1e-5)


@pytest.mark.parametrize("grid", [Grid(ddp=2), Grid(fsdp=2)], ids=str)
def test_ranks_change_nothing(tiny: Path, grid: Grid) -> None:
    alone = reference_points(Ranks(), tiny, 0.7, 128)
    got = on_ranks(grid, reference_points, tiny, 0.7, 128)[0]
    assert got == pytest.approx(alone, abs=1e-4, rel=1e-5)
