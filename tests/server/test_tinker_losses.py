"""Each loss that a Tinker client names, against its formula in plain floats, values and gradients."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from birl.errors import BirlError
from birl.server.tinker import losses
from birl.server.tinker.requests import Datum, ForwardBackward

LOGP, OLD = [-0.5, -1.2, -2.5, -0.05, -3.0], [-0.7, -1.0, -0.9, -0.6, -3.0]
ADVANTAGES = [1.0, -0.5, 2.0, -1.0, 0.0]


def request(loss: str, config: dict[str, float | str] | None = None, **inputs: list) -> ForwardBackward:
    tokens = np.arange(5, dtype=np.int64)
    arrays = {"target_tokens": tokens} | {name: np.array(values, np.float32) for name, values in inputs.items()}
    data = [Datum(tokens=tokens, inputs=arrays)]
    return ForwardBackward(data=data, loss=loss, config=config or {}, forward_only=False)


def computed(asked: ForwardBackward, logp: list | None = None) -> tuple[float, list[float]]:
    losses.check(asked)
    leaf = torch.tensor(logp or LOGP, dtype=torch.float32, requires_grad=True)
    value = losses.of_data(asked, asked.data, [leaf[:, None] if leaf.ndim == 1 else leaf])
    value.backward()
    assert leaf.grad is not None
    return value.item(), leaf.grad.flatten().tolist()


def slope(function: Callable[[list[float]], float], at: list[float]) -> list[float]:
    """Numerically."""
    result, step = [], 1e-6
    for i in range(len(at)):
        above, below = (list(at) for _ in range(2))
        above[i] += step
        below[i] -= step
        result.append((function(above) - function(below)) / (2 * step))
    return result


def clipped(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def ppo(logp: list[float], low: float = 0.8, high: float = 1.2) -> float:
    pairs = [(math.exp(p - q), a) for p, q, a in zip(logp, OLD, ADVANTAGES, strict=True)]
    return -sum(min(r * a, clipped(r, low, high) * a) for r, a in pairs)


def dro(logp: list[float], beta: float = 0.05) -> float:
    return -sum(p * a - beta / 2 * (p - q) ** 2 for p, q, a in zip(logp, OLD, ADVANTAGES, strict=True))


def importance(logp: list[float]) -> float:
    return -sum(math.exp(p - q) * a for p, q, a in zip(logp, OLD, ADVANTAGES, strict=True))


GIVEN = {"logprobs": OLD, "advantages": ADVANTAGES}


@pytest.mark.parametrize(
    ("name", "config", "formula"),
    [
        ("importance_sampling", {}, importance),
        ("ppo", {}, ppo),
        ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}, lambda x: ppo(x, 0.5, 3.0)),
        ("dro", {}, dro),
        ("dro", {"beta": 0.4}, lambda x: dro(x, 0.4)),
    ],
)
def test_a_loss_that_is_a_function_is_its_formula(name: str, config: dict, formula: Callable) -> None:
    value, grad = computed(request(name, config, **GIVEN))
    assert value == pytest.approx(formula(LOGP), rel=1e-5)
    assert grad == pytest.approx(slope(formula, LOGP), abs=1e-4)


@pytest.mark.parametrize(("name", "low", "high"), [("cispo", 0.8, 1.2), ("stable_reinforce", 0.0, 1.0)])
def test_a_bounded_weight_has_no_gradient_of_its_own(name: str, low: float, high: float) -> None:
    value, grad = computed(request(name, **GIVEN))
    weights = [clipped(math.exp(p - q), low, high) * a for p, q, a in zip(LOGP, OLD, ADVANTAGES, strict=True)]
    assert value == pytest.approx(-sum(w * p for w, p in zip(weights, LOGP, strict=True)), rel=1e-5)
    assert grad == pytest.approx([-w for w in weights], abs=1e-5)


def test_stable_reinforce_pulls_towards_what_was_sampled_with() -> None:
    plain, pulled = (computed(request("stable_reinforce", c, **GIVEN))[1] for c in ({}, {"kl_coeff": 0.5}))
    distance = [0.5 * (p - q) * (a != 0) for p, q, a in zip(LOGP, OLD, ADVANTAGES, strict=True)]
    assert pulled == pytest.approx([g + d for g, d in zip(plain, distance, strict=True)], abs=1e-5)


def test_gspo_has_one_ratio_for_the_places_of_its_mask() -> None:
    mask = [0, 1, 1, 1, 0]
    asked = request("gspo", {"clip_low_threshold": 0.1, "clip_high_threshold": 9.0}, **GIVEN, sequence_ratio_mask=mask)
    value, grad = computed(asked)
    ratio = math.exp(sum(LOGP[i] - OLD[i] for i in (1, 2, 3)) / 3)
    assert value == pytest.approx(-sum(ratio * ADVANTAGES[i] for i in (1, 2, 3)), rel=1e-5)
    assert grad == pytest.approx([0, *(-ratio * ADVANTAGES[i] for i in (1, 2, 3)), 0], abs=1e-5)


@pytest.mark.parametrize("name", [n for n in losses.NAMES if n != "cross_entropy"])
def test_on_policy_the_gradient_is_reinforces(name: str) -> None:
    value, grad = computed(request(name, logprobs=LOGP, advantages=ADVANTAGES))
    assert math.isfinite(value)
    assert grad == pytest.approx([-a for a in ADVANTAGES], abs=1e-5)


@pytest.mark.parametrize("name", losses.NAMES)
def test_data_together_are_the_sum_of_each_alone(name: str) -> None:
    """Bounds, masks and weights that only some of them have."""
    random, data = np.random.default_rng(0), []
    takes = losses.POLICY[name].inputs if name in losses.POLICY else ("target_tokens", "weights")
    extra = ({}, {"sequence_ratio_mask": [0, 1, 1], "weights": [0.5, 0, 2]}, {"clip_low_threshold": [0.5] * 3})
    for size, more in zip((4, 3, 3), extra, strict=True):
        inputs = {key: random.normal(size=size).astype(np.float32) for key in ("logprobs", "advantages")}
        inputs |= {key: np.array(values, np.float32) for key, values in more.items()}
        inputs = {key: values for key, values in inputs.items() if key in takes}
        data.append(Datum(tokens=np.arange(size), inputs={"target_tokens": np.arange(size), **inputs}))
    rows = [torch.tensor(random.normal(size=(len(d), 1)), dtype=torch.float32) for d in data]
    config = {"stable_reinforce": {"kl_coeff": 0.3}, "ppo": {"clip_high_threshold": 1.5}}.get(name, {})

    def value(chosen: slice) -> float:
        asked = ForwardBackward(data=data[chosen], loss=name, config=config, forward_only=False)
        losses.check(asked)
        return losses.of_data(asked, asked.data, rows[chosen]).item()

    alone = [value(slice(i, i + 1)) for i in range(3)]
    assert value(slice(0, 3)) == pytest.approx(sum(alone), rel=1e-5)


def test_cross_entropy_takes_weights_of_every_target() -> None:
    tokens, targets = np.arange(2, dtype=np.int64), np.array([[1, 2, 3], [4, 5, 6]])
    weights = np.array([[0.5, 0.25, 0.0], [1.0, 0.0, 2.0]], np.float32)
    data = [Datum(tokens=tokens, inputs={"target_tokens": targets, "weights": weights})]
    asked = ForwardBackward(data=data, loss="cross_entropy", config={}, forward_only=False)
    logp = [[-1.0, -2.0, -3.0], [-0.5, -0.25, -4.0]]
    value, grad = computed(asked, logp)
    assert value == pytest.approx(-float((np.array(logp) * weights).sum()))
    assert grad == pytest.approx((-weights).flatten().tolist())


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (request("pg", **GIVEN), "pg: there is no such loss"),
        (request("custom", **GIVEN), "at the client"),
        (request("ppo", logprobs=OLD), r"data\[0\]: advantages is missing"),
        (request("ppo", logprobs=OLD[:3], advantages=ADVANTAGES), r"data\[0\].logprobs: has the shape \[3\]"),
        (request("ppo", {"beta": 0.1}, **GIVEN), "ppo has no beta; it has clip_low_threshold"),
        (request("dro", {"beta": "much"}, **GIVEN), "loss_fn_config.beta: must be a finite number"),
        (request("ppo", **GIVEN, mask=[1] * 5), r"data\[0\].mask: ppo would ignore it; it takes target_tokens"),
        (request("importance_sampling", **GIVEN, weights=[1] * 5), r"data\[0\].weights: importance_sampling would"),
        (request("ppo", {"clip_low_threshold": 1.3}, **GIVEN), "clip_low_threshold 1.3 is above .* 1.2"),
        (request("cispo", **GIVEN, clip_low_threshold=[0, 0, 0, 9, 0]), "clip_low_threshold 9 is above"),
        (request("cispo", {"clip_low_threshold": -2, "clip_high_threshold": -1}, **GIVEN), "high_threshold -1 is neg"),
    ],
)
def test_what_a_loss_lacks_is_said(asked: ForwardBackward, said: str) -> None:
    with pytest.raises(BirlError, match=said):
        losses.check(asked)


def test_bounds_of_a_datum_fit_it_and_gspo_has_one_of_each() -> None:
    for loss, bound, said in (("gspo", [0.5, 0.6, 0.7], "one ratio"), ("ppo", [[0.5, 0.5]] * 3, "has the shape")):
        datum = Datum(
            tokens=np.array([5, 6, 7]),
            inputs={"target_tokens": np.array([6, 7, 8]), "logprobs": np.zeros(3), "advantages": np.ones(3),
                    "clip_low_threshold": np.array(bound)},
        )  # fmt: skip
        with pytest.raises(BirlError, match=rf"data\[0\].clip_low_threshold: .*{said}"):
            losses.check(ForwardBackward(data=[datum], loss=loss, config={}, forward_only=False))
