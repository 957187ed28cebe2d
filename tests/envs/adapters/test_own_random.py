"""Games that draw from the global generators have states of their own."""

import random
import threading

import numpy as np
import pytest

from birl.envs.adapters import package
from birl.envs.adapters.package import OwnRandom


def draw() -> tuple[float, float]:
    return random.random(), float(np.random.random())


def test_each_goes_on_where_it_was() -> None:
    def several(game: OwnRandom, n: int) -> list[tuple[float, float]]:
        found = []
        for _ in range(n):
            with game:
                found.append(draw())
        return found

    alone = several(OwnRandom(1), 4)
    one, other = OwnRandom(1), OwnRandom(2)
    mixed = [several(game, 1)[0] for _ in range(4) for game in (one, other)]
    assert mixed[::2] == alone and mixed[1::2] == several(OwnRandom(2), 4) != alone


def test_outside_nothing_changes_even_after_an_error() -> None:
    random.seed(5)
    np.random.seed(5)
    expected = draw()
    random.seed(5)
    np.random.seed(5)
    with pytest.raises(KeyError), OwnRandom(1):
        random.seed(9)
        raise KeyError
    assert draw() == expected
    with OwnRandom(1):  # it was given back
        pass


def test_a_game_that_hangs_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "WAIT", 0.1)
    inside, go = threading.Event(), threading.Event()

    def hang() -> None:
        with OwnRandom(1):
            inside.set()
            go.wait(10)

    thread = threading.Thread(target=hang)
    thread.start()
    assert inside.wait(10)
    try:
        with pytest.raises(RuntimeError, match=r"has not finished its move for 0\.1 s"), OwnRandom(2):
            pass
    finally:
        go.set()
        thread.join()
    with OwnRandom(2):
        pass
