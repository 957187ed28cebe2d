"""Routes of a mixture-of-experts model, recorded and replayed by hooks on its routers.

transformers' routers return (logits [T, E], weights [T, k], chosen [T, k]) for T tokens; the k largest are chosen. A
forward hook of each router reads that, and may replace the choice: the weights are then those that the router gives to
the new experts, with their gradient.

A route is the choice for one token in all L layers, as bytes [L * k]: one for each expert, or two if there are more
than 255 experts. All ones: unknown.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from birl.errors import BirlError

# router class -> whether the weights of the chosen experts are divided by their sum
NORMALISED: dict[str, Callable[[Any], bool]] = {
    "Qwen3MoeTopKRouter": lambda router: router.norm_topk_prob,
    "Qwen2MoeTopKRouter": lambda router: router.norm_topk_prob,
    "OlmoeTopKRouter": lambda router: router.norm_topk_prob,
    "MixtralTopKRouter": lambda router: True,
}

# layer -> its router's logits [T, E], and the chosen experts [T, k]
Seen = dict[int, tuple[Tensor, Tensor]]

MADE: WeakKeyDictionary[nn.Module, "Routing"] = WeakKeyDictionary()


class Routing:
    """The routers of one model, in order of their layers. Outside of its context managers it does nothing."""

    def __init__(self, model: nn.Module) -> None:
        routers = routers_of(model)
        if not routers:
            raise BirlError(
                f"{type(model).__name__} has no routers that birl knows ({', '.join(NORMALISED)}). Set "
                "learner.router_aux_coef=0 and algorithm.router_replay=none."
            )
        self.layers, self.k, self.experts = len(routers), routers[0].top_k, routers[0].num_experts
        self.dtype = torch.uint8 if self.experts <= 255 else torch.int16
        self.forced: Tensor | None = None
        self.seen: Seen | None = None
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._choose, layer))

    @contextmanager
    def replaying(self, routes: Tensor | None) -> Iterator[None]:
        """Context in which tokens take these routes [T, bytes]. It must include a recomputing backward pass."""
        before, self.forced = self.forced, None if routes is None else self.chosen(routes)
        try:
            yield
        finally:
            self.forced = before

    @contextmanager
    def watching(self) -> Iterator[Seen]:
        """Context in which the routers' results are recorded."""
        before, self.seen = self.seen, {}
        try:
            yield self.seen
        finally:
            self.seen = before

    def routes(self, seen: Seen) -> Tensor:
        """The choices that `watching` recorded, as routes [T, bytes] on the CPU."""
        chosen = torch.stack([seen[layer][1] for layer in range(self.layers)], 1)
        return chosen.to("cpu", self.dtype).flatten(1).view(torch.uint8)

    def chosen(self, routes: Tensor) -> Tensor:
        """Routes [T, bytes] -> experts [T, L, k] int64, -1 where unknown. Raises `BirlError` for another model's."""
        size = self.layers * self.k * self.dtype.itemsize
        if routes.shape[1] != size:
            raise BirlError(f"Routes of {routes.shape[1]} bytes a token, where this model's have {size}.")
        result = routes.contiguous().view(self.dtype).view(len(routes), self.layers, self.k).long()
        return result.masked_fill(result == 255, -1) if self.dtype == torch.uint8 else result

    def _choose(self, layer: int, router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        logits, weights, chosen = output
        if self.forced is not None:
            forced = self.forced[:, layer]
            chosen = torch.where(forced >= 0, forced, chosen)
            weights = routed(router, logits, chosen).to(weights.dtype)
        if self.seen is not None:
            self.seen[layer] = logits, chosen
        return logits, weights, chosen


def routed(router: Any, logits: Tensor, chosen: Tensor) -> Tensor:
    """The weights [T, k] float32 that a router gives to replayed experts (R3, arXiv:2510.11370, its replayed gating:
    the softmax over the chosen ones; over all of them if the model does not normalise)."""
    weights = logits.float().softmax(-1).gather(1, chosen)
    return weights / weights.sum(-1, keepdim=True) if NORMALISED[type(router).__name__](router) else weights


def routers_of(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if type(m).__name__ in NORMALISED]


def routing_for(model: nn.Module) -> Routing:
    """The model's routing, made once, so that the engine and the learner share it. Raises `BirlError`."""
    if model not in MADE:
        MADE[model] = Routing(model)
    return MADE[model]


def load_counts(seen: Seen, copies: Tensor) -> Tensor:
    """How often each expert was chosen, [L, E] float64; token t counts copies[t] times."""
    result = []
    for _, (logits, chosen) in sorted(seen.items()):
        counts = torch.zeros(logits.shape[1], dtype=torch.float64, device=logits.device)
        result.append(counts.index_add_(0, chosen.reshape(-1), copies.double().repeat_interleave(chosen.shape[1])))
    return torch.stack(result)


def balance(seen: Seen, copies: Tensor, counts: Tensor) -> Tensor:
    """E sum_i f_i P_i, the mean over layers (Switch Transformer, arXiv:2101.03961 eq. 4 to 6): 1 if all experts are
    used equally, at most E / k.

    f_i: the share of expert i in all choices `counts` [L, E] of the whole optimizer step; no gradient. P_i: its mean
    probability over the tokens of the step. Returns, differentiably, the contribution of the tokens in `seen`, each
    counted copies[t] times: the contributions of all micro-batches add up to the whole."""
    choices = counts.sum(1, keepdim=True)  # of each layer: tokens x k
    k = seen[0][1].shape[1]
    shares = (counts / choices).float()
    parts = [
        (copies.float() @ logits.float().softmax(-1)) @ shares[layer] * (k / choices[layer, 0]).float()
        for layer, (logits, _) in sorted(seen.items())
    ]
    return counts.shape[1] * torch.stack(parts).mean()
