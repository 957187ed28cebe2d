import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birl.data.pack import balance, pack
from birl.errors import BirlError
from birl.types import Sample


def make(prompt: tuple[int, ...], answer: tuple[int, ...], group: int, episode: int, advantage: float = 1.0) -> Sample:
    mask = (False,) * len(prompt) + (True,) * len(answer)
    return Sample(
        tokens=prompt + answer,
        mask=mask,
        logprobs=tuple(-float(i) if m else 0.0 for i, m in enumerate(mask)),
        versions=tuple(0 if m else -1 for m in mask),
        advantage=advantage,
        group=group,
        episode=episode,
    )


def groups(seed: int, count: int = 4, size: int = 3) -> list[Sample]:
    rng = random.Random(seed)

    def ids(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, 300) for _ in range(rng.randint(low, high)))

    found = []
    for group in range(count):
        prompt = ids(2, 9)
        found += [make(prompt, ids(1, 7), group, e, rng.uniform(-1, 1)) for e in range(size)]
    return found


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(16, 80))
def test_every_trained_token_is_there_once_with_the_token_before_it(seed: int, capacity: int) -> None:
    samples = groups(seed)
    batches = pack(samples, [0.25] * len(samples), capacity)
    seen = []
    for batch in batches:
        assert len(batch.tokens) <= capacity
        assert sum(p + sum(b) for p, b in batch.trees) == len(batch.tokens)
        for n in range(len(batch.targets)):
            source, sample = int(batch.source[n]), int(batch.sample[n])
            place = int(batch.positions[source]) + 1
            assert samples[sample].tokens[place - 1] == int(batch.tokens[source])
            assert samples[sample].tokens[place] == int(batch.targets[n])
            assert samples[sample].mask[place]
            assert samples[sample].logprobs[place] == float(batch.logprobs[n])
            seen.append((sample, place))
    expected = [(i, p) for i, s in enumerate(samples) for p, m in enumerate(s.mask) if m]
    assert sorted(seen) == expected


def test_a_prompt_is_packed_once_for_its_group() -> None:
    prompt = tuple(range(10, 30))
    samples = [make(prompt, (i + 3, 2), 0, i) for i in range(4)]
    (batch,) = pack(samples, [1.0] * 4, 64)
    assert len(batch.tokens) == 20 + 4 * 2
    assert batch.trees == ((20, (2, 2, 2, 2)),)
    assert batch.source.tolist() == [19, 20, 19, 22, 19, 24, 19, 26]


def test_a_shared_answer_token_stays_apart() -> None:
    """Both answers start with 7, but each has its own advantage: only the untrained prompt may be shared."""
    samples = [make((1, 2, 3), (7, 8), 0, 0, 1.0), make((1, 2, 3), (7, 9), 0, 1, -1.0)]
    (batch,) = pack(samples, [1.0, 1.0], 64)
    assert batch.trees == ((3, (2, 2)),)
    assert batch.advantages.tolist() == [1.0, 1.0, -1.0, -1.0]


def test_the_end_token_is_trained_although_it_is_the_pad_token() -> None:
    (batch,) = pack([make((1, 5), (6, 2), 0, 0)], [1.0], 64)
    assert batch.targets.tolist() == [6, 2]


def test_a_sample_that_fits_nowhere_is_refused_with_the_numbers() -> None:
    with pytest.raises(BirlError, match=r"30 tokens.* row of 20: learner.tokens_per_microbatch x parallel.cp"):
        pack([make(tuple(range(3, 31)), (5, 2), 0, 0)], [1.0], 20)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_bins_are_full_but_never_too_full(sizes: list[int]) -> None:
    bins = balance(sizes, 64)
    assert sorted(i for b in bins for i in b) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in b) <= 64 for b in bins)
    assert len(bins) <= 2 * -(-sum(sizes) // 64) + 1
