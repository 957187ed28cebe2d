"""The sampling kernel draws what its definition says: on a GPU, or without one in Triton's interpreter (pip install
triton; TRITON_INTERPRET=1 python -m pytest tests/models/test_sampling.py)."""

import math
import os
from typing import Any

import pytest
import torch
from torch import Tensor

from birl.engine.sampler import draw, given
from birl.engine.truncation import BLOCK, CHUNK, launch_sample, limits_of, restrict
from birl.models import fused
from birl.types import SamplingParams

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
runs = fused.has_triton() and (CUDA or bool(os.environ.get("TRITON_INTERPRET")))
pytestmark = pytest.mark.skipif(not runs, reason="no Triton with a GPU or TRITON_INTERPRET=1")


def params(**options: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **options)


def limited(rows: int, **options: Any) -> Tensor:
    limits = limits_of([params(**options)])
    assert limits is not None
    return limits.expand(rows, 3).to(DEVICE)


def normal(words: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(1, words, generator=torch.Generator().manual_seed(seed))


def holes(words: int) -> Tensor:
    """Every third word is impossible."""
    logits = normal(words)
    logits[:, ::3] = -math.inf
    return logits


ROWS = {
    "odd": normal(1001),
    "262,144 words": normal(262_144),
    "one block": normal(8192, scale=5.0),
    "one word more than two blocks": normal(16_385),
    "many ties": normal(3000).round(),
    "all equal": torch.full((1, 777), 3.0),
    "zeros of both signs": torch.tensor([[0.0, -0.0, 1e-38, -0.0, 0.0, -1e-38, 0.0]]),
    "impossible words": holes(1000),
    "masked by a number": holes(1000).clamp(min=torch.finfo(torch.float32).min),
    "one possible word": torch.tensor([[-math.inf] * 40 + [2.0] + [-math.inf] * 3]),
    "far apart": torch.tensor([[1e4, 0.0, 1e4, -1e30, 9999.0]]),
    "one word": torch.tensor([[0.3]]),
}  # fmt: skip
LIMITS: list[dict[str, float]] = [
    {"top_k": 1}, {"top_k": 50}, {"top_k": 10**6}, {"top_p": 1e-6}, {"top_p": 0.3}, {"top_p": 0.95}, {"min_p": 0.1},
    {"min_p": 1.0}, {"top_k": 20, "top_p": 0.81}, {"top_k": 300, "top_p": 0.9999, "min_p": 0.01},
]  # fmt: skip


def kept(logits: Tensor, options: dict[str, float]) -> Tensor:
    """Which words the kernels keep, [V]."""
    words, one = logits.shape[1], torch.ones(1, device=DEVICE)
    _, _, told = launch_sample(logits.to(DEVICE), one, one / 2, limited(1, **options), room=words)
    assert told is not None
    result = torch.zeros(words, dtype=torch.bool)
    result[told[0, 1 : 1 + told[0, 0]].cpu().long()] = True
    return result


CASES = [(name, options) for name in ROWS for options in LIMITS if ROWS[name].shape[1] < 2**18 or len(options) > 2]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_what_is_kept_is_the_definitions(name: str, options: dict[str, float]) -> None:
    """In float64, by sorting; but for words that are never drawn."""
    logits = ROWS[name]
    drawn = logits.double().softmax(-1)[0] > 1e-40
    expected = restrict(logits.double(), limited(1, **options).cpu().double())[0] > -math.inf
    assert torch.equal(kept(logits, options) & drawn, expected & drawn)


@pytest.mark.parametrize("words", [20_000, 50_257])
def test_the_kernel_draws_the_same(words: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(16, words, generator=generator)).to(DEVICE)
    asked = [
        params(temperature=0.0), params(temperature=0.7), params(), params(temperature=1.3),
        params(top_p=0.9), params(temperature=0.6, top_k=40), params(min_p=0.02, top_p=0.99),
        params(temperature=0.0, top_k=3),
    ] * 2  # fmt: skip
    temperatures = torch.tensor([p.temperature for p in asked], device=DEVICE)
    uniforms = torch.rand(16, generator=generator)
    uniforms[[1, 12]], uniforms[[2, 13]] = 0.0, 1 - 2**-24
    limits = limits_of(asked)
    assert limits is not None
    tempered = (logits / temperatures.where(temperatures > 0, 1.0)[:, None]).double()
    for with_limits in (False, True):
        use = limits.to(DEVICE) if with_limits else None
        room = 64 if with_limits else 0
        tokens, logps, told = launch_sample(logits.clone(), temperatures, uniforms.to(DEVICE), use, room=room)
        expected = tempered if use is None else restrict(tempered, use.double())
        if told is not None:
            for row, own in zip(told.tolist(), expected, strict=True):  # of many words rounding decides about the last
                words = (own > -math.inf).nonzero()[:, 0].tolist()
                assert abs(row[0] - len(words)) <= (2 if len(words) > room else 0)
                assert row[1 : 1 + row[0]] == words or len(words) > room
        expected = expected.log_softmax(-1)
        torch.testing.assert_close(logps.double(), expected.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5)
        greedy = temperatures == 0
        assert (tokens[greedy] == logits[greedy].argmax(-1)).all()
        upper = expected.exp().cumsum(-1).gather(1, tokens[:, None])[:, 0]
        lower = upper - logps.double().exp()
        u = uniforms.to(DEVICE).double()
        assert ((u >= lower - 1e-5) & (u <= upper + 1e-5))[~greedy].all()


def test_given_tokens_get_the_log_probs_of_drawn_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("birl.engine.sampler.on_gpu", lambda x: True)
    logits = normal(500).to(DEVICE)
    asked = params(temperature=0.8, top_p=0.7)
    drawn, logps, _ = draw(
        logits.repeat(9, 1), torch.full((9,), 0.8, device=DEVICE), torch.rand(9, device=DEVICE), limited(9, top_p=0.7)
    )
    assert torch.equal(given(logits.repeat(9, 1), drawn.tolist(), asked), logps)
    assert given(logits, [int(logits.argmin())], asked).tolist() == [-math.inf]


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    """Nor on whether the batch has limits; and a token that is given has the log-prob with which it is drawn."""
    words, generator = 10_007, torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(6, words, generator=generator)).to(DEVICE)
    asked = [params(), params(top_p=0.9), params(top_k=30, top_p=0.8), params(min_p=0.01), params(), params(top_k=9000)]
    limits, uniforms = limits_of(asked), torch.rand(6, generator=generator).to(DEVICE)
    assert limits is not None
    limits, ones = limits.to(DEVICE), torch.full((6,), 0.7, device=DEVICE)
    tokens, logps, _ = launch_sample(logits, ones, uniforms, limits)
    for row, each in enumerate(asked):
        here, own = slice(row, row + 1), None if each.plain else limits[row : row + 1]
        token, logp, _ = launch_sample(logits[here], ones[here], uniforms[here], own)
        assert torch.equal(token, tokens[here]) and torch.equal(logp, logps[here])
    assert torch.equal(launch_sample(logits, ones, None, limits, tokens)[1], logps)


