import numpy as np
import pytest

from birl.view.curve import sampled, span


def test_a_short_curve_is_sent_as_it_is() -> None:
    x, y = np.arange(5.0), np.array([1, np.nan, 3, 4, 123456.789])
    found = sampled(x, y, low=0, high=4, width=10)
    np.testing.assert_array_equal(found["x"], [0, 2, 3, 4])
    np.testing.assert_array_equal(found["y"], [1, 3, 4, 123457])
    assert set(found) == {"x", "y"}


def test_a_long_curve_keeps_every_peak() -> None:
    x, y = np.arange(100_000.0), np.zeros(100_000)
    y[77_777], y[12] = 5, -3
    found = sampled(x, y, low=0, high=99_999, width=600)
    assert len(found["x"]) == 600 and found["n"].sum() == 100_000
    assert found["max"].max() == 5 and found["min"].min() == -3
    assert np.all(np.diff(found["x"]) > 0)
    np.testing.assert_allclose((found["y"] * found["n"]).sum(), y.sum(), atol=1e-3)


def test_a_zoom_has_a_neighbour_at_each_side() -> None:
    x = np.arange(0, 100, 10.0)
    found = sampled(x, x, low=25, high=55, width=100)
    np.testing.assert_array_equal(found["x"], [20, 30, 40, 50, 60])
    assert sampled(x, x, low=200, high=300, width=100)["x"].tolist() == [90]


def test_the_neighbours_of_a_long_curve_are_points_of_their_own() -> None:
    x = np.append(np.arange(1000.0), 5000)
    found = sampled(x, x, low=100, high=1000, width=100)
    assert (found["x"][0], found["n"][0], found["x"][-1], found["n"][-1]) == (99, 1, 5000, 1)
    assert found["max"][-2] == 999 and found["n"].sum() == 902


@pytest.mark.parametrize("y", [[], [np.nan], [np.inf, -np.inf]])
def test_nothing_to_draw(y: list[float]) -> None:
    assert len(sampled(np.arange(len(y)), np.array(y), low=0, high=1, width=10)["x"]) == 0
    assert span(np.array(y)) is None


def test_an_x_that_falls_is_put_in_order() -> None:
    found = sampled(np.array([3.0, 1, 2]), np.array([30.0, 10, 20]), low=0, high=9, width=10)
    np.testing.assert_array_equal(found["y"], [10, 20, 30])


def test_tiny_and_huge_values_keep_their_digits() -> None:
    y = np.array([1.23456789e-300, 1.23456789e300, 0.0, -9.87654321e-9])
    found = sampled(np.arange(4.0), y, low=0, high=3, width=10)
    np.testing.assert_allclose(found["y"], y, rtol=1e-5)
