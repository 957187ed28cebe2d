import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from birl.data.pack import pack
from birl.data.trees import Tree, ways
from birl.errors import BirlError
from birl.models.attention import places
from birl.samples import Support
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


def drawn(samples: list[Sample], seed: int = 0, words: int = 300) -> list[Sample]:
    """With supports: what every trained token was drawn from, 1 to 40 words and itself; a third of the samples has
    none, and some tokens of the others were drawn from all words."""
    rng, result = random.Random(seed), []
    for number, sample in enumerate(samples):
        rows = [
            None if rng.random() < 0.2 else np.array(sorted({token, *rng.sample(range(words), rng.randint(1, 40))}))
            for token in sample.tokens[sample.mask].tolist()
        ]
        result.append(replace(sample, support=Support.of(rows) if number % 3 else None))
    return result


def branched(seed: int, count: int = 12, longest: int = 14, words: int = 2) -> list[Sample]:
    """Sequences of few words, so that they part at every depth, end within others, and are there twice; any of their
    tokens may be trained."""
    rng, result = random.Random(seed), []
    for episode in range(count):
        tokens = [rng.randrange(3, 3 + words) for _ in range(rng.randint(1, longest))]
        mask = [False, *(rng.random() < 0.6 for _ in tokens[1:])]
        result.append(
            Sample(
                tokens=np.array(tokens, np.int32),
                mask=np.array(mask, np.bool_),
                logprobs=np.array([-rng.random() if m else 0.0 for m in mask], np.float32),
                versions=np.array([0 if m else -1 for m in mask], np.int32),
                advantage=rng.uniform(-1, 1),
                group=episode // 3,
                episode=episode,
            )
        )
    return result


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10**6), st.integers(16, 80), st.integers(1, 3), st.sampled_from([groups, branched]))
def test_every_trained_token_is_there_once_with_all_that_came_before(
    seed: int, capacity: int, parts: int, make_samples: Callable[[int], list[Sample]]
) -> None:
    samples = make_samples(seed)
    batches = pack(samples, [0.25] * len(samples), capacity, parts)
    assert len(batches) % parts == 0
    seen, copies = [], 0.0
    for batch in batches:
        assert len(batch.tokens) == sum(map(len, batch.trees)) <= capacity
        assert batch.positions.tolist() == [p for tree in batch.trees for p in tree.positions()]
        assert len(set(zip(batch.source.tolist(), batch.targets.tolist(), strict=True))) == len(batch.source)
        copies += batch.copies.sum().item()
        before = {node.first + i: places(way)[: -node.count + i + 1 or None] for node, way in ways(batch.trees)
                  for i in range(node.count)}  # fmt: skip
        for n, entry in enumerate(batch.entry.tolist()):
            source, sample = int(batch.source[entry]), int(batch.sample[n])
            at = len(before[source])
            assert batch.tokens[before[source]].tolist() == samples[sample].tokens[:at].tolist()
            assert samples[sample].tokens[at] == int(batch.targets[entry]) and samples[sample].mask[at]
            assert samples[sample].logprobs[at] == batch.logprobs[n] and samples[sample].group == int(batch.group[n])
            seen.append((sample, at))
    assert seen and sorted(seen) == [(i, p) for i, s in enumerate(samples) for p, m in enumerate(s.mask) if m]
    assert copies == sum(len(s.tokens) for s in samples)


def test_what_begins_alike_is_packed_once() -> None:
    prompt = tuple(range(10, 30))
    samples = [make(prompt, (i + 3, 2), 0, i) for i in range(4)]
    (batch,) = pack(samples, [1.0] * 4, 64)
    assert len(batch.tokens) == 20 + 4 * 2
    assert batch.trees == (Tree.of(20, (2, 2, 2, 2)),)
    assert batch.source.tolist() == [19, 20, 19, 22, 19, 24, 19, 26]


