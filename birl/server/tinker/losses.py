"""Losses of Tinker's API: sums over all positions of all data, as defined in Tinker's documentation.

    cross_entropy         -sum w_t log p_t;  targets may be [T] or [T, K]
    importance_sampling   -sum r_t A_t,  r_t = p_t / q_t,  log q_t = logprobs
    ppo                   -sum min(r_t A_t, clip(r_t, low, high) A_t);  0.8 and 1.2
    cispo                 -sum sg[clip(r_t, low, high)] A_t log p_t;  0.8 and 1.2
    dro                   -sum (log p_t A_t - beta / 2 (log p_t - log q_t)^2);  beta 0.05
    gspo                  ppo with the geometric mean of r over sequence_ratio_mask in place of r_t (arXiv:2507.18071)
    stable_reinforce      -sum sg[min(r_t, 1)] A_t log p_t + kl_coeff / 2 (log p_t - log q_t)^2;  kl_coeff 0

The last one's definition is birl's own: Tinker's is not published. On-policy the gradient of all but the first is
REINFORCE's. `clip_low_threshold` and `clip_high_threshold` are bounds of the ratio itself; they may also be given in a
datum, one for each position. Shapes: T positions of several data, concatenated; of one datum if its bounds or its ratio
are for all of it (gspo).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from birl.algorithms.surrogates import LOG_LIMIT, Surrogate, cispo, gspo, importance
from birl.errors import BirlError
from birl.server.tinker.requests import Datum, ForwardBackward

Config = Mapping[str, float | str]


class Given(NamedTuple):
    """Log-probs of sampling, advantages, bounds of the ratio, and ratio mask, [T] float32 each."""

    logprobs: Tensor
    advantages: Tensor
    low: Tensor
    high: Tensor
    ratio_mask: Tensor


def importance_sampling(logp: Tensor, given: Given, config: Config) -> Tensor:
    return importance(logp, given.logprobs, given.advantages, _one_sample(logp)).loss.sum()


def ppo(logp: Tensor, given: Given, config: Config) -> Tensor:
    ratio = (logp - given.logprobs).clamp(max=LOG_LIMIT).exp()
    bounded = torch.minimum(torch.maximum(ratio, given.low), given.high)
    return -torch.minimum(ratio * given.advantages, bounded * given.advantages).sum()


def bounded_reinforce(logp: Tensor, given: Given, config: Config) -> Tensor:
    """cispo, with bounds of the ratio for each position."""
    ratio = (logp - given.logprobs).detach().clamp(max=LOG_LIMIT).exp()
    bounded = torch.minimum(torch.maximum(ratio, given.low), given.high)
    return -(bounded * given.advantages * logp).sum()


def dro(logp: Tensor, given: Given, config: Config) -> Tensor:
    beta = number(config, "beta", 0.05)
    return -(logp * given.advantages - 0.5 * beta * (logp - given.logprobs).square()).sum()


def sequence_ratio(logp: Tensor, given: Given, config: Config) -> Tensor:
    """gspo over the positions of `sequence_ratio_mask`; others are ignored."""
    chosen = given.ratio_mask > 0
    if not bool(chosen.any()):
        return (logp * 0.0).sum()
    own, old, advantages = logp[chosen], given.logprobs[chosen], given.advantages[chosen]
    low, high = float(given.low[0]), float(given.high[0])
    result: Surrogate = gspo(own, old, advantages, _one_sample(own), clip_low=1 - low, clip_high=high - 1)
    return result.loss.sum()


def stable_reinforce(logp: Tensor, given: Given, config: Config) -> Tensor:
    truncated = cispo(logp, given.logprobs, given.advantages, _one_sample(logp), clip_low=1.0, clip_high=0.0).loss.sum()
    distance = (logp - given.logprobs) * (given.ratio_mask > 0)
    return truncated + 0.5 * number(config, "kl_coeff", 0.0) * distance.square().sum()


class Kind(NamedTuple):
    """A loss of log-probs [T]: its function, the keys of its configuration, the default bounds of its ratio, and
    whether it takes a mask."""

    loss: Callable[[Tensor, Given, Config], Tensor]
    keys: tuple[str, ...] = ()
    low: float = 0.8
    high: float = 1.2
    masked: bool = False

    @property
    def inputs(self) -> dict[str, bool]:
        """Inputs of a datum, and whether each is required."""
        result = dict.fromkeys(("target_tokens", "logprobs", "advantages"), True)
        return result | dict.fromkeys([*BOUNDS] * (self.keys == BOUNDS) + [MASK] * self.masked, False)


BOUNDS, MASK = ("clip_low_threshold", "clip_high_threshold"), "sequence_ratio_mask"
POLICY = {
    "importance_sampling": Kind(importance_sampling),
    "ppo": Kind(ppo, BOUNDS),
    "cispo": Kind(bounded_reinforce, BOUNDS),
    "dro": Kind(dro, ("beta",)),
    "gspo": Kind(sequence_ratio, BOUNDS, 1 - 3e-4, 1 + 4e-4, masked=True),
    "stable_reinforce": Kind(stable_reinforce, ("kl_coeff",), masked=True),
}
NAMES = ("cross_entropy", *POLICY)


def check(request: ForwardBackward) -> None:
    """Raise `BirlError` if the loss is unknown, or an input is missing or has another shape."""
    if request.loss == "custom":
        raise BirlError(
            "loss_fn=custom: this server does not run uploaded losses; forward_backward_custom computes them at the "
            "client, from a forward pass, which needs nothing from the server."
        )
    if request.loss not in NAMES:
        raise BirlError(f"loss_fn={request.loss}: there is no such loss; there are {', '.join(NAMES)}.")
    known = POLICY[request.loss].keys if request.loss in POLICY else ()
    for key in request.config:
        if key not in known:
            raise BirlError(f"loss_fn_config: {request.loss} has no {key}; it has {', '.join(known) or 'no keys'}.")
        number(request.config, key, 0.0)
    takes = POLICY[request.loss].inputs if request.loss in POLICY else {"target_tokens": True, "weights": False}
    for i, datum in enumerate(request.data):
        if request.loss in POLICY and datum.targets.shape[1] != 1:
            raise BirlError(f"data[{i}].target_tokens: {request.loss} takes one target in each place.")
        extra = sorted(datum.inputs.keys() - takes.keys())
        if extra and not request.forward_only:
            raise BirlError(f"data[{i}].{extra[0]}: {request.loss} would ignore it; it takes {', '.join(takes)}.")
        for name, must in takes.items():
            values = datum.inputs.get(name)
            if values is None and must:
                raise BirlError(f"data[{i}]: {name} is missing, which {request.loss} needs.")
            if values is not None and values.size != datum.targets.size:
                want = list(datum.inputs["target_tokens"].shape)
                raise BirlError(f"data[{i}].{name}: has the shape {list(values.shape)}, and the targets {want}.")
        if BOUNDS[0] in takes:
            _check_bounds(request, datum, f"data[{i}]")


def _check_bounds(request: ForwardBackward, datum: Datum, what: str) -> None:
    kind = POLICY[request.loss]
    low, high = (
        datum.inputs.get(name, np.full(1, number(request.config, name, otherwise))).reshape(-1)
        for name, otherwise in zip(BOUNDS, (kind.low, kind.high), strict=True)
    )
    if (high < 0).any():
        raise BirlError(f"{what}: {BOUNDS[1]} {high.min():g} is negative; it bounds a ratio of probabilities.")
    if (low > high).any():
        raise BirlError(f"{what}: {BOUNDS[0]} {low.max():g} is above {BOUNDS[1]} {high.min():g}.")
    for name, values in zip(BOUNDS, (low, high), strict=True):
        if request.loss == "gspo" and (values != values[0]).any():
            raise BirlError(f"{what}.{name}: gspo has one ratio for all places, so its bound must be one number.")


def of_data(request: ForwardBackward, data: Sequence[Datum], logp: Sequence[Tensor]) -> Tensor:
    """The summed loss of data, given their log-probs [T, K] each."""
    places = torch.cat([own.reshape(-1) for own in logp])
    if request.loss == "cross_entropy":
        return -(places * column(data, "weights", 1.0, places)).sum()
    kind, config = POLICY[request.loss], request.config
    if request.loss != "gspo":  # gspo's bounds are per datum
        return kind.loss(places, given(data, places, kind, config), config)
    rows = zip(data, logp, strict=True)
    return torch.stack([kind.loss(own[:, 0], given([datum], own, kind, config), config) for datum, own in rows]).sum()


def given(data: Sequence[Datum], like: Tensor, kind: Kind, config: Config) -> Given:
    advantages = column(data, "advantages", 0.0, like)
    low, high = (
        column(data, key, number(config, key, otherwise), like)
        for key, otherwise in zip(BOUNDS, (kind.low, kind.high), strict=True)
    )
    mask = column(data, MASK, np.nan, like)
    mask = torch.where(mask.isnan(), (advantages != 0).float(), mask)
    return Given(column(data, "logprobs", 0.0, like), advantages, low, high, mask)


def column(data: Sequence[Datum], name: str, otherwise: float, like: Tensor) -> Tensor:
    """An input of all data, concatenated, float32, on the device of `like`; `otherwise` for a datum without it."""
    if not any(name in datum.inputs for datum in data):
        return torch.full(like.shape[:1], otherwise, dtype=torch.float32, device=like.device)
    parts = [
        datum.inputs[name].reshape(-1) if name in datum.inputs else np.full(datum.targets.size, otherwise, np.float32)
        for datum in data
    ]
    return torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(like.device)


def number(config: Config, key: str, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, float | int) or not np.isfinite(value):
        raise BirlError(f"loss_fn_config.{key}: must be a finite number, not {value!r}.")
    return float(value)


def _one_sample(logp: Tensor) -> Tensor:
    return torch.zeros(len(logp), dtype=torch.int64, device=logp.device)
