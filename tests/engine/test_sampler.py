import math
import random

import pytest
import torch

from birl import kernels
from birl.engine.sampler import sample
from birl.engine.truncation import limits_of, restrict, supports
from birl.types import SamplingParams


def params(**options: float) -> SamplingParams:
    return SamplingParams(max_tokens=8, **options)  # type: ignore[arg-type]


def restricted(logits: torch.Tensor, **options: float) -> torch.Tensor:
    """One row [V]."""
    limits = limits_of([params(**options)])
    return logits if limits is None else restrict(logits[None], limits)[0]


def reference_support(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The definition in plain Python floats."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    if top_k:
        order = order[:top_k]
    total = sum(math.exp(logits[i]) for i in order)
    kept, mass = [], 0.0
    for i in order:
        if mass >= top_p:
            break
        kept.append(i)
        mass += math.exp(logits[i]) / total
    return {i for i in kept if math.exp(logits[i]) >= min_p * math.exp(logits[order[0]])}


@pytest.mark.parametrize("seed", range(20))
def test_restrict_keeps_what_the_definition_keeps(seed: int) -> None:
    rng = random.Random(seed)
    logits = [rng.gauss(0, 2) for _ in range(30)]
    top_k, top_p, min_p = rng.choice([0, 1, 5]), rng.choice([1.0, 0.9, 0.3]), rng.choice([0.0, 0.05, 0.5])
    found = restricted(torch.tensor(logits, dtype=torch.float64), top_k=top_k, top_p=top_p, min_p=min_p)
    assert {i for i, v in enumerate(found.tolist()) if v > -math.inf} == reference_support(logits, top_k, top_p, min_p)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7, "temperature": 1.5}, {"min_p": 0.2}]
)
def test_frequencies_and_log_probs_belong_to_the_distribution(options: dict[str, float]) -> None:
    rows = 20_000
    logits = torch.randn(12, generator=torch.Generator().manual_seed(3)) * 1.5
    rng = random.Random(0)
    drawn = sample(logits.repeat(rows, 1), [params(**options)] * rows, [rng.random() for _ in range(rows)])
    tokens, logprobs = drawn.tokens, drawn.logprobs
    tempered = logits / options.get("temperature", 1.0)
    expected = restricted(tempered, **options).softmax(-1)
    torch.testing.assert_close(logprobs, expected.log()[tokens], atol=1e-5, rtol=1e-5)
    frequency = torch.bincount(tokens, minlength=12) / rows
    assert (frequency - expected).abs().max() < 4 * (0.25 / rows) ** 0.5
    assert (frequency[expected == 0] == 0).all()


@pytest.mark.parametrize("k", [None, kernels.load(torch.float32, 64)])
def test_a_row_is_the_same_alone_and_among_others(k: kernels.Kernels | None) -> None:
    """With other limits, with none, or greedy."""
    options: list[dict[str, float]] = [
        {"top_k": 3}, {}, {"top_p": 0.6, "temperature": 0.7}, {"temperature": 0}, {"min_p": 0.3, "top_p": 0.9},
        {"temperature": 0, "top_k": 5}, {"temperature": 1.3},
    ]  # fmt: skip
    logits = torch.randn(7, 500, generator=torch.Generator().manual_seed(5)).mul(3).round()  # many ties
    rows, uniforms = [params(**o) for o in options], [0.1 * i + 0.3 for i in range(7)]
    together = sample(logits.clone(), rows, uniforms, k)[:2]
    for i in range(7):
        alone = sample(logits[i : i + 1].clone(), rows[i : i + 1], uniforms[i : i + 1], k)[:2]
        assert [x[i] for x in together] == [x[0] for x in alone]


def test_of_equal_words_the_first_are_kept() -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0, 1.0])
    for options, expected in (
        ({"top_k": 4}, [0, 1, 2, 3]),
        ({"top_p": 0.65}, [0, 1, 3]),
        ({"min_p": 0.3}, list(range(6))),
    ):
        assert restricted(logits, **options).isfinite().nonzero()[:, 0].tolist() == expected


def test_greedy_takes_the_likeliest_and_leaves_its_neighbours_alone() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)
    tokens, logprobs, _ = sample(
        logits.clone(), [params(temperature=0), params(), params(temperature=0)], [0.99, 0.5, 0.0]
    )
    assert tokens[0] == expected[0].argmax() and tokens[2] == expected[2].argmax()
    torch.testing.assert_close(logprobs, expected.gather(1, tokens[:, None])[:, 0])


@pytest.mark.parametrize("k", [None, kernels.load(torch.float32, 64)])
def test_rows_that_ask_are_told_what_they_were_drawn_from(k: kernels.Kernels | None) -> None:
    """By the definition in plain floats, with ties; a row that leaves nothing out, is greedy or does not ask is told
    nothing, and an impossible word is in no support."""
    rng = random.Random(3)
    options: list[dict[str, float]] = [
        {"top_k": 5, "temperature": 0.7}, {"top_k": 30, "top_p": 0.9}, {"top_k": 30, "min_p": 0.2}, {"top_k": 40},
        {"top_k": 1}, {"top_k": 9, "top_p": 0.6, "min_p": 0.05, "temperature": 1.5},
    ]  # fmt: skip
    rows = [params(support=True, **o) for o in options]
    silent = [params(), params(temperature=0, top_k=3, support=True), params(top_k=4)]
    logits = torch.tensor([[round(rng.gauss(0, 2)) * 1.0 for _ in range(40)] for _ in range(9)])
    logits[:, 17] = -math.inf
    result = sample(logits.clone(), [*rows, *silent], [rng.random() for _ in range(9)], k)
    told = supports(result.kept, [*rows, *silent])
    assert told[6:] == [None] * 3
    for row, o, own, token in zip(logits.tolist(), options, told, result.tokens.tolist(), strict=False):
        assert own is not None and token in own
        tempered = [x / o.get("temperature", 1.0) for x in row]
        wanted = reference_support(tempered, int(o["top_k"]), o.get("top_p", 1.0), o.get("min_p", 0.0))
        assert own.tolist() == sorted(wanted - {17})


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_interval_never_pick_an_impossible_token(uniform: float) -> None:
    logits = torch.full((1, 1000), -math.inf)
    logits[0, 300] = logits[0, 600] = 0.0
    tokens = sample(logits, [params()], [uniform]).tokens
    assert int(tokens[0]) in (300, 600)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("k", [None, kernels.load(torch.float32, 64)])
def test_what_is_drawn_from_no_numbers_says_so(k: kernels.Kernels | None, temperature: float) -> None:
    logits = torch.zeros(2, 40)
    logits[1] = torch.nan
    logprobs = sample(logits, [params(temperature=temperature)] * 2, [0.5, 0.5], k).logprobs
    assert logprobs.isnan().tolist() == [False, True]