def test_a_shared_answer_token_is_computed_once_and_trained_twice() -> None:
    samples = [make((1, 2, 3), (7, 8), 0, 0, 1.0), make((1, 2, 3), (7, 9), 0, 1, -1.0)]
    (batch,) = pack(samples, [1.0, 1.0], 64)
    assert batch.trees == (Tree.of(4, (1, 1)),) and batch.copies.tolist() == [2, 2, 2, 2, 1, 1]
    assert (batch.source.tolist(), batch.targets.tolist()) == ([2, 3, 3], [7, 8, 9])
    assert batch.entry.tolist() == [0, 1, 0, 2]
    assert batch.advantages.tolist() == [1.0, 1.0, -1.0, -1.0]


def test_branches_of_an_agent_share_all_turns_before_they_part() -> None:
    """Two episodes of the same task with a side branch each: four sequences, each turn once."""
    turns = [tuple(range(s, s + 8)) for s in range(10, 90, 8)]
    ways_ = [(0, 1, 2, 3), (0, 1, 4), (0, 5, 6), (0, 5, 7, 8)]
    samples = [make(turns[0], sum((turns[i] for i in way[1:]), ()), 0, n) for n, way in enumerate(ways_)]
    (batch,) = pack(samples, [1.0] * 4, 1000)
    assert batch.trees == (Tree.of(8, ((8, (16, 8)), (8, (8, 16)))),)
    cut = pack(samples, [1.0] * 4, 48)
    assert [b.trees for b in cut] == [(Tree.of(16, (16, 8)),), (Tree.of(16, (8, 16)),)]


def test_groups_that_begin_alike_are_computed_together_where_it_saves_enough() -> None:
    system = tuple(range(100, 160))
    samples = [make((*system, 3 + g), (9, g + 3, e + 3), g, e) for g in range(8) for e in range(2)]
    for parts in (1, 2):
        batches = pack(samples, [1.0] * 16, 120, parts)
        assert len(batches) == parts and all(len(b.trees) == 1 for b in batches)
        assert abs(len(batches[0].tokens) - len(batches[-1].tokens)) <= 10
    short = [make((100, 3 + g), tuple(range(30 + g, 70 + g)), g, 0) for g in range(8)]
    (batch,) = pack(short, [1.0] * 8, 1000)
    assert len(batch.trees) == 8


def test_tokens_that_other_experts_compute_are_not_the_same() -> None:
    one, other = (make((1, 2, 3), (7, 8), 0, e) for e in range(2))
    same = pack([replace(s, routes=bytes(range(10))) for s in (one, other)], [1.0, 1.0], 64)[0]
    apart = pack([replace(one, routes=bytes(10)), replace(other, routes=bytes(9) + b"x")], [1.0, 1.0], 64)[0]
    assert len(same.tokens) == 5 and apart.trees == (Tree.of(4, (1, 1)),)
    assert apart.routes is not None and apart.routes[:, 1].tolist() == [0, 0, 0, 0, 0, ord("x")]


def test_a_sample_that_fits_nowhere_is_refused_with_the_numbers() -> None:
    with pytest.raises(BirlError, match=r"30 tokens.* micro-batch of 20 \(learner.tokens_per_microbatch x parallel.cp"):
        pack([make(tuple(range(3, 31)), (5, 2), 0, 0)], [1.0], 20)


def test_what_a_served_teacher_says_is_in_the_order_of_trained_tokens() -> None:
    """Also of micro-batches that train nothing."""
    samples = []
    for number, s in enumerate(groups(0, count=2)):
        own = s.tokens[s.mask].astype(np.int64)
        words, logprobs = np.stack([own, own + 1], 1), np.full((len(own), 3), -float(number), np.float32)
        samples.append(replace(s, likely=(words, logprobs)))
    for batches in (pack(samples, [1.0] * 6, 500), pack(samples, [1.0] * 6, 25, parts=7)):
        for batch in batches:
            assert batch.likely is not None and batch.likely_logprobs is not None
            assert batch.likely.tolist() == [[t, t + 1] for t in batch.targets[batch.entry].tolist()]
            assert batch.likely_logprobs.tolist() == [[-float(n)] * 3 for n in batch.sample.tolist()]
            assert batch.entry.tolist() == list(range(len(batch.targets)))