@pytest.mark.parametrize(
    ("options", "most"), [({"top_k": 50}, 60), ({"top_p": 0.5}, 30), ({"min_p": 0.05}, 60), ({}, 0)], ids=str
)
def test_few_chunks_are_searched(options: dict[str, float], most: int) -> None:
    """Of a distribution as sharp as a model's; and all that is kept is in them."""
    from birl.models import sample_kernels

    logits, words = normal(151_936, scale=4.0).to(DEVICE), 151_936
    chunks, one = -(-words // CHUNK), torch.ones(1, device=DEVICE)
    peaks, masses, floats = (torch.zeros(1, n, device=DEVICE) for n in (chunks, chunks, 3))
    own, counts = (torch.zeros(1, n, dtype=torch.int32, device=DEVICE) for n in (chunks, 2))
    limits = limited(1, **options) if options else torch.tensor([[0.0, 1.0, -math.inf]], device=DEVICE)
    kernels: Any = sample_kernels
    kernels.chunks_kernel[(1, -(-words // BLOCK))](logits, one, peaks, masses, words, chunks, CHUNK=CHUNK, BLOCK=BLOCK)
    kernels.bound_kernel[(1,)](limits, peaks, masses, own, floats, counts, words, chunks, CHUNK=CHUNK, CHUNKS=4096)
    listed = set(own[0, : counts[0, 0]].tolist())
    assert len(listed) <= most
    if options:
        where = (restrict(logits.double(), limits.double())[0] > -math.inf).nonzero()[:, 0] // CHUNK
        assert set(where.tolist()) <= listed
