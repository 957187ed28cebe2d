import random
from collections import Counter
from itertools import islice
from typing import Any

import pytest

from birl.config.schema import Data
from birl.data.rows import Rows
from birl.data.stream import BLOCK, Stream
from birl.data.tasks import Tasks, load_tasks
from birl.errors import BirlError
from birl.types import Task


def source(n: int, name: str = "x") -> Tasks:
    rows = [{"prompt": f"{name}{i}"} for i in range(n)]
    return load_tasks(Data(), "train", chat=False, given=rows)[0]


def names(stream: Any, n: int | None = None) -> list[str]:
    return [str(task.prompt) for task in islice(stream, n)]


def test_each_epoch_visits_each_row_once_in_a_new_order() -> None:
    sources = [source(7, "a"), source(12, "b")]
    everything = sorted(names([t for s in sources for t in s]))
    seen = names(Stream(sources, weights=[], seed=3, shuffle=True, epochs=3))
    epochs = [seen[:19], seen[19:38], seen[38:]]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert len({name[0] for name in epochs[0][:7]}) == 2


def test_the_last_partial_batch_is_not_dropped() -> None:
    assert len(names(Stream([source(10)], weights=[], seed=0, shuffle=True, epochs=1))) == 10


def test_without_shuffling_rows_come_in_order() -> None:
    stream = Stream([source(2, "a"), source(3, "b")], weights=[], seed=0, shuffle=False, epochs=2)
    assert names(stream) == ["a0", "a1", "b0", "b1", "b2"] * 2
    weighted = names(Stream([source(2, "a"), source(3, "b")], weights=[1, 1], seed=0, shuffle=False, epochs=8))
    assert [n for n in weighted if n[0] == "b"][:4] == ["b0", "b1", "b2", "b0"]


def test_the_seed_decides() -> None:
    def first(seed: int) -> list[str]:
        return names(
            Stream([source(50, "a"), source(50, "b")], weights=[1, 2], seed=seed, shuffle=True, epochs=None), 40
        )

    assert first(0) == first(0) != first(1)
    assert first(-1) == first(-1)


@pytest.mark.parametrize("weights", [[], [1.0, 1.0, 1.0], [0.2, 5.0, 1.0], [0.0, 1.0, 3.0]])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epochs", [None, 400])
def test_resume_at_any_point_equals_uninterrupted(weights: list[float], shuffle: bool, epochs: int | None) -> None:
    sources = [source(5, "a"), source(17, "b"), source(1, "c")]
    options: dict[str, Any] = {"weights": weights, "seed": 11, "shuffle": shuffle, "epochs": epochs}
    total = 2 * BLOCK + 100
    whole = names(Stream(sources, **options), total)
    rng = random.Random(0)
    for start in (0, 1, 22, 23, BLOCK - 1, BLOCK, BLOCK + 1, *(rng.randrange(total) for _ in range(15))):
        stream = Stream(sources, start=start, **options)
        assert stream.position == start
        ahead = min(60, total - start)
        assert names(stream, ahead) == whole[start : start + ahead]
        assert stream.position == start + ahead


def test_resume_at_and_behind_the_end() -> None:
    options: dict[str, Any] = {"weights": [], "seed": 0, "shuffle": True, "epochs": 2}
    assert names(Stream([source(4)], start=7, **options)) == names(Stream([source(4)], **options))[7:]
    assert names(Stream([source(4)], start=8, **options)) == []
    assert names(Stream([source(4)], start=9, **options)) == []


def test_weights() -> None:
    sources = [source(10, "a"), source(1000, "b"), source(3, "c")]
    stream = Stream(sources, weights=[3, 1, 0], seed=0, shuffle=True, epochs=None)
    drawn = names(stream, 8000)
    counts = Counter(name[0] for name in drawn)
    assert counts["a"] == pytest.approx(6000, rel=0.05) and counts["c"] == 0
    of_a = [name for name in drawn if name[0] == "a"]
    assert all(len(set(of_a[i : i + 10])) == 10 for i in range(0, 5000, 10))  # each of its epochs visits all of it


def test_an_epoch_with_weights_is_as_many_draws_as_rows() -> None:
    stream = Stream([source(10, "a"), source(30, "b")], weights=[1, 1], seed=0, shuffle=True, epochs=2)
    assert len(names(stream)) == 80


def test_skipping_reads_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = Rows.__getitem__
    tasks = source(100)

    def counted(self: Rows, index: int) -> dict[str, Any]:
        read.append(index)
        return original(self, index)

    monkeypatch.setattr(Rows, "__getitem__", counted)
    stream = Stream([tasks, tasks], weights=[1, 2], seed=0, shuffle=True, epochs=None, start=1_000_000)
    assert read == []
    assert isinstance(next(stream), Task) and len(read) == 1


def test_refused() -> None:
    full, empty = source(3), source(3).select([])
    options: dict[str, Any] = {"seed": 0, "shuffle": True, "epochs": 1}
    for sources, weights, what in (
        ([], [], "data.train"),
        ([full, empty], [], "no rows"),
        ([full], [1, 2], "2 values for 1"),
        ([full], [0], "not all 0"),
        ([full, full], [-1, 2], "from 0 up"),
        ([full, full], [float("nan"), 2], "from 0 up"),
    ):
        with pytest.raises(BirlError, match=what):
            Stream(sources, weights=weights, **options)
    with pytest.raises(ValueError):
        Stream([full], weights=[], start=-1, **options)
