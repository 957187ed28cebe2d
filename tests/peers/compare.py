"""Random inputs, and what one comparison with a peer is: their tensors beside ours."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from birl.algorithms.advantages import EPS, group_mean
from birl.algorithms.policy import policy_loss
from birl.algorithms.reduce import DENOMINATORS
from birl.algorithms.surrogates import Surrogate

SEEDS = range(12)
LIMIT = 1e-6  # relative to the largest number of the tensor


@dataclass(slots=True)
class Pair:
    """Value and gradient by the peer and by birl. `plain`: birl's without the correction for the stated difference."""

    theirs: tuple[Tensor, ...]
    ours: tuple[Tensor, ...]
    plain: tuple[Tensor, ...] = ()


@dataclass(slots=True)
class Check:
    what: str
    peer: str
    function: str
    run: Callable[[int], Pair]
    differs: str = ""  # what differs on purpose, and who is right by the paper; empty: nothing may differ


CHECKS: list[Check] = []


def check(what: str, peer: str, function: str, differs: str = "") -> Callable[[Callable[[int], Pair]], None]:
    """Registers a function of a seed."""

    def registered(run: Callable[[int], Pair]) -> None:
        CHECKS.append(Check(what, peer, function, run, differs))

    return registered


def difference(theirs: Tensor, ours: Tensor) -> float:
    """max |theirs - ours| / max |either|; 0 where both are 0."""
    theirs, ours = theirs.detach().double(), ours.detach().double()
    if theirs.shape != ours.shape:
        raise ValueError(f"shapes {tuple(theirs.shape)} and {tuple(ours.shape)}")
    if not theirs.numel():
        return 0.0
    gap, size = (theirs - ours).abs().max(), torch.maximum(theirs.abs().max(), ours.abs().max())
    return float("inf") if not gap.isfinite() else float(gap / size) if size else 0.0


def both(function: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """function(at), and the gradient of its sum."""
    at = at.detach().clone().requires_grad_()
    value = function(at)
    (gradient,) = torch.autograd.grad(value.sum(), at, allow_unused=True)
    return value.detach(), torch.zeros_like(at) if gradient is None else gradient


class Case:
    """A batch, padded as the peers have it, [B, T], and packed as birl has it, [N].

    Answers of random length begin with trained tokens, with holes (what a tool wrote) where `holes`; groups have 2 to 5
    answers, or `size`, and with `alone` the first group has one.
    """

    def __init__(self, seed: int, *, size: int = 0, holes: bool = True, alone: bool = False, far: float = 0.4) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        sizes = [size or self.integer(2, 5) for _ in range(self.integer(2, 5))]
        if alone:
            sizes[0] = 1
        self.group = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        self.group_size = torch.tensor(sizes)[self.group].double()
        self.width, self.limit = 12, 16
        self.answer_length = torch.tensor([self.integer(1, self.width) for _ in self.group])
        inside = torch.arange(self.width) < self.answer_length[:, None]
        hole = self.uniform(len(self.group), self.width) < 0.25
        hole[:, 0] = False
        self.inside = inside
        self.mask = inside & ~hole if holes else inside
        self.lengths = self.mask.sum(1)
        self.sample = self.mask.nonzero()[:, 0]
        self.logp = -self.uniform(*self.mask.shape) * 5 - 0.05
        self.old = (self.logp + far * self.normal(*self.mask.shape)).clamp(max=-1e-3)
        self.ref = (self.logp + far * self.normal(*self.mask.shape)).clamp(max=-1e-3)
        self.rewards = self.normal(len(self.group))
        self.advantage = self.normal(len(self.group))  # of each answer

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float64)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    @property
    def advantages(self) -> Tensor:
        """[B, T]"""
        return self.advantage[:, None].expand(self.mask.shape).clone()

    def flat(self, padded: Tensor) -> Tensor:
        """[B, T] -> [N]"""
        return padded[self.mask]

    def at_the_end(self, values: Tensor) -> Tensor:
        """[B] -> [B, T], each at its answer's last trained token."""
        last = torch.where(self.mask, torch.arange(self.width), -1).amax(1)
        found = values.new_zeros(self.mask.shape)
        found[torch.arange(len(values)), last] = values
        return found

    def weights(self, denominator: str, limit: int | None = None) -> Tensor:
        """[N]"""
        by_sample = DENOMINATORS[denominator](self.lengths.tolist(), self.group.tolist(), limit or self.limit)
        return torch.tensor(by_sample, dtype=torch.float64)[self.sample]

    def theirs(self, loss: Callable[[Tensor], Tensor], at: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """A peer's loss of [B, T] -> value, gradient [N]; there must be none at tokens that are not trained."""
        value, gradient = both(loss, self.logp if at is None else at)
        if bool((gradient[~self.mask] != 0).any()):
            raise ValueError("a gradient at a token that is not trained")
        return value, self.flat(gradient)

    def ours(
        self,
        surrogate: Callable[..., Surrogate],
        denominator: str = "token",
        *,
        limit: int | None = None,
        advantages: Tensor | None = None,
        at: Tensor | None = None,
        options: dict | None = None,
        **parts,
    ) -> tuple[Tensor, Tensor]:
        """birl's loss of [N], composed by `policy_loss` -> value, gradient [N]."""
        advantages = self.advantages if advantages is None else advantages

        def loss(logp: Tensor) -> Tensor:
            return policy_loss(
                logp,
                torch.zeros_like(logp),
                old_logp=self.flat(self.old),
                advantages=self.flat(advantages),
                sample=self.sample,
                weights=self.weights(denominator, limit),
                surrogate=lambda *given: surrogate(*given, **(options or {})),
                **parts,
            )[0]

        return both(loss, self.flat(self.logp if at is None else at))


def rescaled(scaled: Tensor, deviation: Tensor, count: Tensor | int, *, eps: float, inside: bool = False) -> Tensor:
    """x / (s + EPS), birl's, -> with the sample deviation s sqrt(n / (n - 1)) and the peer's eps, under the root where
    `inside`."""
    count = torch.as_tensor(count, dtype=torch.float64)
    sample = deviation * (count / (count - 1)).sqrt()
    return scaled * (deviation + EPS) / ((sample.square() + eps).sqrt() if inside else sample + eps)


def deviation_in_group(values: Tensor, group: Tensor) -> Tensor:
    """Population deviation of each one's group. [E] -> [E]"""
    return group_mean((values - group_mean(values, group)[group]).square(), group).sqrt()[group]


def deviation(values: Tensor) -> Tensor:
    return (values - values.mean()).square().mean().sqrt()


def pairs(check: Check) -> Iterator[Pair]:
    for seed in SEEDS:
        yield check.run(seed)
